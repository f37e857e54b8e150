"""Ranks that are about to communicate differently find out before they do.

A collective that one rank launches and another does not is a hang, often hours into a job. So
before anything is compiled, each rank publishes a digest of what it will communicate in the process
group's key-value store. (Using the store is no collective, so it cannot be out of step.) The last
rank to arrive compares the digests. A choice that ranks could make differently is made by one rank
and handed to the others through the same store.

The store is served by one process, so each rank makes only a few requests, however many ranks there
are, and asks ever less often while it waits. Only few ranks ask about every rank: the last to
arrive, if digests differ, and those that say who is missing. Options and launchers import this file
for its time limits, so imports that take a second stand inside the functions that need them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp.words import few_ranks

log = logging.getLogger("simplefsdp")
TIMEOUT_S = 300.0
_VARIABLE = "SIMPLEFSDP_TIMEOUT_S"
_PAST = 8  # turns after which nobody needs what one left in the store
_PATIENCE_S = 10.0  # seconds of waiting after which a rank says who is missing
# What the ranks have agreed on, by the default process group in which they did.
_agreed: WeakKeyDictionary[Any, set[tuple[tuple[int, ...], str]]] = WeakKeyDictionary()
_decisions: WeakKeyDictionary[Any, dict[object, Any]] = WeakKeyDictionary()


class RankMismatchError(RuntimeError):
    """The ranks of a mesh do not agree on what they are about to do."""


def ranks_of(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """Global ranks of the largest of ``meshes``; empty if these are not real processes."""
    largest = max(meshes, key=DeviceMesh.size, default=None)
    if largest is None or not dist.is_initialized() or "fake" in dist.get_backend_config():
        return ()
    ranks: Tensor = largest.mesh
    return tuple(sorted(ranks.flatten().tolist()))


def ranks_of_params(params: Iterable[object]) -> tuple[int, ...]:
    """Global ranks of the largest mesh that a DTensor of ``params`` is on, see :func:`ranks_of`."""
    from torch.distributed.tensor import DTensor

    return ranks_of([param.device_mesh for param in params if isinstance(param, DTensor)])


def waiting_s(default: float = TIMEOUT_S) -> float:
    """Seconds to wait for other ranks where no option sets them: SIMPLEFSDP_TIMEOUT_S, or
    ``default``."""
    written = os.environ.get(_VARIABLE, str(default))
    try:
        seconds = float(written)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:  # nor NaN
        raise ValueError(f"{_VARIABLE}: expected seconds, more than 0, got {written!r}")
    return seconds


def agree(
    what: str,
    lines: Sequence[str],
    ranks: Sequence[int],
    timeout_s: float | None = None,
    *,
    remember: bool = True,
    late: str = "",
) -> bool:
    """Return when all of ``ranks`` have called this with equal ``lines``.

    Lines that the ranks have agreed on once are not compared again: a rank that recompiles a graph
    for another batch size, with the same communication, waits for nobody.

    Args:
        what: names the thing that is compared, for messages: "the compiled graph".
        lines: must be equal on all ranks, so they hold no group names, local shapes or paths.
        ranks: global ranks, this one among them; nothing happens if it is alone.
        timeout_s: how long to wait for the slowest rank; by default as :func:`waiting_s` says.
        remember: False to compare at every call: another rank's lines may have changed though this
            rank's have not.
        late: why ranks may not come in time, and what to do, for the message.

    Returns:
        Whether the ranks met in this call; False if they had agreed on ``lines`` before.

    Raises:
        RankMismatchError: lines differ: on every rank, with the first difference. Or ranks did not
            come in time: on those that waited and on those that come later, with the missing ranks.
    """
    if len(ranks) < 2:
        return True
    agreed, key = _agreed.setdefault(dist.group.WORLD, set()), _key(lines, ranks)
    if remember and key in agreed:
        return False
    timeout_s = waiting_s() if timeout_s is None else timeout_s
    turn, verdict = _compared(what, lines, ranks, timeout_s, late or LATE)
    if verdict != _EQUAL:
        pair = [int(rank) for rank in verdict.removeprefix(_DIFFERENT).split()]
        store = store_of(ranks)
        raise RankMismatchError(_told_apart(what, store, turn, lines, pair, timeout_s))
    if remember:
        agreed.add(key)
    return True


def was_agreed(lines: Sequence[str], ranks: Sequence[int]) -> bool:
    """Whether ``ranks`` have agreed on ``lines`` before, so that :func:`agree` would not wait."""
    return len(ranks) < 2 or _key(lines, ranks) in _agreed.get(dist.group.WORLD, ())


def _key(lines: Sequence[str], ranks: Sequence[int]) -> tuple[tuple[int, ...], str]:
    return tuple(ranks), digest_of(lines)


def have_the_same(what: str, line: str, ranks: Sequence[int], timeout_s: float) -> bool:
    """Whether ``line`` is equal on all of ``ranks``; waits until all of them have called this."""
    return len(ranks) < 2 or _compared(what, [line], ranks, timeout_s, LATE)[1] == _EQUAL


def _compared(
    what: str, lines: Sequence[str], ranks: Sequence[int], timeout_s: float, late: str
) -> tuple[int, str]:
    """Compare ``lines`` with the other ranks; gives the number of the turn, and its verdict."""
    store, me, digest = store_of(ranks), dist.get_rank(), digest_of(lines)
    # The n-th call on one rank meets the n-th call on the others. The count lives in the store, so
    # that a new process group starts from 1 again.
    turn = store.add(f"turns/{me}", 1)
    store.set(f"{turn}/digest/{me}", digest)
    store.add(f"{turn}/count/{digest}", 1)
    if store.add(f"{turn}/arrived", 1) == len(ranks):
        verdict = _EQUAL
        if store.add(f"{turn}/count/{digest}", 0) < len(ranks):
            digests = store.multi_get([f"{turn}/digest/{rank}" for rank in ranks])
            odd = next(i for i, other in enumerate(digests) if other != digests[0])
            verdict = f"{_DIFFERENT}{ranks[0]} {ranks[odd]}"
        _decide(store, turn, verdict)
        past = (f"{turn - _PAST}/{of_all}" for of_all in ("verdict", "impatient"))
        for key in (f"{turn}/count/{digest}", f"{turn}/arrived", *past):
            store.delete_key(key)
    store.delete_key(f"{turn - _PAST}/digest/{me}")
    return turn, _verdict(what, store, turn, ranks, timeout_s, late)


def decided(
    what: str,
    subject: Sequence[str],
    ranks: Sequence[int],
    decide: Callable[[], str],
    timeout_s: float = TIMEOUT_S,
    late: str = "",
) -> str:
    """Let the lowest of ``ranks`` decide for all of them; gives its decision on each.

    The n-th call for a subject on one rank gets what the n-th call for that subject decided on the
    lowest rank, which may have been earlier. A caller that keeps the answer (see :func:`decisions`)
    and does not ask again waits for nobody.

    Args:
        what: names the decision, for messages: "the plan of the forward graph".
        subject: lines that say what the decision is for. The ranks agree on them first.
        ranks: global ranks, this one among them; it decides for itself if it is alone.
        decide: is called on the lowest rank. The other ranks are not told of errors that it raises.
        timeout_s: how long to wait for the slowest rank, and then for the decision.
        late: why ranks may not come in time, as for :func:`agree`.
    """
    if len(ranks) < 2:
        return decide()
    agree(f"what {what} is for", subject, ranks, timeout_s, late=late)
    store, me = store_of(ranks), dist.get_rank()
    digest = digest_of([what, *subject])
    turn = store.add(f"asked/{digest}/{me}", 1)
    key = f"decided/{digest}/{turn}"
    if me == min(ranks):
        text = decide()
        store.set(key, text)
        return text
    remedy = (
        "It failed, is slower than that, or uses what it decided before: call "
        "torch.compiler.reset() on all ranks or on none; or raise options['rank_guard_timeout_s']"
    )
    try:
        wait_for(what, store, {min(ranks): key}, timeout_s, remedy)
    except RankMismatchError:
        store.add(f"asked/{digest}/{me}", -1)  # so that this rank can retry the same turn
        raise
    return str(store.get(key).decode())


def decisions() -> dict[object, Any]:
    """Decisions that this process remembers, under keys that the callers choose. There is one
    dictionary per default process group, so a new group starts with an empty one."""
    # Without a process group the class stands for it.
    group = dist.group.WORLD if dist.is_initialized() else dist.group
    return _decisions.setdefault(group, {})


def forget_decisions() -> None:
    """Forget all decisions, so that each is made again when it is next needed. Call this on all
    ranks or on none. A rank that forgets alone waits in vain: for the lowest rank, or, if it is the
    lowest, for the others. It raises after ``rank_guard_timeout_s``, with advice."""
    _decisions.clear()


def digest_of(lines: Iterable[str]) -> str:
    """A digest of lines of text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def store_of(ranks: Sequence[int]) -> Any:
    """The process group's key-value store, with a key prefix that only ``ranks`` use."""
    scope = hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()[:16]
    from simplefsdp import _torch

    return _torch.shared_store(f"simplefsdp/{scope}")


# The verdict of a turn is written to the store once: equal; or different, and on which two ranks;
# or a text that says which rank gave up waiting for which.
_EQUAL, _DIFFERENT = "equal", "different "


def _decide(store: Any, turn: int, verdict: str) -> str:
    """Write ``verdict`` unless the turn has one already; gives the one that now stands."""
    return str(store.compare_set(f"{turn}/verdict", "", verdict).decode())


def _verdict(
    what: str, store: Any, turn: int, ranks: Sequence[int], timeout_s: float, remedy: str
) -> str:
    """Wait for the verdict of a turn: all lines are equal, or two ranks whose lines differ."""
    came = {rank: f"{turn}/digest/{rank}" for rank in ranks}

    @functools.cache
    def speaks() -> bool:
        """Whether this rank logs who is missing: the first rank to ask does, and the lowest."""
        return store.add(f"{turn}/impatient", 1) == 1 or dist.get_rank() == min(ranks)

    try:
        wait_for(what, store, came, timeout_s, remedy, until=f"{turn}/verdict", speaks=speaks)
    except RankMismatchError:
        # The last rank may arrive at this very moment: the verdict in the store holds for both.
        late = few_ranks(_missing(store, came))
        mine = f"rank {dist.get_rank()} gave up waiting for {late}"
        if _decide(store, turn, mine) == mine:
            raise
    verdict = str(store.get(f"{turn}/verdict").decode())
    if verdict != _EQUAL and not verdict.startswith(_DIFFERENT):
        raise RankMismatchError(f"{what}: {verdict}")
    return verdict


LATE = (
    "They failed, are slower than that, took another branch of the program, as for an empty batch, "
    "or run uncompiled, as with FlopCounterMode, set_stance or TORCH_COMPILE_DISABLE; see their "
    "logs, or raise options['rank_guard_timeout_s'], or of what is not compiled "
    f"{_VARIABLE}, on all of them"
)


def _told_apart(
    what: str, store: Any, turn: int, lines: Sequence[str], pair: Sequence[int], timeout_s: float
) -> str:
    """The message for lines that differ between ``pair``: the first of ``ranks``, and the first
    rank whose lines are not equal to its."""
    keys = {rank: f"{turn}/lines/{rank}" for rank in pair}
    if dist.get_rank() in keys:
        store.set(keys[dist.get_rank()], "\n".join(lines))
    wait_for(what, store, keys, timeout_s, LATE)
    texts = [store.get(key).decode().split("\n") for key in keys.values()]
    both = itertools.zip_longest(*texts, fillvalue="(nothing more)")
    one, other = next(two for two in both if two[0] != two[1])
    return (
        f"{what} is not the same on all ranks, and would hang. The first difference: rank "
        f"{pair[0]} has {one!r}, rank {pair[1]} has {other!r}. Build the same "
        "model with the same options on every rank, let no branch depend on the rank or on local "
        "data, and give no rank an empty batch"
    )


def wait_for(
    what: str,
    store: Any,
    keys: Mapping[int, str],
    timeout_s: float,
    remedy: str,
    *,
    until: str = "",
    speaks: Callable[[], bool] = lambda: True,
) -> None:
    """Wait for the key of each rank in ``keys``, or for the single key ``until`` if it is given.

    Only a rank for which ``speaks`` is true asks the store which ranks are missing. The others
    learn the outcome from ``until``; they ask only if it is still absent after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    awaited = [until] if until else list(keys.values())
    while True:
        left = deadline - time.monotonic()
        if _came(store, awaited, min(left, _PATIENCE_S) if left > 0 else _PATIENCE_S):
            return
        if not speaks() and left > 0:
            continue
        missing = _missing(store, keys)
        if left <= _PATIENCE_S and not store.check(awaited):
            raise RankMismatchError(
                f"{what}: after {timeout_s:g} s, {few_ranks(missing)} did not get to what "
                f"rank {dist.get_rank()} is about to do. {remedy}"
            )
        if missing:
            still_s = max(0.0, deadline - time.monotonic())
            log.warning(
                f"{what}: rank {dist.get_rank()} is waiting for {few_ranks(missing)}, for up to "
                f"{still_s:.0f} s more: compiling takes longer there, or not all ranks call the "
                "same models equally often (an expert that got no token is to be called on zeros)"
            )


def _came(store: Any, keys: list[str], seconds: float) -> bool:
    """Whether all ``keys`` are in ``store`` within some seconds. It is asked ever less often: when
    the time of ``store.wait`` is over, every rank prints two lines of C++ to stderr."""
    began = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        time.sleep(min(max(5e-5, waited / 8), 1.0, seconds - waited))
    return True


def _missing(store: Any, keys: Mapping[int, str]) -> list[int]:
    return [rank for rank, key in keys.items() if not store.check([key])]
