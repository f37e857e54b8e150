"""Who wants to see each graph that is compiled: the door between the backend and inspection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from inductor_passes.cluster import Cluster
    from inductor_passes.rehearsal import Rehearsal, Settings

log = logging.getLogger("simplefsdp")


class Seen(NamedTuple):
    """A graph as the passes get it, and what they will make of it.

    Attributes:
        part: ``"forward"`` or ``"backward"``.
        rehearsal: see :class:`inductor_passes.rehearsal.Rehearsal`.
        settings: of the passes; None for none.
        pass_seconds: that reading, planning and ordering took, and waiting for the plan.
        compilation: the same for a forward graph and its backward, and for no others.
        call: the same for all graphs that a call of the model runs: several if Dynamo breaks it.
    """

    part: str
    rehearsal: Rehearsal
    settings: Settings | None
    pass_seconds: float
    compilation: int
    call: int = 0


Watcher = Callable[[Seen], None]
_watchers: list[Watcher] = []


def show(seen: Seen) -> None:
    """Show a graph to whoever watches. A watcher that fails is named in a warning, no more."""
    for watcher in tuple(_watchers):
        try:
            watcher(seen)
        except Exception as error:
            log.warning("inspect: the %s graph is not in the report: %r", seen.part, error)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show ``watcher`` each graph that is compiled inside."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def assumed_cluster(rehearsal: Rehearsal, settings: Settings | None) -> Cluster:
    """What to predict a graph for: its plan's cluster, else the device's preset, else an H100's."""
    from inductor_passes.presets import preset
    from inductor_passes.roofline import cluster_of, device_of

    if settings is not None and settings.auto is not None:
        return settings.auto.cluster
    try:
        return cluster_of(device_of(rehearsal.reading))
    except ValueError:
        return preset("h100")
