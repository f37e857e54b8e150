"""Adapter: how Inductor lowers a graph of ours, or a part of one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cache
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule

from inductor_passes.adapters import _torch
from inductor_passes.machine.stored import RepeatLimits


def compile_region(
    gm: GraphModule, example_inputs: Sequence[Any], *, is_backward: bool
) -> Callable[[list[Any]], Any]:
    """Compile a part of a graph by Inductor; its outputs keep their strides.

    What is known of the whole graph (its parameters, the strides of its outputs, which of its
    inputs may be written over) is not said of the part. Passes that the user has set after the
    graph is partitioned run on the part.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    record_original_output_strides(gm)
    fake_mode = next((v.fake_mode for v in example_inputs if hasattr(v, "fake_mode")), None)
    with tracing(TracingContext(fake_mode)), reuse_at_once():
        return compile_fx_inner(gm, example_inputs, is_backward=is_backward)  # type: ignore[return-value]


def limits_of_repeating(device: torch.device) -> RepeatLimits:
    """Up to which Inductor repeats a loop for a device. Since 2.13 it has limits for CPUs."""
    from torch._inductor import config

    def limit(name: str) -> int:
        default: int | None = getattr(config, f"_realize_{name}_default", None)
        if device.type == "cpu":
            default = getattr(config, f"realize_cpu_{name}", default)
        found: int | None = getattr(config, f"realize_{name}")
        if found is None:
            found = default
        if found is None:
            raise AttributeError(
                f"torch._inductor.config has no default of realize_{name} any more"
            )
        return found

    return RepeatLimits(
        limit("reads_threshold"), limit("acc_reads_threshold"), limit("opcount_threshold")
    )


_at_once: ContextVar[bool] = ContextVar("reuse_at_once", default=False)


@contextmanager
def reuse_at_once() -> Iterator[None]:
    """While Inductor writes code: a buffer is used again by the next kernel, or freed.

    Else it is kept for a later one of its size, as long as Inductor's own estimate of the peak
    allows. That counts a kernel that writes over what it reads twice (2.11 to 2.15), so dead
    buffers fill up what is really free: 16 % of a step's peak with all layers recomputed
    (``benchmarks/LOG.md``). The allocator uses freed memory again, too.

    Code from here is told apart in Inductor's cache.
    """
    from torch._inductor import config

    _ask_before_reuse()
    metadata = {**config.aot_inductor.metadata, "simplefsdp": "reuse at once"}
    token = _at_once.set(True)
    try:
        with config.patch({"aot_inductor.metadata": metadata}):
            yield
    finally:
        _at_once.reset(token)


@cache
def _ask_before_reuse() -> None:
    """Once for all threads: whoever else compiles meanwhile gets what is inherited."""
    from torch._inductor.codegen.wrapper import AllocateLine

    inherited = AllocateLine.should_reuse_buffer

    def should_reuse_buffer(line: Any, free_line: Any, size: int) -> bool:
        follows = free_line.scheduler_node_index + 1 >= line.scheduler_node_index
        if _at_once.get() and not follows and not line.comm_buffer:
            return False
        return inherited(line, free_line, size)

    AllocateLine.should_reuse_buffer = should_reuse_buffer  # type: ignore[method-assign, assignment]


@contextmanager
def fusions_as_planned() -> Iterator[None]:
    """While Inductor lowers a graph: no fusion keeps back what is to run before a launch or wait,
    and none makes more live.

    Fusion of two norms' gradients, say, would hold the launch that needs the first one back until
    the second one is there; and a matrix product would come too late to hide a gather, if a loop
    that it needs were fused with one behind that gather's wait. What is computed again for a
    product far behind would be there early, if it were fused with a loop that reads the same: 9 %
    of a step's peak (``benchmarks/LOG.md``). Combo kernels, an option of Inductor's, are not asked.
    """
    from torch._inductor.virtualized import V

    inherited = V.choices
    choices = copy(inherited)
    before: WeakKeyDictionary[Any, _Unfused] = WeakKeyDictionary()

    def can_fuse(scheduler: Any, one: Any, other: Any, shared_data_score: int) -> bool:
        if scheduler not in before:  # asked for the first time, nothing is fused
            before[scheduler] = _Unfused(scheduler.nodes, V.graph.get_output_names())
        first, second = sorted((one, other), key=lambda snode: snode.min_order)
        known = before[scheduler]
        as_planned = known.is_in_time(first, second) and not known.holds_more(first, second)
        return as_planned and inherited.can_fuse(scheduler, one, other, shared_data_score)

    choices.can_fuse = can_fuse  # type: ignore[method-assign, assignment]
    with V.set_choices_handler(choices):
        yield


class _Unfused:
    """A schedule before fusion.

    Attributes:
        limits: see :func:`_limits`.
        last: the place of the last node that reads each buffer; endless for what is returned.
        kernels: other libraries', launches and waits.
        places: theirs.
    """

    def __init__(self, snodes: Sequence[Any], returned: Iterable[str]) -> None:
        self.limits = _limits(snodes)
        self.kernels = [s for s in snodes if s.is_extern()]
        self.places = [s.min_order for s in self.kernels]
        self.last: dict[str, float] = {
            str(dep.name): s.min_order for s in snodes for dep in s.read_writes.reads
        }
        self.last.update(dict.fromkeys(returned, inf))

    def is_in_time(self, first: Any, second: Any) -> bool:
        """Whether what both make is there when it has to be, if they run as one."""
        made = (*first.get_buffer_names(), *second.get_buffer_names())
        limit = min(self.limits.get(str(name), inf) for name in made)
        late = second.max_order >= first.max_order and not self._can_come_first(first, second)
        return bool((second.max_order if late else first.max_order) < limit)

    def holds_more(self, first: Any, second: Any) -> bool:
        """Whether more is live if they run as one where ``first`` is, and what ``second`` makes is
        there early, and what it is the last to read is freed early; or else where ``second`` is,
        the other way round. Not asked of what needs ``first``."""
        adjacent = not self._between(first, second)
        if adjacent or second.ancestors & first.get_operation_names():
            return False
        if self._can_come_first(first, second):
            made, freed = self._makes_and_frees(second)
            return made > freed
        made, freed = self._makes_and_frees(first)
        return freed > made

    def _between(self, first: Any, second: Any) -> Sequence[Any]:
        begin, end = (bisect_left(self.places, n) for n in (first.max_order, second.min_order))
        return self.kernels[begin:end]

    def _can_come_first(self, first: Any, second: Any) -> bool:
        """Whether ``second`` needs no kernel, launch or wait that is behind ``first``."""
        return not any(
            second.ancestors & kernel.get_operation_names()
            for kernel in self._between(first, second)
        )

    def _makes_and_frees(self, snode: Any) -> tuple[int, int]:
        """Bytes that a loop makes for later, and that it is the last to read."""
        reads, writes = snode.read_writes.reads, snode.read_writes.writes
        own = {dep.name for dep in writes}
        makes = {d.name: d for d in writes if self.last.get(d.name, 0) > snode.max_order}
        frees = {
            dep.name: dep
            for dep in reads
            if dep.name not in own
            and snode.min_order <= self.last.get(dep.name, inf) <= snode.max_order
        }
        made, freed = (sum(d.numbytes_hint() for d in deps.values()) for deps in (makes, frees))
        return made, freed


def _limits(snodes: Sequence[Any]) -> dict[str, float]:
    """By when each buffer must be there: the place of the next launch or wait, seen from the first
    kernel of another library, such as a matrix product, that needs it directly or by way of loops.

    Args:
        snodes: before fusion, in an order in which they can run.
    """
    events = sorted(
        s.min_order for s in snodes if _torch.is_scheduled_start(s) or _torch.is_scheduled_wait(s)
    )
    limits: dict[str, float] = {}
    for snode in reversed(snodes):  # users come before what they use
        made = [limits.get(str(name), inf) for name in snode.get_buffer_names()]
        if snode.is_extern():
            behind = bisect_left(events, snode.min_order)
            made += events[behind : behind + 1]
        for dep in snode.unmet_dependencies:
            if not getattr(dep, "is_fake", False):  # which stand for a sequence
                limits[str(dep.name)] = min((*made, limits.get(str(dep.name), inf)))
    return limits
