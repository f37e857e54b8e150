"""Detects, soon after the fact, that ranks have gathered different parameters at the same time.

A rank that runs something new compares it with the other ranks first (``rank_guard.py``). A rank
that changes to a branch which all ranks have taken before compares nothing. If that branch gathers
another layer of the same size, no collective fails, and every rank computes with parts of two
layers. So each rank of a process group keeps a checksum of what it gathers, of what
``load_state_dict`` gave that (``frontend/loaded.py``) and, in eager code, of what it reduces. Now
and then the lowest rank puts its checksum in the store, and the others compare theirs with it.
Nobody waits: a checksum that is not there yet is looked up again the next time. The lowest rank
itself does not learn of a difference; it ends when the others do.
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

# Checksums are compared after FIRST tensors, then each time the count has doubled, and at least
# every PERIOD tensors.
FIRST, PERIOD = 16, 4096
_KEPT = 32  # checksums that stay in the store, and that a rank keeps until it can compare them


class Gathered(NamedTuple):
    """The parameters that one forward, or one graph, gathers."""

    checksum: int
    fqns: tuple[str, ...]
    loaded: tuple[str, ...] = ()  # what plain tensors these were given since the last time


def gathered(fqns: Iterable[str], loaded: Iterable[str] = ()) -> Gathered:
    """A :class:`Gathered` of parameters, in the order in which they are gathered."""
    names, lines = tuple(fqns), tuple(loaded)
    return Gathered(zlib.crc32("\n".join([*names, *lines]).encode()), names, lines)


class RankSequence:
    """The checksum of what one rank has gathered so far with the ranks of one process group.

    Args:
        store: the key-value store that the ranks share.
        rank: this rank.
        ranks: all ranks of the process group.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._lowest = store, rank, min(ranks)
        # The n-th sequence on one rank meets the n-th on the others, like turns in rank_guard.py.
        self._number = store.add(f"sequences/{rank}", 1)
        self._sum = self._count = self._compared = 0
        self._next = FIRST
        self._last: deque[Gathered] = deque(maxlen=3)
        self._waiting: dict[int, tuple[str, str]] = {}

    def note(self, now: Gathered) -> None:
        """Note that this rank gathers ``now``, or has just gathered it.

        Raises:
            RankMismatchError: the lowest rank has gathered something else.
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
        self._sum = 0  # a difference is reported once, not at every later comparison
        try:
            found = self._exchanged(mine, last)
        except RuntimeError:  # the process that serves the store may have ended, as all soon will
            return
        for theirs, their_last, own, own_last in found:
            if theirs != own:
                both = _told_apart(f"rank {self._lowest}", theirs, their_last)
                both += _told_apart(f"rank {self._rank}", own, own_last)
                raise RankMismatchError(both + (_LOADED if _GIVEN in both else "") + _REMEDY)

    def _exchanged(self, mine: str, last: str) -> list[tuple[str, str, str, str]]:
        """Exchange checksums by the store. Gives those of the lowest rank that have arrived, with
        what it gathered last before each, and the same two of this rank."""
        if self._rank == self._lowest:
            self._store.set(self._key(self._compared), f"{mine}\n{last}")
            self._store.delete_key(self._key(self._compared - _KEPT))
            return []
        self._waiting[self._compared] = mine, last
        there = []
        for number in list(self._waiting):
            # Like `get`, but without waiting: the value is empty if the key is not there.
            found = self._store.compare_set(self._key(number), "", "").decode()
            if found:
                theirs, _, their_last = found.partition("\n")
                there.append((theirs, their_last, *self._waiting.pop(number)))
        if len(self._waiting) > _KEPT:
            del self._waiting[min(self._waiting)]
        return there

    def _key(self, number: int) -> str:
        return f"sequence/{self._number}/{number}"


# The key is the default process group, then the name of the process group that gathers.
_sequences: WeakKeyDictionary[Any, dict[str, RankSequence | None]] = WeakKeyDictionary()
_lock = threading.Lock()


def note(group: str, now: Gathered) -> None:
    """:meth:`RankSequence.note` for the process group named ``group``, which gathers. Nothing
    happens if this rank is alone in the group, or if nothing is gathered."""
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
    """Note that ``group`` is about to reduce the gradient of a parameter, unless it is traced."""
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
    text = first if n == 1 else f"{first} to {one.fqns[-1]} ({n} parameters)"
    if not one.loaded:
        return text
    more = f" and {len(one.loaded) - 1} more" if len(one.loaded) > 1 else ""
    return f"{text}, {_GIVEN} {one.loaded[0]}{more}"


def _told_apart(who: str, mine: str, last: str) -> str:
    count, checksum = mine.split()
    return f"{who} has sent {count} tensors, at the end {last} (checksum {checksum}). "


_GIVEN = "given plain tensors by load_state_dict (checksum):"
_LOADED = (
    "Each rank keeps its own part of a plain model's tensors, so all ranks must load the same, "
    "or parameters are put together of two models. With the tensors on rank 0 only, use torch."
    "distributed.checkpoint.state_dict.set_model_state_dict(..., options=StateDictOptions("
    "full_state_dict=True, broadcast_from_rank0=True)) on all ranks. If all did load the same: "
)
_REMEDY = (
    "Ranks have not gathered the same parameters, or reduced the same gradients, in one order, so "
    "these may have been mixed up, and what was trained since the last checkpoint may be wrong. "
    "Let no branch depend on the rank or on local data: seed what drops layers alike on all ranks, "
    "or turn it off; use all heads in the loss of each rank, those of other tasks times 0"
)
