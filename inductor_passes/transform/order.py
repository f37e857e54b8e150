"""When each collective starts and is waited for, so that it runs while something is computed.

A policy gives every op a *key*, its wanted place in the program. Keys are then made to grow along
every dependency, and the program is sorted by them; so one sort gives an order that is legal by
construction. Computes keep their order, except those that feed a collective which starts earlier,
and those that follow one which is waited for later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from inductor_passes.ir.positions import by_key
from inductor_passes.ir.program import CollectiveKind, Program
from inductor_passes.transform.needs import IN_PLACE, Key, Needs, nearest_order

# Classes of keys: before, and behind, the op that stays at a position.
_GATHER, _REDUCE = IN_PLACE - 1, IN_PLACE + 1


@dataclass(frozen=True)
class OverlapPolicy:
    """Limits of the memory that overlap may take, for buckets that have no window of their own."""

    # Buckets that are being gathered while one is waited for, itself included: 1 starts a gather
    # when it is needed, 2 one bucket ahead.
    max_inflight_gathers: int = 2
    # Buckets of full gradients that are alive because nobody has waited for their reduce.
    max_pending_reduces: int = 2

    def window(self, kind: CollectiveKind) -> int:
        """The window of a bucket of one kind."""
        return self.max_inflight_gathers if kind == "gather" else self.max_pending_reduces


class Together(NamedTuple):
    """Collectives that are launched as one."""

    starts: Sequence[int]  # their positions in a program
    window: int  # see :class:`~inductor_passes.ir.program.Bucket`; not 0


Launched = Mapping[CollectiveKind, Sequence[Together]]


class _Keys:
    """The keys of an order that is being made.

    Attributes:
        of: the key of each op.
        moved: for each op, 1 if it was given a key other than its own place.
        late: ops that wait for a reduce, and ops that depend on such a wait.
    """

    def __init__(self, needs: Needs) -> None:
        self.of = list(needs.own_keys)
        self.moved = bytearray(len(self.of))
        self.late: set[int] = set()

    def put(self, i: int, key: Key) -> None:
        """Give op ``i`` a key."""
        self.of[i], self.moved[i] = key, 1


def overlap(program: Program, policy: OverlapPolicy, *, keep_starts: bool = False) -> list[str]:
    """Names of the ops of ``program`` in an order that hides communication behind compute.

    A gather starts while compute uses the bucket before it, goes out before the reduces of that
    compute (they share a communicator), and is waited for at its first use. A reduce starts as soon
    as its gradients are computed, and is waited for as late as memory allows. What would fall into
    a unit of computes goes before the unit; the start of a reduce goes behind it.

    Args:
        program: collectives with equal kind, group and bucket label are one bucket.
        policy: how many buckets ahead gathers start, and behind reduces are waited for.
        keep_starts: leave the sequence of the starts as it is. All ranks must launch in the same
            sequence, so only where all see the same program may the sequence be chosen.
    """
    return [program.ops[i].name for i in _order(program, policy, keep_starts=keep_starts)]


def overlapped(program: Program, policy: OverlapPolicy) -> Program:
    """``program`` in the order of :func:`overlap`, which is legal because of how it is made."""
    return program.permuted(_order(program, policy, keep_starts=False))


def _order(program: Program, policy: OverlapPolicy, *, keep_starts: bool) -> list[int]:
    launches = launches_of(program, policy)
    return by_key(keys_of(Needs(program), launches, keep_starts=keep_starts))


def launches_of(program: Program, policy: OverlapPolicy) -> Launched:
    """Which collectives of a program are launched as one, by their bucket labels."""
    groups: dict[CollectiveKind, dict[tuple[str, str, str], list[str]]] = {}
    for name, c in program.sent.items():
        bucket = (c.group, c.bucket, "" if c.bucket else name)
        groups.setdefault(c.kind, {}).setdefault(bucket, []).append(name)

    def together(kind: CollectiveKind, names: Sequence[str]) -> Together:
        window = max(program.sent[name].window for name in names)
        return Together([program.index[n] for n in names], window or policy.window(kind))

    return {kind: [together(kind, names) for names in of.values()] for kind, of in groups.items()}


def keys_of(needs: Needs, launches: Launched, *, keep_starts: bool = False) -> list[Key]:
    """The key of each op. Starts that are launched as one share a key, unless an op that must be
    early needs some of them but not all."""
    keys = _Keys(needs)
    uses = _place_gathers(needs, launches.get("gather", ()), keys)
    for kind in ("reduce", "all_reduce"):
        if found := launches.get(kind):
            ready = _ready(needs, found, keys, keep_starts=keep_starts)
            _place_reduces(needs.program, ready, keys, uses)
            _push_followers(needs, keys)
    if keep_starts:
        _keep_starts(needs, keys)
    _float_views(needs, keys)
    _pull_predecessors(needs, keys, keep_starts=keep_starts)
    return keys.of


def in_sequence(program: Program, place: Sequence[int]) -> list[str]:
    """Names of the ops of ``program`` by their ``place``, as near as dependencies allow.

    An op waits for what it needs, and pulls nothing forward. The sequence of the starts stays.
    """
    before = [set(found) for found in program.predecessors]
    for earlier, later in pairwise(i for i, _ in program.starts()):
        before[later].add(earlier)
    return [program.ops[i].name for i in nearest_order(before, place)]


def _place_gathers(needs: Needs, launches: Sequence[Together], keys: _Keys) -> list[float]:
    """Set the keys of gathers and their waits; returns the first uses of the buckets, sorted."""
    waits_of, end = needs.program.waits_of, len(needs.program.ops)
    used = [
        (min(end, *(needs.first_use[i] for i in starts)), starts, window)
        for starts, window in launches
    ]
    used.sort()
    ahead = len(used)
    for k, (use, starts, window) in reversed(list(enumerate(used))):
        # Never behind a bucket that is used later.
        ahead = min(ahead, k + 1 - window)
        # The bucket starts just before the wait of the bucket it goes ahead of. If several go ahead
        # of the same one, those that are used earlier start earlier.
        turn = ahead + k / (2 * len(used))
        where: Key = (used[ahead][0] if ahead >= 0 else -1, _GATHER, turn)
        for i in starts:
            keys.put(i, where)
            for wait in waits_of[i]:
                keys.put(wait, (use, _GATHER, k + 0.5))
    return [use for use, *_ in used]


def _ready(
    needs: Needs, launches: Sequence[Together], keys: _Keys, *, keep_starts: bool
) -> list[tuple[Key, Together]]:
    """The buckets, each with the key at which it is ready to start, sorted by key. ``keep_starts``
    keeps them in the order of ``launches``, each ready no earlier than the one before it."""
    predecessors = needs.program.predecessors
    made, found = _made_at(needs, keys), list[Key]()
    for starts, _ in launches:
        at = max((made[j] for i in starts for j in predecessors[i]), default=(-1, 0, 0))
        found.append((needs.unit_end.get(at[0], at[0]), _REDUCE, at[2]))
    if keep_starts:
        return list(zip(accumulate(found, max), launches, strict=True))
    return sorted(zip(found, launches, strict=True))


def _place_reduces(
    program: Program, ready: list[tuple[Key, Together]], keys: _Keys, uses: list[float]
) -> None:
    end = len(program.ops)
    for k, (where, (starts, window)) in enumerate(ready):
        if window > 0:
            # Wait just before the start of the reduce that would make one too many pending.
            due = k + window
            until: Key = (ready[due][0][0] if due < len(ready) else end, _REDUCE, due - 0.5)
        else:
            # Wait where a later bucket of gathers is first used, before the gathers that start
            # there.
            use = bisect_right(uses, where[0]) - window - 1
            until = (uses[use], _GATHER, use - 0.25) if use < len(uses) else (end, _REDUCE, k)
        for i in starts:
            keys.put(i, (where[0], _REDUCE, k))
            for wait in program.waits_of[i]:
                keys.put(wait, until)
                keys.late.add(wait)


def _made_at(needs: Needs, keys: _Keys) -> list[Key]:
    """The key of each op; for a view, the latest key of the ops whose results it passes on."""
    made = list(keys.of)
    for i in needs.views:
        made[i] = max((made[j] for j in needs.program.predecessors[i]), default=(-1, 0, 0))
    return made


def _push_followers(needs: Needs, keys: _Keys) -> None:
    """What needs a late op is late with it, rather than pulling it forward."""
    for i, late in needs.behind(frozenset(keys.late)):
        keys.late.add(i)
        keys.put(i, max(keys.of[i], *[keys.of[j] for j in late]))


def _keep_starts(needs: Needs, keys: _Keys) -> None:
    """Delay each start until after those before it in the sequence, but no gather beyond its first
    use."""
    previous: Key = (-1, 0, 0)
    for i, op in needs.program.starts():
        latest: Key = (inf, 0, 0)
        if op.sends == "gather":
            latest = (needs.first_use[i], _GATHER, inf)
        previous = min(max(keys.of[i], previous), latest)
        keys.put(i, previous)


def _float_views(needs: Needs, keys: _Keys) -> None:
    """A view costs nothing and pins what it reads: it belongs to its first user."""
    for i in needs.views:
        if needs.followers[i] and i not in keys.late:
            keys.put(i, (inf, 0, 0))


def _pull_predecessors(needs: Needs, keys: _Keys, *, keep_starts: bool) -> None:
    """Make keys grow along dependencies: what an early op needs is early with it."""
    ops, predecessors, key = needs.program.ops, needs.program.predecessors, keys.of
    earlier = list(needs.near(bytes(keys.moved)))
    next_start: Key | None = None
    for i in range(len(key) - 1, -1, -1):
        if keep_starts and ops[i].kind == "start":
            key[i] = min(key[i], next_start) if next_start else key[i]
            next_start = key[i]
        for j in earlier[i]:
            if key[i] < key[j]:
                key[j], earlier[j] = key[i], predecessors[j]


def starts_in(program: Program, order: Iterable[str]) -> list[str]:
    """The starts among ``order``: the sequence in which a rank launches collectives."""
    starts = {op.name for _, op in program.starts()}
    return [name for name in order if name in starts]
