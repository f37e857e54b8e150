"""What one rank works at for minutes, and others wait for: whether it goes on, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import TypeVar

import torch.distributed as dist

from simplefsdp.rank_guard import store_of, wait_for

Result = TypeVar("Result")
_AT_MOST = 10  # times what is waited for a sign of life; who works for longer is stuck
_GOES_ON, _SUCCEEDED, _FAILED = "goes on", "succeeded", "failed"


class RankWork:
    """The work of one of ``ranks``, ``worker``, which gives signs of life. The others wait for each
    of these for ``timeout_s``, and in all for ten times that.

    Args:
        what: the work, for messages: "the code that rank 0 makes".
        name: the same on all ranks, which come to work of that name equally often.
        ranks: global ranks that share the store.
        worker: the one that does it.
        timeout_s: how long to wait for a sign of life.
    """

    def __init__(
        self, what: str, name: str, ranks: Sequence[int], worker: int, timeout_s: float
    ) -> None:
        self._what, self._worker, self._timeout_s = what, worker, timeout_s
        self._store, self._signs = store_of(ranks), 0
        # The n-th of this name on one rank is the n-th on the others, whatever else they have done.
        turn = self._store.add(f"work/{name}/turns/{dist.get_rank()}", 1)
        self._keys = f"work/{name}/{turn}"

    def do(self, work: Callable[[], Result | None]) -> Result | None:
        """Do it, as the worker; gives what ``work`` gives, None if it did not succeed. What it
        raises, the others do not hear of."""
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
        """Whether it succeeded, when it has ended.

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
                speaks=lambda: False,  # that another compiles is nothing to warn of
            )
            self._signs += 1
            if (told := self._store.get(key).decode()) != _GOES_ON:
                return bool(told == _SUCCEEDED)
