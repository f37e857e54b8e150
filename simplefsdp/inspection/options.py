"""The options of ``simplefsdp inspect``, and which combinations are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_cluster
from simplefsdp.choices import Mode, with_default
from simplefsdp.models.options import ActivationCheckpointing, ParallelOptions

DESCRIPTION = """See what the compiler does with a model's collectives: per bucket when it runs, what
hides it, what is exposed, and why; and memory over time. No GPU and no cluster needed: the step is
traced with tensors that have no memory, and simulated on what --cluster is known to do.

--target is a function that returns a model wrapped by simple_fsdp (it gets a mesh of all ranks if it
takes an argument), and --input one that returns its inputs on a rank: a tensor, a tuple, or a dict
of keyword arguments. --trace shows what a run really exposed: torch profiler's JSON, or what
--perfetto wrote.

torch-manual and torch-auto (of torch 2.13) are PyTorch's own passes on the same graph.

examples (without --layers all of the model is planned: 8b takes a minute):
  simplefsdp inspect --model 8b --layers 2 --ranks 64 --cluster h100 --bucketing auto --compare none manual torch-auto
  simplefsdp inspect --model debug --layers 2 --ranks 4 --cluster cpu-gloo --seq-len 128 --batch-size 2 --json report.json
  simplefsdp inspect --model 8b --layers 1 --ranks 8 --bucketing manual --diff --graph graphs.txt
  simplefsdp inspect --model 8b --layers 1 --ranks 64 --compare manual --html report.html
  simplefsdp inspect --model debug --layers 1 --ranks 8 --bucketing none --perfetto trace.json
  simplefsdp inspect --fit --model debug --layers 1 --ranks 8
  simplefsdp inspect --sweep batch=1..16 seq=512..2k ranks=8,64 --model debug --layers 2 --html sweep.html
  simplefsdp inspect --trace trace.json
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
    "post_forward_ranks",
)
FILES = ("json", "html", "perfetto", "graph")
OwnPlan = Literal["none", "manual", "auto", "greedy"]
TorchPlan = Literal["torch-manual", "torch-auto"]
PlanName = OwnPlan | TorchPlan


@dataclass(frozen=True)
class InspectOptions:
    """What to inspect, and where the report goes."""

    model: str | None = None
    """A Llama 3 of ours: debug, 160m, 1b, 8b, 70b or 405b."""
    target: str | None = None
    """A model of yours: module:function."""
    input: str | None = None
    """What --target's model is called with, on one rank: module:function. With --fit or --sweep, of
    a batch and a sequence as long as no other size: what is as long is taken for them."""
    hf: Path | None = None
    """With --fit or --sweep: a model of transformers, its config.json or the folder it is in."""
    trace: tuple[Path, ...] = ()
    """A measured run instead: JSON of torch.profiler's export_chrome_trace, of one rank or more."""
    ranks: int = 8
    """Ranks in all."""
    cluster: str = "h100"
    """What they are: a preset, or a file of `simplefsdp calibrate`."""
    bucketing: PlanName = "auto"
    """The plan to show in full: one of ours, or PyTorch's own passes on the same graph."""
    compare: tuple[PlanName, ...] = ()
    """Plans to set beside it."""
    buckets: tuple[str, ...] = ()
    """Of manual: a bucket for each module that a glob of names matches; those joined by + share
    one: 'layers.*' norm+output. Default: one per layer, and what is between the layers."""
    memory_budget_gb: float | None = None
    """Of auto and greedy: 1e9 bytes for activations, full parameters and gradients. Default: at
    most what manual takes with a second bucket of gradients in flight, or, if that is less, nine
    tenths of the device beside parameter shards and AdamW's state; and less where that costs at
    most 1 % of the time."""
    fit: Literal["batch", "seq"] | None = None
    """Instead of a report, the largest batch that fits a device (`--fit`, or `--fit
    batch`), or the longest sequence (`--fit seq`), by what is recomputed and what is kept."""
    sweep: tuple[str, ...] = ()
    """Instead of a report, a table and a map of many sizes: batch=1..16
    seq=2k..128k ranks=8,64,512. a..b doubles, a..b:c counts by c, k stands for 1,024."""
    layers: int | None = None
    """With --model: only so many layers, for a quick look."""
    seq_len: int | None = None
    """With --model: tokens per sequence. Default: 8192, or as many as the model takes."""
    batch_size: int = 1
    """With --model: sequences per rank."""
    activation_checkpointing: Literal["auto"] | ActivationCheckpointing = "auto"
    """Recompute in no block, in part of each block (not with --hf), or whole blocks. auto: in part
    of each with --model, in none with --hf."""
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
    post_forward_ranks: int | None = None
    """With --model: keep a part of each for backward, which gathers it from so many neighbours."""
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


def parse(args: list[str]) -> InspectOptions:
    """Read the options."""
    import tyro

    args = with_default(args, "--fit", "batch")
    return tyro.cli(InspectOptions, prog="simplefsdp inspect", description=DESCRIPTION, args=args)


def recomputed(options: InspectOptions) -> ActivationCheckpointing:
    """The activation checkpointing of a model that we build, with ``auto`` replaced by its meaning:
    ``selective`` for ``--model``, ``none`` for ``--hf``."""
    if options.activation_checkpointing != "auto":
        return options.activation_checkpointing
    return "none" if options.hf is not None else "selective"


def parallel_options(options: InspectOptions) -> ParallelOptions:
    return ParallelOptions(
        mode=options.mode,
        shard_size=options.shard_size,
        tp=options.tp,
        reshard_after_forward=options.reshard_after_forward,
        post_forward_ranks=options.post_forward_ranks,
        mixed_precision=options.mixed_precision,
    )


def check(options: InspectOptions) -> Cluster:
    """Refuse options that cannot work; return the cluster.

    Raises:
        ValueError: nothing to inspect or two things, an option that would be ignored, a number
            that is too small, an unknown cluster, or a file that cannot be written.
    """
    given = [options.model, options.target, options.hf, options.trace or None]
    if sum(one is not None for one in given) != 1:
        raise ValueError(
            "give one of --model NAME, --target module:function, --hf CONFIG and --trace FILE"
        )
    if options.hf is not None and not options.fit and not options.sweep:
        raise ValueError("--hf belongs to --fit or --sweep; use --target for a report")
    if (options.target is None) != (options.input is None):
        raise ValueError("--target module:function and --input module:function go together")
    _refuse_ignored(options)
    _refuse_missing(options)
    numbers = {
        "--ranks": (options.ranks, 2),
        "--batch-size": (options.batch_size, 1),
        "--tp": (options.tp, 1),
        "--layers": (options.layers, 1),
        "--seq-len": (options.seq_len, 2),
    }
    for flag, (value, smallest) in numbers.items():
        if value is not None and value < smallest:
            raise ValueError(f"{flag} must be at least {smallest}, got {value}")
    budget = options.memory_budget_gb
    if budget is not None and not 0 < budget < float("inf"):
        raise ValueError(f"--memory-budget-gb must be a number above 0, got {budget}")
    for name in FILES:
        _check_writable(f"--{name}", getattr(options, name))
    return as_cluster(options.cluster)


def _refuse_missing(options: InspectOptions) -> None:
    for path in options.trace:
        if not path.is_file():
            raise ValueError(
                f"--trace {path}: there is no such file; expected the JSON that a torch profiler's "
                "export_chrome_trace wrote"
            )


def _refuse_ignored(options: InspectOptions) -> None:
    default = InspectOptions()
    names = [field.name for field in fields(options)]
    given = [name for name in names if getattr(options, name) != getattr(default, name)]
    ignored: dict[str, str] = {}
    if options.target is not None:
        ignored = dict.fromkeys(_OF_MODEL, "--model; --target's function decides for itself")
    if options.trace:
        ignored = dict.fromkeys(
            {*names} - {"trace", "json"}, "a prediction, and --trace is of a run"
        )
    for name in given:
        if name in ignored:
            raise ValueError(f"--{name.replace('_', '-')} belongs to {ignored[name]}")
    if options.fit or options.sweep:
        _refuse_with_sizes(options, given)
    if options.shard_size is not None and options.mode != "hybrid_shard":
        raise ValueError("--shard-size belongs to --mode hybrid_shard")
    _refuse_of_other_plans(given, {options.bucketing, *options.compare})


def _refuse_of_other_plans(given: Sequence[str], shown: set[PlanName]) -> None:
    for name, plans in (("memory_budget_gb", ("auto", "greedy")), ("buckets", ("manual",))):
        if name in given and shown.isdisjoint(plans):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} belongs to --bucketing {' or '.join(plans)}")


def _refuse_with_sizes(options: InspectOptions, given: Sequence[str]) -> None:
    if options.fit and options.sweep:
        raise ValueError("give one of --fit and --sweep")
    what = "fit" if options.fit else "sweep"
    without = {"compare", "buckets", "memory_budget_gb", "perfetto", "graph", "diff"}
    if options.fit:
        without |= {"html", "activation_checkpointing", "reshard_after_forward"}
        without |= {"post_forward_ranks"}
        without |= {"batch_size"} if options.fit == "batch" else {"seq_len"}
    for name in given:
        if name in without:
            raise ValueError(f"--{name.replace('_', '-')} does not go together with --{what}")


def _check_writable(flag: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
