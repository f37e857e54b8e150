"""What one rank works at for minutes, and others wait for: its steps, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from simplefsdp.rank_guard import store_of, wait_for


class RankWork:
    """The work of one of ``ranks``, that ``worker`` is. Others are as patient as ``timeout_s`` says
    with each of its steps, not with all of it: deep models take longer.

    Args:
        what: the work, for messages: "the code that rank 0 compiles for others".
        number: the same on all ranks and for no other work, see
            :func:`simplefsdp.rank_guard.first_with_the_same`.
        ranks: global ranks that share the store.
        worker: the one that does it.
        timeout_s: how long to wait for each step.
    """

    def __init__(
        self, what: str, number: int, ranks: Sequence[int], worker: int, timeout_s: float
    ) -> None:
        self._what, self._worker, self._timeout_s = what, worker, timeout_s
        self._store, self._keys = store_of(ranks), f"work/{number}/{worker}"
        self._steps = 0

    def step(self) -> None:
        """The worker has done a step, and goes on."""
        self._say("goes on")

    def end(self, *, succeeded: bool) -> None:
        """The worker has done all, or has failed."""
        self._say("succeeded" if succeeded else "failed")

    def _say(self, text: str) -> None:
        self._store.set(f"{self._keys}/{self._steps}", text)
        self._steps += 1

    def wait(self) -> bool:
        """Whether it succeeded, when it has ended.

        Raises:
            RankMismatchError: no step came in time.
        """
        remedy = (
            "It ended, or compiles for longer than that; see its log, or raise "
            "options['rank_guard_timeout_s']"
        )
        while True:
            key = f"{self._keys}/{self._steps}"
            wait_for(
                self._what,
                self._store,
                {self._worker: key},
                self._timeout_s,
                remedy,
                speaks=lambda: False,  # that others compile is nothing to warn of
            )
            told = self._store.get(key).decode()
            if told != "goes on":
                return bool(told == "succeeded")
            self._steps += 1
