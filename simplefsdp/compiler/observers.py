"""Observers are called with each graph that is compiled: so inspection learns of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from inductor_passes.rehearsal import Rehearsal, Settings
from inductor_passes.size_range import SizeRange

log = logging.getLogger("simplefsdp")

Part = Literal["forward", "backward", "step"]


class CompiledGraph(NamedTuple):
    """A graph as the passes get it, and what they will make of it."""

    part: Part  # what of a training step it is; ``"step"`` is all of it, see :mod:`simplefsdp.step`
    rehearsal: Rehearsal  # see :class:`inductor_passes.rehearsal.Rehearsal`
    settings: Settings | None  # of the passes; None for none
    pass_seconds: float  # that reading, planning and ordering took, and waiting for the plan
    compilation: int  # the same for a forward graph and its backward, and for no others
    # The same for all graphs that a call of the model runs: several if Dynamo breaks it.
    call: int = 0
    # For each size that was left open, the range in which the plan holds.
    ranges: tuple[SizeRange, ...] = ()


Observer = Callable[[CompiledGraph], None]
_observers: list[Observer] = []


def notify(seen: CompiledGraph) -> None:
    """Call each observer with a graph. One that fails leads to a warning, and to nothing else."""
    for observer in tuple(_observers):
        try:
            observer(seen)
        except Exception as error:
            log.warning("inspect: the %s graph is not in the report: %r", seen.part, error)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show ``observer`` each graph that is compiled inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def any_listen() -> bool:
    """Whether somebody wants to see each graph that is compiled."""
    return bool(_observers)
