"""Ranks that do what all have done before, but not at the same time, find out soon after.

Who does something new compares it with the others first (``rank_guard.py``). A rank that changes
over to a branch that all have taken before asks nobody. If another layer of the same size is
gathered there, no collective complains, and every rank computes with a part of each. So each rank
sums up what it has gathered. Now and then the lowest leaves its sum in the process group's store,
and the others look whether theirs is the same. Nobody waits: what is not there yet is looked at
the next time.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from simplefsdp.rank_guard import RankMismatchError, store_of

# Gathers after which sums are compared first; then after twice as many, and at least so often.
FIRST, PERIOD = 16, 4096
_KEPT = 8  # sums that are left in the store, and that a rank waits to compare


class Gathered(NamedTuple):
    """What one forward gathers."""

    checksum: int
    fqns: tuple[str, ...]


def gathered(fqns: Iterable[str]) -> Gathered:
    """Of parameters, in the order in which they are gathered."""
    names = tuple(fqns)
    return Gathered(zlib.crc32("\n".join(names).encode()), names)


class RankSequence:
    """What one rank has gathered so far, together with the same others.

    Args:
        store: that the ranks share.
        rank: this one.
        ranks: all of them.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._lowest = store, rank, min(ranks)
        # The n-th sequence on one rank meets the n-th on the others, as turns of the rank guard.
        self._number = store.add(f"sequences/{rank}", 1)
        self._sum = self._count = self._compared = 0
        self._next = FIRST
        self._last: deque[Gathered] = deque(maxlen=3)
        self._waiting: dict[int, tuple[str, str]] = {}

    def note(self, now: Gathered) -> None:
        """This rank gathers something, or just has.

        Raises:
            RankMismatchError: another rank has gathered something else.
        """
        self._sum = zlib.crc32(now.checksum.to_bytes(4, "big"), self._sum)
        self._count += len(now.fqns)
        self._last.append(now)
        if self._count >= self._next:
            while self._next <= self._count:
                self._next += min(self._next, PERIOD)
            self._compared += 1
            self._compare()

    def _compare(self) -> None:
        mine, last = f"{self._count} {self._sum}", "; then ".join(map(_text, self._last))
        if self._rank == self._lowest:
            self._store.set(self._key(self._compared), f"{mine}\n{last}")
            with suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(self._key(self._compared - _KEPT))
            return
        self._waiting[self._compared] = mine, last
        for number in list(self._waiting):
            # As `get`, which would wait for it; what is not there is empty then.
            found = self._store.compare_set(self._key(number), "", "").decode()
            if found:
                theirs, _, their_last = found.partition("\n")
                mine, last = self._waiting.pop(number)
                if theirs != mine:
                    raise RankMismatchError(_told_apart(self._lowest, their_last, self._rank, last))
        if len(self._waiting) > _KEPT:
            del self._waiting[min(self._waiting)]

    def _key(self, number: int) -> str:
        return f"sequence/{self._number}/{number}"


_sequences: WeakKeyDictionary[Any, dict[tuple[int, ...], RankSequence]] = WeakKeyDictionary()


def note(ranks: Sequence[int], now: Gathered) -> None:
    """See :meth:`RankSequence.note`; of ``ranks``, global ones, this one among them. Nothing
    happens if it is alone, or nothing is gathered."""
    if len(ranks) < 2 or not now.fqns:
        return
    known, key = _sequences.setdefault(dist.group.WORLD, {}), tuple(ranks)
    if key not in known:
        known[key] = RankSequence(store_of(key), dist.get_rank(), key)
    known[key].note(now)


def _text(one: Gathered) -> str:
    first, n = one.fqns[0], len(one.fqns)
    return first if n == 1 else f"{first} to {one.fqns[-1]} ({n} parameters)"


def _told_apart(lowest: int, theirs: str, rank: int, mine: str) -> str:
    return (
        "ranks have not gathered the same parameters in the same order, so their values were mixed "
        f"up: at the end rank {lowest} gathered {theirs}; rank {rank} gathered {mine}. What was "
        "trained since the last checkpoint may be wrong. Let no branch depend on the rank or on "
        "local data: seed what drops layers alike on all ranks, or turn it off; run all heads on "
        "all ranks"
    )
