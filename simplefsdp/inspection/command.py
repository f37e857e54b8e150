"""``simplefsdp inspect``: from the command line to a report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from inductor_passes.machine.cluster import Cluster
from simplefsdp.inspection.options import (
    InspectOptions,
    check,
    parallel_options,
    parse,
    recomputed,
)
from simplefsdp.inspection.terminal import console, save, save_json, working
from simplefsdp.launcher.errors import user_errors
from simplefsdp.models.options import ModelOptions

if TYPE_CHECKING:
    from simplefsdp.inspection.report import PlanReport
    from simplefsdp.inspection.subject import Subject


def run(args: list[str]) -> int:
    """Run ``simplefsdp inspect *args``; return the exit code."""
    options = parse(args)
    with user_errors():
        cluster = check(options)
    if options.trace:
        _measured(options)
    elif options.fit or options.sweep:
        from simplefsdp.inspection.sweep_command import run as run_sweep

        run_sweep(options, cluster)
    else:
        _predicted(options, cluster)
    return 0


def _predicted(options: InspectOptions, cluster: Cluster) -> None:
    """Report on a step that is not run."""
    from simplefsdp.inspection.plans import inspect_plan
    from simplefsdp.inspection.torch_passes import require
    from simplefsdp.launcher.ranks import fake_ranks

    names = dict.fromkeys((options.bucketing, *options.compare))
    with user_errors():
        require(names)  # before minutes of tracing
    budget = options.memory_budget_gb
    budget_nbytes = None if budget is None else int(budget * 1e9)
    buckets = [one.split("+") if "+" in one else one for one in options.buckets] or None
    plans = []
    with fake_ranks(options.ranks):
        subject = _trace(options, cluster)
        for name in names:
            with working(f"planning and simulating {name}"), user_errors():
                plans.append(inspect_plan(name, subject, cluster, budget_nbytes, buckets))
    _tell(options, cluster, subject, plans)


def _measured(options: InspectOptions) -> None:
    """Report on traces of a run."""
    from simplefsdp.inspection.measured import measure, measured_document, print_measured
    from simplefsdp.inspection.profile import read_profiles

    with user_errors():
        profiles = [profile for path in options.trace for profile in read_profiles(path)]
    reports = [measure(profile) for profile in profiles]
    out = console()
    print_measured(out, reports)
    found = {"version": 1, "ranks": [measured_document(report) for report in reports]}
    save_json(out, options.json, found)


def _trace(options: InspectOptions, cluster: Cluster) -> Subject:
    from simplefsdp.inspection.subject import Target, trace_llama, trace_target
    from simplefsdp.models.configs import config_of
    from simplefsdp.models.layout import make_mesh, plan_layout

    what = options.model or options.target
    with working(f"tracing {what} as one of {options.ranks} ranks"), user_errors():
        if options.target is not None and options.input is not None:
            target = Target(options.target, options.input)
            return trace_target(target, options.ranks, averages=cluster.averages)
        model = ModelOptions(options.model or "", recomputed(options))
        parallel = parallel_options(options)
        layout = plan_layout(parallel, options.ranks, cluster.ranks_per_node)
        mesh = make_mesh(layout, parallel, "cpu")
        return trace_llama(
            model,
            parallel,
            mesh,
            layers=options.layers,
            seq_len=options.seq_len or min(8192, config_of(model.model).max_seq_len),
            batch_size=options.batch_size,
            averages=cluster.averages,
        )


def _tell(
    options: InspectOptions, cluster: Cluster, subject: Subject, plans: list[PlanReport]
) -> None:
    from simplefsdp.inspection.diff import texts
    from simplefsdp.inspection.document import document
    from simplefsdp.inspection.page import page
    from simplefsdp.inspection.perfetto import trace_events
    from simplefsdp.inspection.tables import print_plans

    heading = f"{subject.name} on {options.ranks} ranks of {cluster.name}"
    out = console()
    print_plans(out, plans, heading)
    if cluster.averages:
        out.print("traced on a CPU: its attention is priced as a GPU's, its kernels as Triton's")
    if options.diff:
        print_diff(plans[0])
    found = document(plans, subject=subject.name, ranks=options.ranks, cluster=cluster.name)
    save_json(out, options.json, found)
    if options.html is not None:
        save(out, options.html, page(plans, heading))
    if options.perfetto is not None:
        save(out, options.perfetto, json.dumps(trace_events(plans)))
    if options.graph is not None:
        graphs = [graph.prediction for graph in plans[0].graphs.values()]
        programs = (f"# {g.name}\n{texts(g.before, g.after)}" for g in graphs)
        save(out, options.graph, "\n".join(programs))


def print_diff(plan: PlanReport) -> None:
    from simplefsdp.inspection.diff import describe_changes

    for graph in plan.graphs.values():
        changes = describe_changes(graph.prediction.before, graph.prediction.after)
        print(f"\n{graph.name}, what changed:")
        print("\n".join(f"  {line}" for line in changes) or "  nothing")
