"""Says which ranks a forward waits for, if it takes long.

A rank that calls a model more often than others waits in a gather until the process group's
timeout, which with gloo is half an hour, and nothing says why. So each rank says in the store,
again and again, that its forward takes long, and the lowest ranks look who does not: those are
somewhere else. On a GPU a forward only launches, and nothing is noticed; NCCL has a watchdog of its
own.
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

import torch
import torch.distributed as dist

from simplefsdp.rank_guard import few, store_of

log = logging.getLogger("simplefsdp")
_LONG_S, _EVERY_S = 30.0, 5.0
_LOOKS = 3  # in which nothing was heard of a rank that is missed
_LOOKING = 8  # ranks that look, lest the store be asked by all ranks about all ranks


@dataclass(eq=False)
class _Forward:
    ranks: Sequence[int]
    began: float
    looks: int = 0
    heard: dict[int, tuple[str, int]] = field(default_factory=dict)  # sign, look at which it came
    is_told: bool = False


class _Watch(threading.Thread):
    """Looks now and then whether a forward takes long."""

    def __init__(self) -> None:
        super().__init__(name="simplefsdp-stalls", daemon=True)
        self.now: _Forward | None = None
        self._signs = itertools.count(1)

    def run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            now = self.now
            if now is not None and time.monotonic() - now.began > _LONG_S:
                # The process group, or the process that serves its store, may be gone.
                with suppress(RuntimeError, ValueError):
                    self._look(now, store_of(now.ranks), dist.get_rank())

    def _look(self, now: _Forward, store: Any, rank: int) -> None:
        store.set(f"stalls/{rank}", str(next(self._signs)))
        now.looks += 1
        if rank not in now.ranks[:_LOOKING] or now.is_told:
            return
        for other in now.ranks:
            # Like `get`, but without waiting: empty if there is none.
            sign = store.compare_set(f"stalls/{other}", "", "").decode()
            if now.heard.get(other, ("", 0))[0] != sign:
                now.heard[other] = sign, now.looks if now.looks > 1 else 0  # it may be an old one
        # This rank's sign is a new one each time.
        missing = [r for r in now.ranks if now.looks - now.heard.get(r, ("", 0))[1] >= _LOOKS]
        if missing and rank == min({*now.ranks} - {*missing}):
            now.is_told = True
            log.warning(
                "rank %d has been in a forward for %.0f s, and %s %s not in one. That is as it "
                "should be if what is done there takes long, such as saving. With fewer batches "
                "there, this forward ends with the process group's timeout: give all ranks equally "
                "many",
                rank,
                time.monotonic() - now.began,
                few(missing),
                "is" if len(missing) == 1 else "are",
            )


_watch: list[_Watch] = []


def begin(ranks: Sequence[int]) -> None:
    """Note that a forward of this rank begins, or goes on, which communicates with ``ranks``."""
    if len(ranks) < 2 or torch.accelerator.is_available():
        return
    if not _watch or not _watch[0].is_alive():  # no thread lives on in a fork
        _watch[:] = [_Watch()]
        _watch[0].start()
    if _watch[0].now is None:
        _watch[0].now = _Forward(sorted(ranks), time.monotonic())


def end() -> None:
    """Note that no forward of this rank goes on."""
    if _watch:
        _watch[0].now = None


def watching(compiled: Callable[..., Any], ranks: Sequence[int]) -> Callable[..., Any]:
    """``compiled``, which communicates with ``ranks``, between :func:`begin` and :func:`end`."""

    def call(*args: Any) -> Any:
        begin(ranks)
        try:
            return compiled(*args)
        finally:
            end()

    return call
