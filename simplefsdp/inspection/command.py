"""``simplefsdp inspect``: from the command line to a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from inductor_passes.machine.cluster import Cluster
from simplefsdp.inspection.options import (
    FILES,
    InspectOptions,
    check,
    parallel_options,
    parse,
    recomputed,
)
from simplefsdp.inspection.working import working
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
        return _measured(options)
    if options.fit or options.sweep:
        from simplefsdp.inspection.sweep_command import run as run_sweep

        return run_sweep(options, cluster)
    with user_errors():
        _require(options)
    from simplefsdp.launcher.ranks import fake_ranks

    with fake_ranks(options.ranks):
        subject = _trace(options, cluster)
        plans = _plans(options, cluster, subject)
    _tell(options, cluster, subject, plans)
    return 0


def _require(options: InspectOptions) -> None:
    """See that the passes of torch's that are asked for are there, before minutes of tracing."""
    from simplefsdp.inspection.options import TorchPlan
    from simplefsdp.inspection.torch_passes import require

    for name in (options.bucketing, *options.compare):
        if name in get_args(TorchPlan):
            require(name)  # type: ignore[arg-type]


def _measured(options: InspectOptions) -> int:
    """Report on traces of a run."""
    from simplefsdp.inspection.measured import measure, measured_document, print_measured
    from simplefsdp.inspection.profile import read_profiles
    from simplefsdp.inspection.tables import console

    with user_errors():
        profiles = [profile for path in options.trace for profile in read_profiles(path)]
    reports = [measure(profile) for profile in profiles]
    print_measured(console(), reports)
    if options.json is not None:
        found = {"version": 1, "ranks": [measured_document(report) for report in reports]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {options.json}")
    return 0


def _trace(options: InspectOptions, cluster: Cluster) -> Subject:
    from simplefsdp.inspection.subject import trace_llama, trace_target
    from simplefsdp.models.layout import make_mesh, plan_layout

    what = options.model or options.target
    with working(f"tracing {what} as one of {options.ranks} ranks"), user_errors():
        if options.target is not None and options.input is not None:
            return trace_target(
                options.target, options.input, options.ranks, averages=cluster.averages
            )
        model = ModelOptions(options.model or "", recomputed(options))
        parallel = parallel_options(options)
        layout = plan_layout(parallel, options.ranks, cluster.ranks_per_node)
        mesh = make_mesh(layout, parallel, "cpu")
        return trace_llama(
            model,
            parallel,
            mesh,
            layers=options.layers,
            seq_len=options.seq_len or _default_seq_len(model),
            batch_size=options.batch_size,
            averages=cluster.averages,
        )


def _default_seq_len(model: ModelOptions) -> int:
    from simplefsdp.models.configs import config_of

    return min(8192, config_of(model.model).max_seq_len)


def _plans(options: InspectOptions, cluster: Cluster, subject: Subject) -> list[PlanReport]:
    from simplefsdp.inspection.plans import inspect_plan

    budget = options.memory_budget_gb
    budget_nbytes = None if budget is None else int(budget * 1e9)
    plans = []
    for name in dict.fromkeys((options.bucketing, *options.compare)):
        with working(f"planning and simulating {name}"), user_errors():
            plans.append(inspect_plan(name, subject, cluster, budget_nbytes))
    return plans


def _tell(
    options: InspectOptions, cluster: Cluster, subject: Subject, plans: list[PlanReport]
) -> None:
    from simplefsdp.inspection.tables import console, print_plans

    heading = f"{subject.name} on {options.ranks} ranks of {cluster.name}"
    out = console()
    print_plans(out, plans, heading)
    if cluster.averages:
        out.print("traced on a CPU: its attention is priced as a GPU's, its kernels as Triton's")
    if options.diff:
        print_diff(plans[0])
    for name in FILES:
        path: Path | None = getattr(options, name)
        if path is not None:
            path.write_text(_text(name, options, cluster, subject, plans))
            out.print(f"wrote {path}", soft_wrap=True)


def _text(
    name: str,
    options: InspectOptions,
    cluster: Cluster,
    subject: Subject,
    plans: list[PlanReport],
) -> str:
    """What goes into the file of an option."""
    if name == "json":
        from simplefsdp.inspection.document import document

        found = document(plans, subject=subject.name, ranks=options.ranks, cluster=cluster.name)
        return json.dumps(found, indent=1) + "\n"
    if name == "html":
        from simplefsdp.inspection.page import page

        return page(plans, f"{subject.name} on {options.ranks} ranks of {cluster.name}")
    if name == "perfetto":
        from simplefsdp.inspection.perfetto import trace_events

        return json.dumps(trace_events(plans))
    from simplefsdp.inspection.diff import texts

    graphs = [graph.prediction for graph in plans[0].graphs.values()]
    return "\n".join(f"# {g.name}\n{texts(g.before, g.after)}" for g in graphs)


def print_diff(plan: PlanReport) -> None:
    """What a plan merged and moved."""
    from simplefsdp.inspection.diff import describe_changes

    for graph in plan.graphs.values():
        changes = describe_changes(graph.prediction.before, graph.prediction.after)
        print(f"\n{graph.name}, what changed:")
        print("\n".join(f"  {line}" for line in changes) or "  nothing")
