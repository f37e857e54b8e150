"""The options of a training run: types, defaults, and the checks that need only the options.

The field docstrings are the text of ``simplefsdp train --help`` and the groups are its sections,
so a new option is one field here. Nothing in this file imports the command-line library.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from inductor_passes.ir.json_file import shown, typed
from simplefsdp.choices import Bucketing, Executor
from simplefsdp.models.options import ModelOptions, ParallelOptions


@dataclass(frozen=True)
class DataOptions:
    """What it is trained on: text, read as bytes, so nothing is downloaded."""

    data: Path | None = None
    """Text file or folder. Default: the .py sources of Python's standard library."""
    seq_len: int = 128
    """Tokens (bytes) per sequence."""
    global_batch_size: int = 16
    """Sequences per step over all ranks together; must be a multiple of the data-parallel ranks."""


@dataclass(frozen=True)
class OptimOptions:
    """AdamW with linear warm-up, then a cosine to a tenth of the peak."""

    steps: int = 60
    """Length of the whole run, in steps; the learning-rate schedule ends here."""
    stop_after: int | None = None
    """End this session at that step, with a checkpoint, leaving the schedule as it is."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: a tenth of --steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors and scalars (norms, biases) have none."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches that a rank's part of the global batch is cut into, one after the other: less
    memory for activations, more for full gradients. Only the last one's backward reduces gradients.
    Default: as many as --microbatch-size makes."""
    microbatch_size: int | Literal["auto"] | None = None
    """Sequences that a rank computes at once, at most. auto: as many as a device of --cluster has
    memory for, by prediction, again at each start. Default: its part of the global batch, cut by
    --gradient-accumulation-steps. Resumed on fewer ranks, a run keeps a number, and accumulates
    more."""
    microbatch_limit: int | None = None
    """With --microbatch-size auto: at most so many. Default: what the first start of the run took.
    """
    seed: int = 0
    """Seed of the weights, the data order and the sampled text."""

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up, the default filled in."""
        return self.steps // 10 if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True)
class CompileOptions:
    """What torch.compile(backend="simplefsdp") is told."""

    compile: bool = True
    """Compile the model; --no-compile runs it eagerly, with the same numerics."""
    executor: Executor = "auto"
    """What runs the compiled graphs. auto: regions on CPU if 8 layers are alike, else inductor.
    regions: code of one layer for all. inductor: of the whole graph. aot_eager: none; it starts
    faster and computes slower."""
    bucketing: Bucketing = "auto"
    """auto: a planner chooses which gathers and reductions are merged, and overlaps them with
    compute. manual: those of a block are. none: one collective per parameter, where it is needed.
    """
    cluster: str | None = None
    """With --bucketing auto: a preset, or a file of `simplefsdp calibrate`. Default: the preset for
    the device, or an estimate."""
    memory_budget_gb: float | None = None
    """With --bucketing auto: 1e9 bytes for activations, full parameters and gradients. Default:
    at most what manual takes with a second bucket of gradients in flight, or, if that is less, nine
    tenths of the device beside parameter shards and AdamW's state; and less where that costs at
    most 1 % of the time."""
    whole_step: bool = False
    """Compile forward, backward, clipping and update as one program. What the forward ends with
    hides what the backward begins with; it takes longer to compile."""


def backend_options(options: CompileOptions) -> dict[str, Any]:
    """The ``options`` argument of ``torch.compile``; an option that is None is left out."""
    names = ("bucketing", "executor", "cluster", "memory_budget_gb")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def as_flags(told: str) -> str:
    """``told``, a message of the compiler, with the options it names written as flags."""

    def flag(match: re.Match[str]) -> str:
        name, *value = match.groups()
        return " ".join([f"--{name.replace('_', '-')}", *value])

    name = "|".join(option.name for option in dataclasses.fields(CompileOptions))
    value = r"['\"]?([\w.]+)['\"]?"
    told = re.sub(rf"options=\{{['\"]({name})['\"]: {value}\}}", flag, told)
    told = re.sub(rf"options\[['\"]({name})['\"]\]", flag, told)
    return re.sub(rf"\b({name})={value}", flag, told)


@dataclass(frozen=True)
class RunOptions:
    """Where the run lives, and how often it reports."""

    out: Path | None = None
    """Run folder for checkpoints and metrics. Default: runs/<model>-<date>-<time>."""
    resume: str | None = None
    """Continue exactly where a run stopped, on CPU bit for bit: a run folder, a checkpoint,
    "latest" (the default when --resume stands alone; in --out, or the newest under runs/), or
    "auto" (latest if there is one, else start). Options are those of that run unless given again.
    """
    checkpoint_every: int = 20
    """Steps between checkpoints; the last step always saves one. 0: never save."""
    keep: int = 2
    """How many checkpoints to keep."""
    eval_every: int = 0
    """Steps between evaluations on the held-out split. 0: only at the start and at the end."""
    eval_batches: int = 8
    """Global batches per evaluation."""
    log_every: int = 10
    """Steps between reports, beside the first (a report waits for the device)."""
    sample_tokens: int = 64
    """Bytes of text to sample at the end. 0: none."""


@dataclass(frozen=True)
class PlanOptions:
    """Planning without training."""

    dry_run: bool = False
    """Print bytes per rank for parameters, gradients and optimizer; no rank is started."""
    world_size: int | None = None
    """Ranks to plan for. Default: those that would be started."""


_OF_ONE_SESSION = {"resume", "stop_after", *vars(PlanOptions())}


@dataclass(frozen=True)
class TrainConfig:
    """All options of one training run, grouped as ``--help`` shows them."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)
    run: RunOptions = field(default_factory=RunOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)

    @property
    def last_step(self) -> int:
        """The step this session ends at."""
        stop = self.optim.stop_after
        return self.optim.steps if stop is None else min(stop, self.optim.steps)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Nested dict of plain JSON values; :meth:`from_json` reads it back."""
        groups: dict[str, dict[str, Any]] = dataclasses.asdict(self)
        return {
            name: {k: str(v) if isinstance(v, Path) else v for k, v in group.items()}
            for name, group in groups.items()
        }

    @classmethod
    def from_json(cls, saved: dict[str, dict[str, Any]]) -> Self:
        """Read what :meth:`to_json` wrote; options unknown to this version are left out.

        What belongs to one session only (``resume``, ``stop_after``, planning) is not taken over.
        """
        groups = {}
        for spec in dataclasses.fields(cls):
            options: Any = spec.default_factory
            types = get_type_hints(options)
            group = typed(saved.get(spec.name, {}), dict, spec.name)
            known = types.keys() - _OF_ONE_SESSION
            values = {k: _read_option(k, v, types[k]) for k, v in group.items() if k in known}
            groups[spec.name] = options(**values)
        return cls(**groups)


def _read_option(name: str, value: Any, of: Any) -> Any:
    """Turn a JSON value back into the option's type ``of``; a ValueError says if it is not one."""
    kinds = (of,) if get_origin(of) is Literal else get_args(of) or (of,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if value in words:
        return value
    kinds = tuple(kind for kind in kinds if get_origin(kind) is not Literal)
    if not kinds:
        raise ValueError(f"{name}: expected one of {tuple(words)}, got {shown(value)}")
    if value is None and type(None) in kinds:
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    return Path(typed(value, str, name)) if kind is Path else typed(value, kind, name)


def check_options(config: TrainConfig) -> None:
    """Raise ValueError, naming the flag, for values that no model, machine or data could allow."""
    microbatch_size = config.optim.microbatch_size
    at_least = {
        "--seq-len": (config.data.seq_len, 2),
        "--global-batch-size": (config.data.global_batch_size, 1),
        "--steps": (config.optim.steps, 1),
        "--gradient-accumulation-steps": (config.optim.gradient_accumulation_steps, 1),
        "--microbatch-size": (None if microbatch_size == "auto" else microbatch_size, 1),
        "--microbatch-limit": (config.optim.microbatch_limit, 1),
        "--stop-after": (config.optim.stop_after, 1),
        "--warmup-steps": (config.optim.warmup_steps, 0),
        "--ranks": (config.parallel.ranks, 1),
        "--shard-size": (config.parallel.shard_size, 1),
        "--tp": (config.parallel.tp, 1),
        "--checkpoint-every": (config.run.checkpoint_every, 0),
        "--keep": (config.run.keep, 1),
        "--eval-every": (config.run.eval_every, 0),
        "--eval-batches": (config.run.eval_batches, 1),
        "--log-every": (config.run.log_every, 1),
        "--sample-tokens": (config.run.sample_tokens, 0),
        "--world-size": (config.plan.world_size, 1),
        "--weight-decay": (config.optim.weight_decay, 0.0),
    }
    for flag, (value, least) in at_least.items():
        if value is not None and not value >= least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    positives = {"--lr": config.optim.lr, "--max-grad-norm": config.optim.max_grad_norm}
    for flag, positive in positives.items():
        if not 0 < positive < float("inf"):
            raise ValueError(f"{flag} must be a positive number, got {positive}")
    if abs(config.optim.seed) >= 2**40:
        raise ValueError(f"--seed must be below {2**40:,}, got {config.optim.seed}")
    _check_compile(config.compile)
    _check_schedule(config.optim)
    if config.parallel.shard_size is not None and config.parallel.mode != "hybrid_shard":
        raise ValueError(
            f"--shard-size belongs to --mode hybrid_shard, but --mode is {config.parallel.mode}"
        )
    if config.plan.world_size is not None and not config.plan.dry_run:
        raise ValueError(
            "--world-size belongs to --dry-run; to start ranks use --ranks or torchrun"
        )


def _check_compile(options: CompileOptions) -> None:
    if options.whole_step and not options.compile:
        raise ValueError("--whole-step is compiled, so it does not go with --no-compile")
    from simplefsdp.compiler.options import parse_options  # imports torch

    try:
        parse_options(backend_options(options))
    except ValueError as error:
        raise ValueError(as_flags(str(error))) from error


def _check_schedule(optim: OptimOptions) -> None:
    run = f"the run (--steps {optim.steps})"
    if optim.stop_after is not None and optim.stop_after > optim.steps:
        raise ValueError(f"--stop-after {optim.stop_after} is past the end of {run}")
    if optim.warmup > optim.steps:
        raise ValueError(f"--warmup-steps {optim.warmup} is longer than {run}")
