"""``simplefsdp inspect``: from the command line to a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inductor_passes.cluster import Cluster
from inductor_passes.cluster_file import as_cluster
from simplefsdp.models.activation_checkpointing import ActivationCheckpointing
from simplefsdp.placement import Mode
from simplefsdp.train.config import ModelOptions, ParallelOptions
from simplefsdp.train.errors import UserError, user_errors

if TYPE_CHECKING:
    from simplefsdp.inspection.report import PlanReport
    from simplefsdp.inspection.subject import Subject

SUMMARY = "see what is merged, when it runs, what is exposed and why"

_DESCRIPTION = """See what the compiler does with a model's collectives: per bucket when it runs, what
hides it, what is exposed, and why; and memory over time. No GPU and no cluster needed: the step is
traced with tensors that have no memory, and simulated on what --cluster is known to do.

--target is a function that returns a model wrapped by simple_fsdp (it gets a mesh of all ranks if it
takes an argument), and --input one that returns its inputs on a rank.

examples:
  simplefsdp inspect --model debug --ranks 4 --cluster cpu-gloo --seq-len 128 --batch-size 2
  simplefsdp inspect --model 8b --layers 2 --ranks 64 --compare none manual --json report.json
  simplefsdp inspect --model 8b --layers 1 --ranks 8 --bucketing manual --diff --graph graphs.txt
  simplefsdp inspect --model 8b --layers 4 --ranks 64 --compare manual --html report.html
  simplefsdp inspect --target simplefsdp.inspection.example:build_model --input simplefsdp.inspection.example:example_batch --ranks 8
"""  # noqa: E501 - examples are one line each, to be copied

_OF_MODEL = (
    "layers",
    "seq_len",
    "batch_size",
    "activation_checkpointing",
    "mode",
    "shard_size",
    "tp",
    "mixed_precision",
    "reshard_after_forward",
)
_FILES = ("json", "html", "perfetto", "graph")
PlanName = Literal["none", "manual", "auto", "greedy"]


@dataclass(frozen=True)
class InspectOptions:
    """What to inspect, and where the report goes."""

    model: str | None = None
    """A Llama 3 of ours: debug, 160m, 1b, 8b, 70b or 405b."""
    target: str | None = None
    """A model of yours: module:function."""
    input: str | None = None
    """What --target's model is called with, on one rank: module:function."""
    ranks: int = 8
    """Ranks in all."""
    cluster: str = "h100"
    """What they are: a preset, or a file of `simplefsdp calibrate`."""
    bucketing: PlanName = "auto"
    """The plan to show in full."""
    compare: tuple[PlanName, ...] = ()
    """Plans to set beside it."""
    memory_budget_gb: float | None = None
    """Of auto and greedy: 1e9 bytes for activations, full parameters and gradients. Default: what
    manual takes."""
    layers: int | None = None
    """With --model: only so many layers, for a quick look."""
    seq_len: int | None = None
    """With --model: tokens per sequence. Default: 8192, or as many as the model takes."""
    batch_size: int = 1
    """With --model: sequences per rank."""
    activation_checkpointing: ActivationCheckpointing = "selective"
    """With --model: recompute in no block, in part of each block, or whole blocks."""
    mode: Mode = "fully_shard"
    """With --model: shard over all ranks, shard in groups and replicate across, or replicate."""
    shard_size: int | None = None
    """With --model and --mode hybrid_shard: ranks per group. Default: a node's."""
    tp: int = 1
    """With --model: tensor-parallel ranks."""
    mixed_precision: Literal["none", "bf16"] = "bf16"
    """With --model: gather and compute in bfloat16 and reduce in float32, or all in float32."""
    reshard_after_forward: bool = True
    """With --model: gather parameters again in backward."""
    json: Path | None = None
    """Write all of it; the keys are in simplefsdp/inspection/document.py."""
    html: Path | None = None
    """Write a page: timelines, memory over time, and tables; it opens offline."""
    perfetto: Path | None = None
    """Write a trace that ui.perfetto.dev and chrome://tracing open."""
    graph: Path | None = None
    """Write the programs before and after the passes, as text."""
    diff: bool = False
    """Print what was merged and moved."""


def run(args: list[str]) -> int:
    """Run ``simplefsdp inspect *args``; return the exit code."""
    options = parse(args)
    with user_errors():
        cluster = check(options)
    from simplefsdp.train.dry_run import fake_ranks

    with fake_ranks(options.ranks):
        subject = _trace(options, cluster)
        plans = _plans(options, cluster, subject)
    _tell(options, cluster, subject, plans)
    return 0


def parse(args: list[str]) -> InspectOptions:
    """Read the options.

    Raises:
        SystemExit: they cannot be read (code 2), or ``--help`` was shown (0).
    """
    import tyro

    return tyro.cli(InspectOptions, prog="simplefsdp inspect", description=_DESCRIPTION, args=args)


def check(options: InspectOptions) -> Cluster:
    """Refuse what could not end well; return the cluster.

    Raises:
        ValueError: nothing to inspect or two things, an option that would be ignored, a number
            that is too small, an unknown cluster, or a file that cannot be written.
    """
    if (options.model is None) == (options.target is None):
        raise ValueError("give one of --model NAME and --target module:function")
    if (options.target is None) != (options.input is None):
        raise ValueError("--target module:function and --input module:function go together")
    _refuse_ignored(options)
    least = {"--ranks": (options.ranks, 2), "--batch-size": (options.batch_size, 1)}
    least |= {"--tp": (options.tp, 1), "--layers": (options.layers or 1, 1)}
    least |= {"--seq-len": (options.seq_len or 2, 2)}
    for flag, (value, smallest) in least.items():
        if value < smallest:
            raise ValueError(f"{flag} must be at least {smallest}, got {value}")
    budget = options.memory_budget_gb
    if budget is not None and not 0 < budget < float("inf"):
        raise ValueError(f"--memory-budget-gb must be a number above 0, got {budget}")
    for name in _FILES:
        _check_writable(f"--{name}", getattr(options, name))
    return as_cluster(options.cluster)


def _refuse_ignored(options: InspectOptions) -> None:
    default = InspectOptions()
    for name in _OF_MODEL if options.target is not None else ():
        if getattr(options, name) != getattr(default, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} belongs to --model; --target's function decides for itself")
    if options.shard_size is not None and options.mode != "hybrid_shard":
        raise ValueError("--shard-size belongs to --mode hybrid_shard")
    planners = {"auto", "greedy"} & {options.bucketing, *options.compare}
    if options.memory_budget_gb is not None and not planners:
        raise ValueError("--memory-budget-gb belongs to --bucketing auto or greedy")


def _check_writable(flag: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")


def _trace(options: InspectOptions, cluster: Cluster) -> Subject:
    from simplefsdp.inspection.subject import trace_llama, trace_target
    from simplefsdp.train.distributed import make_mesh, plan_layout

    what = options.model or options.target
    with working(f"tracing {what} as one of {options.ranks} ranks"), user_errors():
        if options.target is not None and options.input is not None:
            return trace_target(options.target, options.input, options.ranks)
        model = ModelOptions(options.model or "", options.activation_checkpointing)
        parallel = ParallelOptions(
            mode=options.mode,
            shard_size=options.shard_size,
            tp=options.tp,
            reshard_after_forward=options.reshard_after_forward,
            mixed_precision=options.mixed_precision,
        )
        layout = plan_layout(parallel, options.ranks, cluster.ranks_per_node)
        mesh = make_mesh(layout, parallel, "cpu")
        return trace_llama(
            model,
            parallel,
            mesh,
            layers=options.layers,
            seq_len=options.seq_len or _default_seq_len(model),
            batch_size=options.batch_size,
        )


def _default_seq_len(model: ModelOptions) -> int:
    from simplefsdp.train.build import model_config

    try:
        return min(8192, model_config(model).max_seq_len)
    except ValueError as error:
        raise UserError(str(error).replace("--config", "--model")) from error


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
    if options.diff:
        print_diff(plans[0])
    for name in _FILES:
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


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what goes on: with a running clock on a terminal, else a line when it is done."""
    import sys
    import time

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    out = Console(stderr=True, highlight=False)
    begin = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        progress.add_task(what)
        yield
    print(f"{what}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
