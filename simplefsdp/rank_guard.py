"""Ranks that are about to communicate differently find out before they do.

A collective that one rank launches and another does not is a hang, often hours into a job. Before
anything is compiled each rank publishes a digest of what it will communicate through the process
group's key-value store, which is no collective and cannot be out of step, and reads the others'.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import _torch

log = logging.getLogger("simplefsdp")
TIMEOUT_S = 300.0
_PATIENCE_S = 10.0  # then say who is missing
# What was agreed on, in the default process group that it was agreed in.
_agreed: WeakKeyDictionary[Any, set[tuple[tuple[int, ...], str]]] = WeakKeyDictionary()


class RankMismatchError(RuntimeError):
    """The ranks of a mesh do not agree on what they are about to do."""


def ranks_of(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """Global ranks of the largest of ``meshes``; empty if its processes are not all real."""
    largest = max(meshes, key=DeviceMesh.size, default=None)
    if largest is None or not dist.is_initialized() or "fake" in dist.get_backend_config():
        return ()
    ranks: Tensor = largest.mesh
    return tuple(sorted(ranks.flatten().tolist()))


def agree(
    what: str, lines: Sequence[str], ranks: Sequence[int], timeout_s: float = TIMEOUT_S
) -> None:
    """Return when all of ``ranks`` have called this with equal ``lines``.

    What they agreed on once they need not agree on again: a rank that compiles a graph anew for
    another batch size, which communicates the same, waits for nobody.

    Args:
        what: is compared, for messages: "the compiled graph".
        lines: that must be equal on all ranks, so no group names, local shapes or paths.
        ranks: global ranks, this one among them; nothing happens if it is alone.
        timeout_s: how long to wait for the slowest rank.

    Raises:
        RankMismatchError: on every rank, with the first difference; or on those that waited in
            vain, with the ranks that did not come.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(ranks) < 2:
        return
    agreed = _agreed.setdefault(dist.group.WORLD, set())
    if (tuple(ranks), digest) in agreed:
        return
    scope = hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()[:16]
    store = _torch.shared_store(f"simplefsdp/{scope}")
    me = dist.get_rank()
    # The n-th call on one rank meets the n-th call on the others. The count lives in the store, so
    # that it starts afresh with a new process group.
    turn = store.add(f"turns/{me}", 1)
    store.set(f"{turn}/digest/{me}", digest)
    try:
        _wait(what, store, {rank: f"{turn}/digest/{rank}" for rank in ranks}, timeout_s)
    except RankMismatchError:
        store.set(f"{turn}/gave_up", str(me))  # whoever comes later must not go on alone
        raise
    if store.check([f"{turn}/gave_up"]):
        late = store.get(f"{turn}/gave_up").decode()
        raise RankMismatchError(f"{what}: rank {late} had given up waiting for rank {me}")
    digests = [d.decode() for d in store.multi_get([f"{turn}/digest/{rank}" for rank in ranks])]
    if len(set(digests)) > 1:
        store.set(f"{turn}/lines/{me}", "\n".join(lines))
        odd = next(i for i, other in enumerate(digests) if other != digests[0])
        pair = (ranks[0], ranks[odd])
        _wait(what, store, {rank: f"{turn}/lines/{rank}" for rank in pair}, timeout_s)
        texts = [store.get(f"{turn}/lines/{rank}").decode().split("\n") for rank in pair]
        raise RankMismatchError(_difference(what, pair, texts))
    agreed.add((tuple(ranks), digest))


def _wait(what: str, store: Any, keys: dict[int, str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(list(keys.values()), timedelta(seconds=max(0.1, min(left, _PATIENCE_S))))
            return
        except RuntimeError as error:  # FileStore raises it bare, TCPStore a subclass
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if missing and left <= _PATIENCE_S:
                raise RankMismatchError(
                    f"{what}: after {timeout_s:g} s, ranks {_few(missing)} have not got to what "
                    f"rank {dist.get_rank()} is about to do. They failed, are slower than that, or "
                    "took another branch of the program; see their logs, or raise "
                    "options['rank_guard_timeout_s']"
                ) from error
            if missing:
                log.warning("%s: waiting for ranks %s", what, _few(missing))


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _difference(what: str, pair: tuple[int, int], texts: Sequence[Sequence[str]]) -> str:
    lines = itertools.zip_longest(*texts, fillvalue="(nothing more)")
    number, (one, other) = next((i, ab) for i, ab in enumerate(lines, 1) if ab[0] != ab[1])
    return (
        f"{what} is not the same on all ranks, and would hang. The first difference, in line "
        f"{number}: rank {pair[0]} has {one!r}, rank {pair[1]} has {other!r}. Build the same "
        "model with the same options on every rank, and let no branch depend on the rank or on "
        "local data"
    )
