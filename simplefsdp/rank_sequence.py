"""Ranks that do what all have done before, but not at the same time, find out soon after.

Who does something new compares it with the others first (``rank_guard.py``). A rank that changes
over to a branch that all have taken before asks nobody. If another layer of the same size is
gathered there, no collective complains, and every rank computes with a part of each. So the ranks
of a process group sum up what they gather and, eagerly, what they reduce. Now and then the lowest
leaves its sum in the store, and the others look whether theirs is the same. Nobody waits: what is
not there yet is looked at the next time. The lowest itself learns nothing of it; it ends with them.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from simplefsdp.rank_guard import RankMismatchError, store_of

# Tensors after which sums are compared first; then after twice as many, and at least so often.
FIRST, PERIOD = 16, 4096
_KEPT = 32  # sums that are left in the store, and that a rank waits to compare


class Gathered(NamedTuple):
    """What is gathered at a time, by one forward or graph."""

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
        if self._count < self._next:
            return
        while self._next <= self._count:
            self._next += min(self._next, PERIOD)
        self._compared += 1
        mine, last = f"{self._count} {self._sum}", "; then ".join(map(_text, self._last))
        self._sum = 0  # what was told once is not told for ever
        try:
            found = self._exchanged(mine, last)
        except RuntimeError:  # who has the store may be done, and the others nearly
            return
        for theirs, their_last, own, own_last in found:
            if theirs != own:
                raise RankMismatchError(
                    _told_apart(f"rank {self._lowest}", theirs, their_last)
                    + _told_apart(f"rank {self._rank}", own, own_last)
                    + _REMEDY
                )

    def _exchanged(self, mine: str, last: str) -> list[tuple[str, str, str, str]]:
        """Sums of the lowest that are there, with what it gathered last, and this rank's."""
        if self._rank == self._lowest:
            self._store.set(self._key(self._compared), f"{mine}\n{last}")
            self._store.delete_key(self._key(self._compared - _KEPT))
            return []
        self._waiting[self._compared] = mine, last
        there = []
        for number in list(self._waiting):
            # As `get`, which would wait for it; what is not there is empty then.
            found = self._store.compare_set(self._key(number), "", "").decode()
            if found:
                theirs, _, their_last = found.partition("\n")
                there.append((theirs, their_last, *self._waiting.pop(number)))
        if len(self._waiting) > _KEPT:
            del self._waiting[min(self._waiting)]
        return there

    def _key(self, number: int) -> str:
        return f"sequence/{self._number}/{number}"


# By the default process group, and the name of the one that gathers.
_sequences: WeakKeyDictionary[Any, dict[str, RankSequence | None]] = WeakKeyDictionary()
_lock = threading.Lock()


def note(group: str, now: Gathered) -> None:
    """See :meth:`RankSequence.note`; ``group`` is the name of the process group that gathers.
    Nothing happens if this rank is alone in it, or nothing is gathered."""
    if not (group and now.fqns and dist.is_initialized()):
        return
    with _lock:
        known = _sequences.setdefault(dist.group.WORLD, {})
        if group not in known:
            known[group] = _sequence_of(group)
        sequence = known[group]
        if sequence is not None:
            sequence.note(now)


def note_reduced(group: str, fqn: str, grad: Tensor) -> None:
    """The gradient of a parameter is about to be reduced by ``group``; if it is not traced."""
    if type(grad) is Tensor:
        note(group, gathered([f"the gradient of {fqn}"]))


def _sequence_of(group: str) -> RankSequence | None:
    from inductor_passes.adapters._torch import ranks_of_group

    ranks = ranks_of_group(group) or ()
    if len(ranks) < 2 or "fake" in dist.get_backend_config():
        return None
    return RankSequence(store_of(ranks), dist.get_rank(), ranks)


def _text(one: Gathered) -> str:
    first, n = one.fqns[0], len(one.fqns)
    return first if n == 1 else f"{first} to {one.fqns[-1]} ({n} parameters)"


def _told_apart(who: str, mine: str, last: str) -> str:
    count, checksum = mine.split()
    return f"{who} has sent {count} tensors, at the end {last} (checksum {checksum}). "


_REMEDY = (
    "Ranks have not gathered the same parameters, or reduced the same gradients, in one order, so "
    "these may have been mixed up, and what was trained since the last checkpoint may be wrong. "
    "Let no branch depend on the rank or on local data: seed what drops layers alike on all ranks, "
    "or turn it off; use all heads in the loss of each rank, those of other tasks times 0"
)
