"""The options of ``torch.compile(model, backend="simplefsdp", options={...})``.

Batches of several sizes: ``torch.compile`` takes the sizes of the first batch to be constant. At
the first batch that differs, it compiles once more with that size left open, for all later batches;
``torch._dynamo.mark_dynamic(tokens, 1)`` before the first call leaves it open at once, which saves
a compilation. The plan that was made first stands for both compilations, so begin with the largest
batch. The log says for which sizes the plan fits its memory, and stays as near its lower bound, to
5 % ("L['tokens'].size()[1] is open (512 here): fits 71.9 GB from 2 to 1306"). A call with another
size is warned of before it runs; ``torch.compiler.reset()``, on all ranks, has the next batch
planned for.

With ``torch.compile(..., dynamic=False)`` each new size is compiled by itself, up to
``torch._dynamo.config.recompile_limit`` of them: 64, or what you set. After that the model runs
uncompiled if all ranks reach the limit together (if not, an error says so); with ``fullgraph=True``
it raises. A rank that compiles alone keeps the others waiting in a collective, until the process
group's timeout: let all ranks meet a new size in the same step. Or pad batches to a few lengths:
padding costs compute, a new size costs a compilation, and ``cudagraphs`` allow one shape only.

As with every backend, register and remove hooks of modules before the first call: compiled code
does not see a later change until ``torch.compiler.reset()`` on all ranks.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, get_args

from inductor_passes.ir.buckets import check_patterns
from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_cluster
from simplefsdp.choices import EXECUTORS, Bucketing, Executor
from simplefsdp.rank_guard import TIMEOUT_S

Check = tuple[Callable[[Any], bool], str]  # whether a value is fine, and what is expected


def _one_of(*choices: object) -> Check:
    def is_one(value: Any) -> bool:
        return any(isinstance(value, type(choice)) and value == choice for choice in choices)

    return is_one, f"one of {', '.join(map(repr, choices))}"


def _taken_by(function: Callable[[Any], object], expected: str) -> Check:
    def is_taken(value: Any) -> bool:
        try:
            if value is not None:
                function(value)  # a ValueError says what is wrong with a value of the right type
        except TypeError:
            return False
        return True

    return is_taken, f"{expected}, or None"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


_CHECKS: dict[str, Check] = {
    "bucketing": _one_of(*get_args(Bucketing)),
    "buckets": _taken_by(
        check_patterns, "a list of module FQNs (globs) and of lists of them, not empty"
    ),
    "cluster": _taken_by(
        as_cluster, "a preset, a Cluster, the path of a file that `simplefsdp calibrate` wrote"
    ),
    "memory_budget_gb": (
        lambda value: value is None or (_is_number(value) and value > 0),
        "1e9 bytes, a number above 0, or None",
    ),
    "reorder": _one_of(True, False, None),
    "separate_reduce_group": _one_of(True, False),
    "executor": _one_of(*EXECUTORS),
    "cudagraphs": _one_of(True, False),
    "rank_guard_timeout_s": (
        lambda value: _is_number(value) and value >= 0,
        "a number of seconds, or 0 for no guard",
    ),
}
_WRAP = "is an argument of simple_fsdp(model, mesh, ...)"
_AUTO = "bucketing='auto' plans it, within memory_budget_gb"
# What is no option, and what to use instead: former options, and habits of FSDP2's users.
_INSTEAD = {
    "planner": "leave it out; `simplefsdp inspect --compare greedy` prices the published rule",
    "max_inflight_gathers": _AUTO,
    "max_pending_reduces": _AUTO,
    "layout": "leave it out: the members of a bucket travel in one coalesced call",
    "on_error": "leave it out; bucketing='none' compiles without the passes",
    "rank_guard": "rank_guard_timeout_s=0 turns the guard off",
    "reshard_after_forward": _WRAP,
    "mp_policy": _WRAP,
    "mesh": _WRAP,
    "mode": (
        f"{_WRAP}; for torch.compile's mode='reduce-overhead' there is cudagraphs=True, for "
        "'max-autotune' torch._inductor.config.max_autotune = True, on all ranks"
    ),
    "offload_policy": "shards stay on the device; there is no offloading",
}


@dataclass(frozen=True)
class Options:
    """What the user may choose of a compilation.

    Attributes:
        bucketing: ``"auto"``: a planner chooses which gathers and which reduces are merged into one
            launch, and how far ahead each starts, by the machine (``cluster``) and the memory
            (``memory_budget_gb``). ``"manual"``: the gathers of a module are merged into one, and
            so are the reduces of its gradients. ``"none"``: every parameter is gathered and reduced
            by itself.
        buckets: the modules, as globs on FQNs in which ``*`` stays within one component; each
            module that a glob matches is a bucket, and those that a nested list matches share one.
            None, and for parameters that no glob matches: one bucket per element of the model's
            repeated lists, and one per run of parameters around them.
        cluster: for ``"auto"``: the machine to plan for. A preset (``"h100"``, see
            :mod:`inductor_passes.machine.presets`), a
            :class:`inductor_passes.machine.cluster.Cluster`, or the path of a file that
            ``simplefsdp calibrate`` wrote, the same on all ranks. None: the preset for the device's
            name; for another NVIDIA GPU an estimate, with a warning. Presets and estimates have as
            many ranks on a node as the launcher starts there.
        memory_budget_gb: for ``"auto"``: memory, in 1e9 bytes, for activations, full parameters,
            and gradients, full and reduced, in forward and in backward. Parameter shards, optimizer
            state, and gradients of earlier batches that are accumulated come on top, and what the
            process group itself allocates (gloo copies each bucket that it reduces). None: the
            lesser of what ``"manual"`` takes with a second bucket of gradients in flight, and nine
            tenths of the device less parameter shards and optimizer state (fp32, AdamW); and still
            less memory where that costs at most 1 % of the time. A number: all of it may be taken
            for speed.
        reorder: move collectives to where compute hides them, which ``"auto"`` always does. None:
            True unless bucketing is "none". If True with ``bucketing="none"``, the collectives of a
            bucket move together, unmerged.
        separate_reduce_group: reduce on a second communicator, so that gathers and reduces run
            side by side. With NCCL it costs GPU memory, and the two share the links.
        executor: ``"inductor"`` generates code for the whole graph. ``"regions"`` does so for one
            of the layers that are alike, and calls it for each: 100 layers compile like one, and
            collectives start and are waited for between layers only. (A graph whose sizes are
            symbols is compiled whole.) ``"auto"`` is ``"regions"`` on CPU for a graph of 8 or more
            layers that are alike (:mod:`simplefsdp.compiler.executor`), and else ``"inductor"``.
            ``"aot_eager"`` runs the forward and backward graphs op by op, which compiles in seconds
            and serves debugging.
        cudagraphs: capture the forward and the backward in a CUDA graph each, collectives and all,
            as ``mode="reduce-overhead"`` of ``torch.compile`` does: a step that is bound by the
            host launches two graphs instead of thousands of kernels. Batches must have one shape.
            The next step overwrites the results of a step: clone a loss that you keep, and set
            gradients to None (``optimizer.zero_grad()``) before each step; so gradients cannot be
            accumulated. For forward and backward in one CUDA graph leave this option out, run some
            steps on another stream, and capture one step by ``torch.cuda.graph``: copy each batch
            into the tensors of the capture; parameters and gradients must stay the same tensors
            (``benchmarks/gpu/graphed.py`` does all of this).
        rank_guard_timeout_s: before a graph is compiled, the ranks compare what they are about to
            communicate, through the process group's store, and raise on a difference instead of
            hanging. This is how long a rank waits for the others. 0: they do not compare; with
            ``"auto"`` each rank then plans for itself, and must not have other batches than the
            rest.
    """

    bucketing: Bucketing = "auto"
    buckets: Sequence[str | Sequence[str]] | None = None
    cluster: Cluster | str | os.PathLike[str] | None = None
    memory_budget_gb: float | None = None
    reorder: bool | None = None
    separate_reduce_group: bool = False
    executor: Executor = "auto"
    cudagraphs: bool = False
    rank_guard_timeout_s: float = TIMEOUT_S

    @property
    def reorders(self) -> bool:
        """``reorder``, its default filled in."""
        return self.bucketing != "none" if self.reorder is None else self.reorder


def parse_options(options: Mapping[str, object] | None) -> Options:
    """Check the dictionary that ``torch.compile`` was given.

    Raises:
        TypeError: ``options`` is not a mapping.
        ValueError: unknown key or value, or one that would be ignored; names the valid ones.
    """
    if options is None:
        return Options()
    if not isinstance(options, Mapping):
        raise TypeError(f"options: expected a dict, got {type(options).__name__}")
    for key, value in options.items():
        if key not in _CHECKS:
            raise ValueError(
                f"options: unknown key {key!r}{_hint(str(key))} (valid keys: "
                f"{', '.join(sorted(_CHECKS))})"
            )
        is_fine, expected = _CHECKS[key]
        if not is_fine(value):
            raise ValueError(f"options[{key!r}]: expected {expected}, got {value!r}")
    return _consistent(Options(**options))  # type: ignore[arg-type]


def _hint(key: str) -> str:
    if key in _INSTEAD:
        return f": {_INSTEAD[key]}"
    close = difflib.get_close_matches(key, _CHECKS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _consistent(options: Options) -> Options:
    """Refuse what would be ignored."""
    automatic = options.bucketing == "auto"
    misplaced = ("buckets",) if automatic else ("cluster", "memory_budget_gb")
    for f in fields(Options):
        if f.name in misplaced and getattr(options, f.name) != f.default:
            other = "'manual', or 'none' with reorder=True" if automatic else "'auto'"
            raise ValueError(
                f"options[{f.name!r}]: has no meaning with bucketing={options.bucketing!r}; leave "
                f"it out, or choose bucketing={other}"
            )
    if options.cudagraphs and options.executor not in ("auto", "inductor"):
        raise ValueError(
            f"options['cudagraphs']: executor={options.executor!r} runs what is not captured; "
            "leave it out, or choose executor='inductor'"
        )
    if automatic and options.reorder is False:
        raise ValueError(
            "options['reorder']: bucketing='auto' plans when each bucket starts, so it cannot be "
            "False; leave it out, or choose bucketing='manual'"
        )
    return options
