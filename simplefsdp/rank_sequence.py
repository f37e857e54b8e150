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

import json
import logging
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from simplefsdp.rank_guard import RankMismatchError, store_of

log = logging.getLogger("simplefsdp")
# Checksums are compared after FIRST tensors, then each time the count has doubled, and at least
# every PERIOD tensors.
FIRST, PERIOD = 16, 4096
_KEPT = 32  # checksums that stay in the store, and that a rank keeps until it can compare them


class PlainLoad(NamedTuple):
    """A plain tensor that ``load_state_dict`` gave a parameter, or its optimizer's state."""

    what: str  # was given it
    digest: str  # of some of its elements
    is_written: bool  # whether the parameter has been written to since


class Gathered(NamedTuple):
    """The parameters that one forward, or one graph, gathers."""

    checksum: int
    fqns: tuple[str, ...]
    loaded: tuple[PlainLoad, ...] = ()  # since they were gathered last


def gathered(fqns: Iterable[str], loaded: Iterable[PlainLoad] = ()) -> Gathered:
    """A :class:`Gathered` of parameters, in the order in which they are gathered."""
    names = tuple(fqns)
    return Gathered(zlib.crc32("\n".join(names).encode()), names, tuple(loaded))


class _Sums(NamedTuple):
    """What is compared: how many tensors were sent, since the beginning; since the last time,
    checksums of what was gathered, of what was loaded, and of the values; and whether some of what
    was loaded has been written to since."""

    sent: int = 0
    gathered: int = 0
    loaded: int = 0
    values: int = 0
    is_written: bool = False

    def and_(self, now: Gathered) -> _Sums:
        """With ``now`` behind it."""
        loaded, values, written = self.loaded, self.values, self.is_written
        for one in now.loaded:
            loaded = zlib.crc32(f"{self.sent} {one.what}".encode(), loaded)
            values = zlib.crc32(one.digest.encode(), values)
            written |= one.is_written
        checksum = zlib.crc32(now.checksum.to_bytes(4, "big"), self.gathered)
        return _Sums(self.sent + len(now.fqns), checksum, loaded, values, written)


class _Said(NamedTuple):
    """What one rank says when it compares."""

    sums: _Sums
    loaded: str  # what plain tensors were loaded into since the last time
    last: str  # what was gathered last


def value_now(store: Any, key: str) -> str:
    """The value of ``key``, or "" if there is none; unlike ``store.get`` it does not wait."""
    return str(store.compare_set(key, "", "").decode())


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
        self._sums, self._compared, self._next = _Sums(), 0, FIRST
        self._last: deque[Gathered] = deque(maxlen=3)
        self._loaded: list[str] = []
        self._waiting: dict[int, _Said] = {}

    def note(self, now: Gathered) -> None:
        """Note that this rank gathers ``now``, or has just gathered it.

        Raises:
            RankMismatchError: the lowest rank has gathered something else, or has loaded other
                parameters. If these may have got other values since, or if only values differ,
                it is a warning.
        """
        self._sums = self._sums.and_(now)
        self._last.append(now)
        self._loaded += [one.what for one in now.loaded]
        count = self._sums.sent
        if count < self._next:
            return
        while self._next <= count:
            self._next += min(self._next, PERIOD)
        self._compared += 1
        said = _Said(self._sums, _some(self._loaded), "; then ".join(map(_text, self._last)))
        # A difference is reported once, not at every later comparison.
        self._sums, self._loaded = _Sums(count), []
        try:
            found = self._exchanged(said)
        except RuntimeError:  # the process that serves the store may have ended, as all soon will
            return
        for theirs, own in found:
            self._compare(theirs, own)

    def _compare(self, theirs: _Said, own: _Said) -> None:
        whose = f"rank {self._lowest}", f"rank {self._rank}"
        if theirs.sums[:2] != own.sums[:2]:
            both = [_told(who, said) for who, said in zip(whose, (theirs, own), strict=True)]
            raise RankMismatchError("".join(both) + _REMEDY)
        if theirs.sums.loaded != own.sums.loaded:
            text = (
                f"load_state_dict gave {whose[0]} plain tensors for {theirs.loaded}, and "
                f"{whose[1]} for {own.loaded}, or at another time. {_LOADED}"
            )
            if not (theirs.sums.is_written or own.sums.is_written):
                raise RankMismatchError(text)
            log.warning("%s. Or all ranks have given these parameters other values since", text)
        elif theirs.sums.values != own.sums.values:
            log.warning(
                "load_state_dict gave %s other values than %s, of %s. %s",
                *(whose[1], whose[0], own.loaded, _LOADED),
            )

    def _exchanged(self, mine: _Said) -> list[tuple[_Said, _Said]]:
        """Exchange what ranks say by the store. Gives what the lowest rank said, as far as it has
        arrived, each with what this rank said then."""
        if self._rank == self._lowest:
            self._store.set(self._key(self._compared), json.dumps(mine))
            self._store.delete_key(self._key(self._compared - _KEPT))
            return []
        self._waiting[self._compared] = mine
        there = []
        for number in list(self._waiting):
            if found := value_now(self._store, self._key(number)):
                sums, loaded, last = json.loads(found)
                there.append((_Said(_Sums(*sums), loaded, last), self._waiting.pop(number)))
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
    return first if n == 1 else f"{first} to {one.fqns[-1]} ({n} parameters)"


def _some(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _told(who: str, said: _Said) -> str:
    sent, checksum = said.sums[:2]
    return f"{who} has sent {sent} tensors, at the end {said.last} (checksum {checksum}). "


_LOADED = (
    "Each rank keeps its own part of a plain model's tensors, so if all do not load the same, "
    "parameters are put together of several models. With the tensors on rank 0 only, use torch."
    "distributed.checkpoint.state_dict.set_model_state_dict(..., options=StateDictOptions("
    "full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
)
_REMEDY = (
    "Ranks have not gathered the same parameters, or reduced the same gradients, in one order, so "
    "these may have been mixed up, and what was trained since the last checkpoint may be wrong. "
    "Let no branch depend on the rank or on local data: seed what drops layers alike on all ranks, "
    "or turn it off; use all heads in the loss of each rank, those of other tasks times 0"
)
