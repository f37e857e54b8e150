"""Graphs whose sizes are open: for which sizes a plan holds, and what happens for others.

The log says so when a graph is planned, and once more before the first call with another size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from inductor_passes.adapters.devices import cluster_of
from inductor_passes.adapters.roofline import device_of
from inductor_passes.garbage import no_garbage_collection
from inductor_passes.rehearsal import Rehearsal, Settings, room_nbytes
from inductor_passes.size_range import ENDLESS, OpenPlan, SizeRange, SizeSpan, open_plan, range_of
from simplefsdp._torch.symbolic import open_inputs
from simplefsdp.compiler.machine import is_an_example
from simplefsdp.rank_logging import level

log = logging.getLogger("simplefsdp")

_RESET = "call torch.compiler.reset() on all ranks"


class SizeLimits:
    """The open sizes of a Dynamo graph, and the ranges in which its plans hold.

    Only sizes that memory depends on are watched: another number may change with every call.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._sizes = open_inputs(gm)
        self._planned: list[_Planned] = []
        self._watched: tuple[int, ...] = ()
        self._look = functools.lru_cache(1024)(self._tell)

    @no_garbage_collection()
    def ranges(
        self, part: str, rehearsal: Rehearsal, settings: Settings | None, *, timed: bool
    ) -> tuple[SizeRange, ...]:
        """The range of each open size in which the plan of the forward or the backward graph holds.
        From now on calls outside of them are logged.

        There are none if no size is open, or if nobody knows what memory there is. Without a budget
        it is taken to be what a device has beside fp32 shards of all parameters and AdamW's two
        moments; that is wrong if the graph, as it was traced, already takes more. If there are
        none, a plan that was made for another graph, and takes more than the user allows, is warned
        of now.
        """
        found: tuple[SizeRange, ...] = ()
        try:
            if self._sizes:
                found = self._ranges(part, rehearsal, settings, timed=timed)
        finally:
            if not found and (nbytes := exceeded(rehearsal, settings)) is not None:
                # A plan for another graph cannot be made anew: the other ranks go on with it.
                text = _of_memory(*nbytes, is_users=True)
                log.warning("%s graph: planned for another batch or rank: %s", part, text)
        return found

    def _ranges(
        self, part: str, rehearsal: Rehearsal, settings: Settings | None, *, timed: bool
    ) -> tuple[SizeRange, ...]:
        auto = settings.auto if settings is not None else None
        try:
            cluster = auto.cluster if auto else cluster_of(device_of(rehearsal.reading))
        except ValueError:
            return ()
        allowed = auto.budget_nbytes if auto is not None else None
        if allowed is None and is_an_example(cluster):
            return ()
        opened = open_plan(rehearsal, settings, cluster, tuple(self._sizes.values()))
        room = room_nbytes(rehearsal.reading.program, cluster) if allowed is None else allowed
        if not opened.open or (allowed is None and opened.peak_nbytes() > room):
            return ()
        timed = timed and auto is not None
        found = tuple(range_of(opened, size, room, timed=timed) for size in opened.open)
        self._planned.append(_Planned(part, opened, found, room, allowed is not None))
        depends = {size.symbol for planned in self._planned for size in planned.plan.open}
        self._watched = tuple(p for p, size in self._sizes.items() if size.symbol in depends)
        self._look.cache_clear()
        return found

    def watching(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``; a call that is outside of a range is logged first, once for each side."""
        if not self._sizes:
            return compiled

        def call(*args: Any) -> Any:
            if self._watched:
                try:
                    self._look(*[args[place] for place in self._watched])
                except Exception as error:  # other ranks go on: it must not end this one's step
                    self._watched = ()
                    log.warning("sizes of calls are not compared with the plan: %r", error)
            return compiled(*args)

        return call

    def _tell(self, *sizes: int) -> None:
        names = [str(self._sizes[place].symbol) for place in self._watched]
        for planned in self._planned:
            planned.tell(dict(zip(names, sizes, strict=True)))


@dataclass
class _Planned:
    """The plan of a graph whose sizes are open."""

    part: str
    plan: OpenPlan
    ranges: tuple[SizeRange, ...]
    room_nbytes: int
    is_users: bool
    _told: set[str] = field(default_factory=set)

    def tell(self, sizes: Mapping[str, int]) -> None:
        """Log what happens at ``sizes`` if they are out of range, once for each side of it."""
        at = [(found, sizes[str(found.size.symbol)]) for found in self.ranges]
        if not self.plan.is_known(**sizes):
            larger = any(size > found.size.hint for found, size in at)
            at_level = logging.WARNING if larger else level()
            text = f"nothing is predicted of it; for a plan, {_RESET}, and compile it first"
            self._once("unknown", at, text, at_level)
        elif self._takes_more(sizes, at):
            nbytes = self.plan.peak_nbytes(**sizes)
            text = _of_memory(nbytes, self.room_nbytes, self.is_users)
            self._once("memory", at, text)
        else:
            for found, size in at:
                near = found.near
                if near is not None and not near.least <= size <= near.most:
                    text = (
                        f"its step is predicted to take more than {found.factor:.3g} times its "
                        f"lower bound; to plan for such sizes, {_RESET}, and compile one of them "
                        "first"
                    )
                    self._once(f"{found.size.name} {size > near.most}", at, text, level())

    def _takes_more(self, sizes: Mapping[str, int], at: Sequence[tuple[SizeRange, int]]) -> bool:
        if len(at) == 1:  # else a range holds only while the other sizes are as they were
            ((found, size),) = at
            if found.fits is not None and size <= found.fits.most:
                return False
        return self.plan.peak_nbytes(**sizes) > self.room_nbytes

    def _once(
        self,
        side: str,
        at: Sequence[tuple[SizeRange, int]],
        text: str,
        at_level: int = logging.WARNING,
    ) -> None:
        if side not in self._told:
            self._told.add(side)
            now = ", ".join(f"{one.size.name} = {one.size.hint}, now {size}" for one, size in at)
            log.log(at_level, "%s graph: compiled at %s: %s", self.part, now, text)


def exceeded(rehearsal: Rehearsal, settings: Settings | None) -> tuple[int, int] | None:
    """The bytes that a plan takes and the bytes that the user allows, if these are less, as may be
    with a plan that was made for another graph; else None."""
    auto = settings.auto if settings is not None else None
    budget_nbytes = auto.budget_nbytes if auto is not None else None
    if rehearsal.plan is None or budget_nbytes is None:
        return None
    peak_nbytes = rehearsal.plan.peak_nbytes
    return (peak_nbytes, budget_nbytes) if peak_nbytes > budget_nbytes else None


def _of_memory(peak_nbytes: int, room_nbytes: int, is_users: bool) -> str:
    room = f"{room_nbytes / 1e9:.4g}"
    room = f"memory_budget_gb={room}" if is_users else f"a device is taken to have {room} GB"
    return (
        f"it is predicted to take {peak_nbytes / 1e9:.4g} GB beside shards of parameters, where "
        f"{room}, and may run out of memory; pass a smaller batch; "
        f"or {_RESET}, and compile the largest batch first"
    )


def describe_range(found: SizeRange) -> str:
    """A range in words, for the log."""
    size, room = found.size, f"{found.room_nbytes / 1e9:.3g} GB"
    peak, here = f"{found.peak_nbytes / 1e9:.3g} GB", f"{size.name} is open ({size.hint} here)"
    if found.fits is None:
        return f"{here}: it takes {peak}, where {room} are allowed"
    text = f"{here}: fits {room} {_text(found.fits)} ({peak} at {found.fits.most})"
    if found.near is not None:
        text += f", takes at most {found.factor:.3g} times its lower bound {_text(found.near)}"
    if found.known != (size.least, size.most):
        text += f"; nothing is predicted of it but {_text(found.known)}"
    return text


def _text(span: SizeSpan) -> str:
    return f"from {span.least} on" if span.most >= ENDLESS else f"from {span.least} to {span.most}"
