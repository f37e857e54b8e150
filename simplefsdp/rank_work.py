"""Work of minutes that one rank does and the others wait for, with signs of life and a result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import TypeVar

import torch.distributed as dist

from simplefsdp.rank_guard import store_of, wait_for

Result = TypeVar("Result")
_AT_MOST = 10  # timeouts that the work may take in all; a worker that takes longer is stuck
_GOES_ON, _SUCCEEDED, _FAILED = "goes on", "succeeded", "failed"


class RankWork:
    """Work that the rank ``worker`` does, giving signs of life. The other ranks wait up to
    ``timeout_s`` for each sign; the worker stops giving them after ten times ``timeout_s``.

    Args:
        what: the work, for messages: "the code that rank 0 makes".
        name: the same on all ranks; every rank makes equally many of these objects with this name.
        ranks: global ranks that share the store.
        worker: the rank that does the work.
        timeout_s: how long to wait for a sign of life.
    """

    def __init__(
        self, what: str, name: str, ranks: Sequence[int], worker: int, timeout_s: float
    ) -> None:
        self._what, self._worker, self._timeout_s = what, worker, timeout_s
        self._store, self._signs = store_of(ranks), 0
        # The n-th work of this name on one rank meets the n-th of this name on the others.
        turn = self._store.add(f"work/{name}/turns/{dist.get_rank()}", 1)
        self._keys = f"work/{name}/{turn}"

    def do(self, work: Callable[[], Result | None]) -> Result | None:
        """Call ``work`` on the worker; gives its result, where None means that it failed. The other
        ranks hear that it failed, but not which error it raised."""
        ended, until = Event(), time.monotonic() + _AT_MOST * self._timeout_s

        def live() -> None:
            while not ended.wait(min(10.0, self._timeout_s / 4)) and time.monotonic() < until:
                self._say(_GOES_ON)

        signs = Thread(target=live, name="simplefsdp-signs", daemon=True)
        signs.start()
        result = None
        try:
            result = work()
        finally:
            ended.set()
            signs.join()
            self._say(_FAILED if result is None else _SUCCEEDED)
        return result

    def _say(self, text: str) -> None:
        self._store.set(f"{self._keys}/{self._signs}", text)
        self._signs += 1

    def wait(self) -> bool:
        """Wait until the work has ended, on a rank that is not the worker; whether it succeeded.

        Raises:
            RankMismatchError: the worker gives no sign of life any more.
        """
        while True:
            key = f"{self._keys}/{self._signs}"
            wait_for(
                self._what,
                self._store,
                {self._worker: key},
                self._timeout_s,
                "It ended, or is stuck; see its log",
                speaks=lambda: False,  # another rank's compiling is no reason for a warning
            )
            self._signs += 1
            if (told := self._store.get(key).decode()) != _GOES_ON:
                return bool(told == _SUCCEEDED)
