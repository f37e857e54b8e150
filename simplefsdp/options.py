"""The options of ``torch.compile(model, backend="simplefsdp", options={...})``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal, get_args

from inductor_passes.buckets import check_patterns
from inductor_passes.cluster import Cluster
from inductor_passes.cluster_file import as_cluster
from inductor_passes.layouts import Layout
from simplefsdp.rank_guard import TIMEOUT_S

Bucketing = Literal["none", "manual", "auto"]
Planner = Literal["search", "greedy"]
Executor = Literal["inductor", "regions", "aot_eager"]
OnError = Literal["raise", "fallback"]

# Says what it expected of a value, or None if the value is fine.
Check = Callable[[object], str | None]


def _one_of(literal: Any) -> Mapping[str, Check]:
    choices = get_args(literal)
    expected = f"one of {', '.join(map(repr, choices))}"
    return {"check": lambda value: None if value in choices else expected}


def _flag(optional: bool = False) -> Mapping[str, Check]:
    allowed = (True, False, None) if optional else (True, False)
    expected = f"one of {', '.join(map(str, allowed))}"
    return {"check": lambda v: None if any(v is a for a in allowed) else expected}


def _check_count(value: object) -> str | None:
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return None if fine else "a whole number of buckets, 1 or more"


def _check_seconds(value: object) -> str | None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return None if fine else "a number of seconds above 0"


def _check_gb(value: object) -> str | None:
    fine = value is None or (_check_seconds(value) is None and isfinite(value))  # type: ignore[arg-type]
    return None if fine else "1e9 bytes, a number above 0, or None"


def _check_cluster(value: object) -> str | None:
    try:
        if value is not None:
            as_cluster(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        return f"a preset, a Cluster, or a file that `simplefsdp calibrate` wrote ({error})"
    return None


def _check_buckets(value: object) -> str | None:
    try:
        if value is not None:
            check_patterns(value)
    except TypeError:
        return "a list of module FQNs (globs) and of lists of them, not empty, or None"
    return None


_OF_AUTO = ("cluster", "memory_budget_gb", "planner")
_OF_MANUAL = ("buckets", "max_inflight_gathers", "max_pending_reduces")


@dataclass(frozen=True)
class Options:
    """What the user may choose of a compilation.

    Attributes:
        bucketing: ``"auto"``: a planner chooses which gathers and which reduces go out as one, and
            how far ahead, from what the machine is (``cluster``) and how much memory there is
            (``memory_budget_gb``). ``"manual"``: the gathers of a module go out as one, and so do
            the reduces of its gradients. ``"none"``: every parameter is gathered and reduced by
            itself.
        buckets: the modules, as globs on FQNs in which ``*`` stays within one component; each
            module that a glob matches is a bucket, and those that a nested list matches share
            one. None, and what nothing matches: one bucket per element of the model's repeated
            lists, and one per run of parameters around them.
        cluster: of ``"auto"``: what the machine is. A preset (``"h100"``, see
            :mod:`inductor_passes.presets`), a :class:`inductor_passes.cluster.Cluster`, or the path
            of a file that ``simplefsdp calibrate`` wrote, the same on all ranks. None: the preset
            for the device's name.
        memory_budget_gb: of ``"auto"``: 1e9 bytes for activations, full parameters, and gradients,
            full and reduced, in forward and in backward. Parameter shards, optimizer state, and
            gradients of earlier batches that are accumulated come on top. None: what ``"manual"``
            takes, or nine tenths of the device less the first two (fp32, AdamW), if that is less.
        planner: of ``"auto"``: ``"search"``, or ``"greedy"``, the published rule, to compare with.
        reorder: move collectives to where compute hides them, which ``"auto"`` always does. None:
            unless bucketing is "none".
            With ``bucketing="none"`` the collectives of a bucket move together, unmerged.
        layout: how the members of a bucket travel, see :mod:`inductor_passes.layouts`. The default
            is what is faster with gloo; with NCCL it has not been measured. ``"auto"`` plans for
            ``"coalesced"``: the copies of ``"flat"``, and their memory, come on top.
        max_inflight_gathers: buckets being gathered at a time, the one that compute waits for
            included. More hides more, and holds more full parameters. ``"auto"`` chooses it bucket
            by bucket.
        max_pending_reduces: buckets of full gradients whose reduce is under way at a time, beside
            the one being computed; likewise.
        separate_reduce_group: reduce on a second communicator, so that gathers and reduces run
            side by side. With NCCL it costs GPU memory, and the two share the links.
        executor: ``"inductor"`` generates code for the whole graph. ``"regions"`` does so for one
            of the layers that are alike, and calls it for each: 100 layers compile like one, and
            collectives start and are waited for between layers only. (A graph whose sizes are
            symbols is compiled whole.) ``"aot_eager"`` runs the forward and backward graphs op by
            op, which compiles in seconds and serves debugging.
        on_error: what to do if a pass fails: ``"raise"``, or ``"fallback"``, which compiles the
            graph without it and warns. The passes are tried on a copy before each compilation,
            and the rank guard makes sure that they fail on all ranks or on none.
        rank_guard: compare, before a graph is compiled, what the ranks are about to communicate,
            through the process group's store, and raise on a difference instead of hanging. With
            ``"auto"`` the lowest rank plans for all; without the guard each plans for itself, and
            must not have other batches than the rest.
        rank_guard_timeout_s: how long a rank waits for the others to get there.
    """

    bucketing: Bucketing = field(default="auto", metadata=_one_of(Bucketing))
    buckets: Sequence[str | Sequence[str]] | None = field(
        default=None, metadata={"check": _check_buckets}
    )
    cluster: Cluster | str | os.PathLike[str] | None = field(
        default=None, metadata={"check": _check_cluster}
    )
    memory_budget_gb: float | None = field(default=None, metadata={"check": _check_gb})
    planner: Planner = field(default="search", metadata=_one_of(Planner))
    reorder: bool | None = field(default=None, metadata=_flag(optional=True))
    layout: Layout = field(default="coalesced", metadata=_one_of(Layout))
    max_inflight_gathers: int = field(default=2, metadata={"check": _check_count})
    max_pending_reduces: int = field(default=2, metadata={"check": _check_count})
    separate_reduce_group: bool = field(default=False, metadata=_flag())
    executor: Executor = field(default="inductor", metadata=_one_of(Executor))
    on_error: OnError = field(default="raise", metadata=_one_of(OnError))
    rank_guard: bool = field(default=True, metadata=_flag())
    rank_guard_timeout_s: float = field(default=TIMEOUT_S, metadata={"check": _check_seconds})

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
    checks = {f.name: f.metadata["check"] for f in fields(Options)}
    for key, value in options.items():
        if key not in checks:
            close = difflib.get_close_matches(str(key), checks, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"options: unknown key {key!r}{hint} (valid keys: {', '.join(sorted(checks))})"
            )
        expected = checks[key](value)
        if expected is not None:
            raise ValueError(f"options[{key!r}]: expected {expected}, got {value!r}")
    return _consistent(Options(**options))  # type: ignore[arg-type]


def _consistent(options: Options) -> Options:
    """Refuse what would be ignored."""
    automatic = options.bucketing == "auto"
    misplaced = _OF_MANUAL if automatic else _OF_AUTO
    for f in fields(Options):
        if f.name in misplaced and getattr(options, f.name) != f.default:
            other = "'manual', or 'none' with reorder=True" if automatic else "'auto'"
            raise ValueError(
                f"options[{f.name!r}]: has no meaning with bucketing={options.bucketing!r}; leave "
                f"it out, or choose bucketing={other}"
            )
    if automatic and options.reorder is False:
        raise ValueError(
            "options['reorder']: bucketing='auto' plans when each bucket starts, so it cannot be "
            "False; leave it out, or choose bucketing='manual'"
        )
    if options.memory_budget_gb is not None and options.layout == "flat":
        raise ValueError(
            "options['memory_budget_gb']: the planner does not count the copies of layout='flat'; "
            "leave one of the two out"
        )
    return options
