"""Plans to inspect, by name: their settings for the passes, and the report on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from inductor_passes.ir.buckets import Patterns, assign_by_module
from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.simulate import memory
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.rehearsal import Auto, Settings
from simplefsdp.inspection.explain import Limits
from simplefsdp.inspection.modules import modules_of_step
from simplefsdp.inspection.options import OwnPlan, PlanName
from simplefsdp.inspection.report import BY_CONFIG, BY_TRACE, PlanReport, report_graph, traced_flops
from simplefsdp.inspection.subject import Subject
from simplefsdp.simulation.prediction import GraphPrediction, predict_step


def settings_of(
    name: OwnPlan,
    fqns: Sequence[str],
    cluster: Cluster,
    budget_nbytes: int | None,
    buckets: Patterns | None = None,
) -> Settings | None:
    """The settings of our passes for a plan; ``budget_nbytes`` is for the automatic planners, and
    ``buckets`` for manual's, see :func:`~inductor_passes.ir.buckets.assign_by_module`."""
    if name == "none":
        return None
    assignment = assign_by_module(list(fqns), buckets if name == "manual" else None)
    if name == "manual":
        return Settings(assignment)
    planner: Literal["greedy", "search"] = "greedy" if name == "greedy" else "search"
    return Settings(assignment, auto=Auto(cluster, budget_nbytes, planner))


def inspect_plan(
    name: PlanName,
    subject: Subject,
    cluster: Cluster,
    budget_nbytes: int | None = None,
    buckets: Patterns | None = None,
) -> PlanReport:
    """Predict a traced step under a plan, and explain the result; call this in the process group in
    which the step was traced. ``budget_nbytes`` is the memory budget of automatic plans, see
    :class:`inductor_passes.rehearsal.Auto`; ``buckets`` are those of the manual one."""
    traced, nbytes = subject.step, subject.parameters_nbytes
    match name:
        case "torch-manual" | "torch-auto":
            from simplefsdp.inspection.torch_passes import predict_torch_step

            step = predict_torch_step(name, traced, cluster, nbytes)
            limits = {graph.name: Limits(placed_by=name) for graph in step.graphs}
        case _:
            settings = settings_of(name, traced.fqns, cluster, budget_nbytes, buckets)
            step = predict_step(traced, settings, cluster, nbytes)
            limits = {graph.name: limits_of(graph, settings) for graph in step.graphs}
    module_of = modules_of_step(traced)
    graphs = {
        graph.name: report_graph(graph, limits[graph.name], module_of[graph.name])
        for graph in step.graphs
    }
    flops, peak_tflops = traced_flops(step.graphs[0].cost)
    flops_are = BY_TRACE
    if subject.flops is not None:
        flops, flops_are = subject.flops, BY_CONFIG
    return PlanReport(name, step, graphs, subject.tokens, flops, flops_are, peak_tflops)


def limits_of(graph: GraphPrediction, settings: Settings | None) -> Limits:
    """The limits under which the passes arranged a graph."""
    if settings is None or not settings.reorder:
        return Limits()
    if settings.auto is None:
        return Limits(settings.policy)
    program, _ = rank_invariant(graph.after, graph.cost)
    # For a graph whose plan was made earlier only the user's budget is known, if there is one.
    budget = graph.budget_nbytes or settings.auto.budget_nbytes
    return Limits(settings.policy, budget, memory(program).live_nbytes)
