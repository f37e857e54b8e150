"""Who wants to see each graph that is compiled: the door between the backend and inspection."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from inductor_passes.cluster import Cluster
    from inductor_passes.rehearsal import Rehearsal, Settings
    from simplefsdp.inspection.capture import Report

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


def inspect(
    cluster: Cluster | str | os.PathLike[str] | None = None,
) -> AbstractContextManager[Report]:
    """Report on whatever the ``"simplefsdp"`` backend compiles inside, cache hits included.

    ::

        with simplefsdp.inspect() as report:
            train_step(batch)
        print(report)  # rank 0 speaks
        report.save("report.html")

    Args:
        cluster: that times are predicted for, as ``options["cluster"]``. None: that of the plan, if
            it is an automatic one, else the preset for the device (an H100 if there is none).

    Returns:
        A context manager, that gives a :class:`simplefsdp.inspection.capture.Report`.

    Raises:
        TypeError, ValueError: there is no such cluster.
    """
    from simplefsdp.inspection.capture import capture

    return capture(cluster)
