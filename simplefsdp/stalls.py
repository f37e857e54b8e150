"""Says which ranks a forward waits for, if it takes long.

A rank that calls a model more often than others waits in a gather until the process group's
timeout, which with gloo is half an hour, and nothing says why. So each rank that is in a forward,
or in a whole step that is one program, says so in the store every few seconds. If it takes long, a
few ranks look who does not say so: those are somewhere else. On a GPU a forward only launches, and
nothing is noticed; NCCL has a watchdog of its own.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from simplefsdp.rank_guard import store_of
from simplefsdp.rank_sequence import value_now
from simplefsdp.words import few_ranks

log = logging.getLogger("simplefsdp")
_LONG_S, _EVERY_S = 30.0, 5.0
_LOOKS = 3  # in which nothing was heard of a rank that is missed
_LOOKING = 8  # ranks that look, lest all ranks ask the store about all


@dataclass(eq=False)
class Watched:
    """A forward of this rank."""

    ranks: Sequence[int]  # with which it communicates, ascending
    began: float
    looks: int = 0
    signs: dict[int, str] = field(default_factory=dict)  # the last one of each rank
    heard: dict[int, int] = field(default_factory=dict)  # the look at which it had come
    is_told: bool = False


class _Watch(threading.Thread):
    """Says that this rank is in a forward, and looks who else is."""

    def __init__(self) -> None:
        super().__init__(name="simplefsdp-stalls", daemon=True)
        self.watched = dict[int, Watched]()  # by ``id``: those that go on, of all threads
        self._signs = itertools.count(time.time_ns())  # none is what an earlier watch left behind

    def run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.look()

    def look(self) -> None:
        """Of each forward that goes on: say so, and see who else is in it."""
        for watched in list(self.watched.values()):
            # The process group, or the process that serves its store, may be gone.
            with suppress(RuntimeError, ValueError):
                self._look(watched, store_of(watched.ranks), dist.get_rank())

    def _look(self, watched: Watched, store: Any, rank: int) -> None:
        store.set(f"stalls/{rank}", str(next(self._signs)))
        ranks, took_s = watched.ranks, time.monotonic() - watched.began
        looking = ranks[:: max(1, len(ranks) // _LOOKING)]
        if took_s < _LONG_S or watched.is_told or rank not in looking:
            return
        watched.looks += 1
        for other in ranks:
            sign = value_now(store, f"stalls/{other}")
            if sign != watched.signs.get(other, sign):  # the first one may be old
                watched.heard[other] = watched.looks
            watched.signs[other] = sign
        # This rank's sign is a new one each time.
        missing = [
            other for other in ranks if watched.looks - watched.heard.get(other, 0) >= _LOOKS
        ]
        if missing and rank == min({*looking} - {*missing}):
            watched.is_told = True
            log.warning(
                "rank %d has been in a forward, or a whole step, for %.0f s, and %s %s not in one. "
                "That is as it should be if what is done there takes long, such as saving. With "
                "fewer batches there, this ends with the process group's timeout: give all ranks "
                "equally many",
                rank,
                took_s,
                few_ranks(missing),
                "is" if len(missing) == 1 else "are",
            )


_watch: list[_Watch] = []


def begin(ranks: Sequence[int], device_type: str) -> Watched | None:
    """Watch a forward that begins, and communicates with ``ranks`` (ascending), until :func:`end`;
    None if there is nothing to watch."""
    if len(ranks) < 2 or device_type != "cpu":
        return None
    if not _watch or not _watch[0].is_alive():  # no thread lives on in a fork
        _watch[:] = [_Watch()]
        _watch[0].start()
    watched = Watched(ranks, time.monotonic())
    _watch[0].watched[id(watched)] = watched
    return watched


def end(watched: Watched | None) -> None:
    """Watch a forward no longer."""
    if watched is not None and _watch:
        _watch[0].watched.pop(id(watched), None)


def watching(
    compiled: Callable[..., Any], ranks: Sequence[int], device_type: str
) -> Callable[..., Any]:
    """``compiled``, whose calls are watched as :func:`begin` says."""
    if device_type != "cpu":
        return compiled

    def call(*args: Any) -> Any:
        watched = begin(ranks, device_type)
        try:
            return compiled(*args)
        finally:
            end(watched)

    return call
