"""Adapter: limits which loops Inductor fuses, so that what must run before a launch or wait is not
delayed, and no more memory is live."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from inductor_passes.adapters import _torch


@contextmanager
def fusions_as_planned() -> Iterator[None]:
    """While Inductor lowers a graph: no fusion delays what must run before a launch or wait, and
    none makes more memory live.

    Fusing two norms' gradients, say, would delay the launch that needs the first one until the
    second one is computed. A matrix product would come too late to hide a gather if a loop that it
    needs were fused with a loop behind that gather's wait. What is recomputed for a product much
    later would be live early if it were fused with a loop that reads the same: 9 % of a step's peak
    (``benchmarks/LOG.md``). Combo kernels, an option of Inductor's, are not checked. Symbolic sizes
    count as in the batch at hand: so ranks may fuse differently, but launch the same.
    """
    from torch._inductor.virtualized import V

    inherited = V.choices
    choices = copy(inherited)
    known: WeakKeyDictionary[Any, _Schedule] = WeakKeyDictionary()

    def can_fuse(scheduler: Any, one: Any, other: Any, shared_data_score: int) -> bool:
        if scheduler not in known:  # asked for the first time, nothing is fused
            known[scheduler] = _Schedule(scheduler.nodes, V.graph.get_output_names())

        def now(operation: str) -> Any:
            return scheduler.name_to_fused_node[operation]

        first, second = sorted((one, other), key=lambda snode: snode.min_order)
        as_planned = known[scheduler].may_be_one(first, second, now)
        return as_planned and inherited.can_fuse(scheduler, one, other, shared_data_score)

    choices.can_fuse = can_fuse  # type: ignore[method-assign, assignment]
    with V.set_choices_handler(choices):
        yield


class _Schedule:
    """A schedule before fusion. ``now(operation)`` gives the node, perhaps fused, that has an
    operation by now; it is asked each time, as a reader of one fused loop must wait for both."""

    def __init__(self, snodes: Sequence[Any], returned: Iterable[str]) -> None:
        self.limits = _limits(snodes)
        self.kernels = [s for s in snodes if s.is_extern()]  # other libraries', launches and waits
        self.places = [s.min_order for s in self.kernels]
        # The place of the last node that reads each buffer; endless for what is returned.
        self.last: dict[str, float] = {
            str(dep.name): s.min_order for s in snodes for dep in s.read_writes.reads
        }
        self.last.update(dict.fromkeys(returned, inf))
        self.maker: dict[str, str] = {}  # the operation that makes each buffer
        self.readers: dict[str, list[str]] = {}  # the operations that need each buffer
        for snode in snodes:
            self.maker |= dict.fromkeys(map(str, snode.get_buffer_names()), snode.get_name())
            for dep in snode.unmet_dependencies:
                self.readers.setdefault(str(dep.name), []).append(snode.get_name())

    def may_be_one(self, first: Any, second: Any, now: Callable[[str], Any]) -> bool:
        """Whether two loops may run as one. They run where ``first`` is; or where ``second`` is, if
        that needs a kernel, launch or wait that is behind ``first``."""
        is_early = self._can_come_first(first, second, now)
        place = first.max_order if is_early else max(first.max_order, second.max_order)
        in_time = place < self._limit(first, second, now)
        return bool(in_time and not self._holds_more(first, second, is_early))

    def _holds_more(self, first: Any, second: Any, is_early: bool) -> bool:
        """Whether fusion makes more bytes live. If ``second`` runs early, its results exist early,
        and what it reads last is freed early; else ``first`` runs late, its results exist late, and
        what it reads last stays. False if ``second`` needs ``first``, or no kernel is between."""
        begin, end = (bisect_left(self.places, n) for n in (first.max_order, second.min_order))
        if not self.kernels[begin:end] or second.ancestors & first.get_operation_names():
            return False
        moved = second if is_early else first
        end_of_reads = second.max_order if is_early else second.min_order - 1
        made, freed = self._makes_and_frees(moved, end_of_reads)
        return made > freed if is_early else freed > made

    def _can_come_first(self, first: Any, second: Any, now: Callable[[str], Any]) -> bool:
        """Whether ``second``, and all loops behind ``first`` that it needs, need nothing else that
        is behind ``first``."""
        seen, left = {first, second}, [second]
        while left:
            for dep in left.pop().unmet_dependencies:
                if (operation := self.maker.get(str(dep.name))) is None:
                    continue
                needed = now(operation)
                if needed in seen or needed.max_order <= first.max_order:
                    continue
                if needed.is_extern():
                    return False
                seen.add(needed)
                left.append(needed)
        return True

    def _limit(self, first: Any, second: Any, now: Callable[[str], Any]) -> float:
        """The place before which both must run, for the sake of all that reads them, directly or
        through loops as they are fused now."""
        limit, seen, left = inf, {first, second}, [first, second]
        while left:
            for name in map(str, left.pop().get_buffer_names()):
                limit = min(limit, self.limits.get(name, inf))
                readers = {now(operation) for operation in self.readers.get(name, ())} - seen
                readers = {reader for reader in readers if not reader.is_extern()}
                seen |= readers
                left += readers
        return limit

    def _makes_and_frees(self, snode: Any, until: int) -> tuple[int, int]:
        """Bytes that a loop makes for later ops, and bytes that it reads and that nobody reads
        after ``until``."""
        reads, writes = snode.read_writes.reads, snode.read_writes.writes
        own = {dep.name for dep in writes}
        makes = {d.name: d for d in writes if self.last.get(d.name, 0) > snode.max_order}
        frees = {
            dep.name: dep
            for dep in reads
            if dep.name not in own and snode.min_order <= self.last.get(dep.name, inf) <= until
        }
        made, freed = (sum(d.numbytes_hint() for d in deps.values()) for deps in (makes, frees))
        return made, freed


def _limits(snodes: Sequence[Any]) -> dict[str, float]:
    """The place before which each buffer must exist: that of the next launch or wait from the first
    kernel of another library on, such as a matmul, that needs the buffer directly or through loops.

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
            if not getattr(dep, "is_fake", False):  # fake ones stand for a sequence, not for data
                limits[str(dep.name)] = min((*made, limits.get(str(dep.name), inf)))
    return limits
