"""When each collective starts and is waited for, so that it runs while something is computed.

A policy gives every op a *key*, a place in the program that it would like. Keys are then made to
grow along every dependency, and the program is sorted by them: an order that is legal because of
how it is made, in one sort. Compute keeps its order, except what feeds a collective that starts
earlier or follows one that is waited for later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import inf

from inductor_passes.ir.program import CollectiveKind, Program

# (position in the old order, what goes first there, which of those): compared left to right.
Key = tuple[float, float, float]
_GATHER, _IN_PLACE, _REDUCE = range(3)


@dataclass(frozen=True)
class OverlapPolicy:
    """Limits of the memory that overlap may take, for buckets that have no window of their own.

    Attributes:
        max_inflight_gathers: buckets that are being gathered while one is waited for, itself
            included: 1 starts a gather when it is needed, 2 one bucket ahead.
        max_pending_reduces: buckets of full gradients that are alive because nobody has waited
            for their reduce.
    """

    max_inflight_gathers: int = 2
    max_pending_reduces: int = 2


def overlap(program: Program, policy: OverlapPolicy, *, keep_starts: bool = False) -> list[str]:
    """Names of the ops of ``program`` in an order that hides communication behind compute.

    A gather starts while the bucket before it is computed with, is waited for at its first use,
    and goes out before the reduces of that compute, with which it shares a communicator. A reduce
    starts as soon as its gradients are there, and is waited for as late as memory allows. What
    would fall into a unit of computes goes before it or, a reduce's start, behind it.

    Args:
        program: collectives with equal kind, group and bucket label are one bucket.
        policy: how far ahead and behind.
        keep_starts: leave the sequence of the starts as it is. All ranks must launch in the same
            sequence, so it may be chosen where they all see the same program only.
    """
    return [program.ops[i].name for i in _order(program, policy, keep_starts=keep_starts)]


def overlapped(program: Program, policy: OverlapPolicy) -> Program:
    """``program`` in the order of :func:`overlap`, which is legal because of how it is made."""
    return program.permuted(_order(program, policy, keep_starts=False))


def _order(program: Program, policy: OverlapPolicy, *, keep_starts: bool) -> list[int]:
    keys: list[Key] = [(i, _IN_PLACE, 0) for i in range(len(program.ops))]
    followers = followers_of(program)
    begin, end = _unit_ends(program)
    first_use = [begin.get(i, i) for i in first_uses(program, followers)]
    uses = _place_gathers(program, policy, keys, first_use)
    late: set[int] = set()
    for kind in ("reduce", "all_reduce"):
        if buckets := _buckets(program, kind):
            ready = _ready(program, buckets, keys, end, keep_starts=keep_starts)
            _place_reduces(program, ready, policy, keys, late, uses)
            _push_followers(program, keys, late)
    if keep_starts:
        _keep_starts(program, keys, first_use)
    _float_views(program, keys, followers, late)
    _pull_predecessors(program, keys, keep_starts=keep_starts)
    return sorted(range(len(keys)), key=keys.__getitem__)


def in_sequence(program: Program, place: Sequence[int]) -> list[str]:
    """Names of the ops of ``program`` by their ``place``, as near as dependencies allow.

    An op waits for what it needs, and pulls nothing forward. The sequence of the starts stays.
    """
    starts = [i for i, _ in program.starts()]
    before = [set(found) for found in program.predecessors]
    for earlier, later in pairwise(starts):
        before[later].add(earlier)
    followers: list[list[int]] = [[] for _ in before]
    for i, found in enumerate(before):
        for j in found:
            followers[j].append(i)
    left = [len(found) for found in before]
    ready = [(place[i], i) for i, n in enumerate(left) if not n]
    heapify(ready)
    order = []
    while ready:
        _, i = heappop(ready)
        order.append(program.ops[i].name)
        for j in followers[i]:
            left[j] -= 1
            if not left[j]:
                heappush(ready, (place[j], j))
    return order


def followers_of(program: Program) -> list[list[int]]:
    """Positions of the ops that need each op."""
    followers: list[list[int]] = [[] for _ in program.ops]
    for i, before in enumerate(program.predecessors):
        for j in before:
            followers[j].append(i)
    return followers


def first_uses(program: Program, followers: list[list[int]]) -> list[float]:
    """Position of the first compute that needs each op's result, seen through views and waits; of
    computes themselves nobody asks."""
    found = [inf] * len(program.ops)
    for i in range(len(program.ops) - 1, -1, -1):
        if program.ops[i].kind == "compute":
            continue
        for j in followers[i]:
            passes_on = program.ops[j].kind in ("view", "wait")
            found[i] = min(found[i], found[j] if passes_on else j)
    return found


def _unit_ends(program: Program) -> tuple[dict[float, int], dict[float, int]]:
    """Positions of the first and of the last op of each op's unit, for ops that are in one."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(program.ops):
        if op.unit:
            members[op.unit].append(i)
    ends = [(i, found[0], found[-1]) for found in members.values() for i in found]
    return {i: first for i, first, _ in ends}, {i: last for i, _, last in ends}


def _buckets(program: Program, kind: CollectiveKind) -> list[list[int]]:
    """Positions of the starts of each bucket."""
    groups: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, op in program.starts():
        c = op.collective
        if c is not None and c.kind == kind:
            groups[c.group, c.bucket, "" if c.bucket else op.name].append(i)
    return list(groups.values())


def _place_gathers(
    program: Program, policy: OverlapPolicy, keys: list[Key], first_use: list[float]
) -> list[float]:
    """Set the keys of gathers; returns where each bucket is first used, in that order."""
    end = float(len(program.ops))
    used = [
        (min(end, *(first_use[i] for i in starts)), starts)
        for starts in _buckets(program, "gather")
    ]
    used.sort()
    ahead = len(used)
    for k, (use, starts) in reversed(list(enumerate(used))):
        # Never behind a bucket that is used later.
        ahead = min(ahead, k + 1 - _window(program, starts, policy.max_inflight_gathers))
        # The bucket's turn is just before the wait of the one that it goes ahead of, and after
        # those of earlier buckets that go ahead of the same one.
        turn = ahead + k / (2 * len(used))
        where: Key = (used[ahead][0] if ahead >= 0 else -1, _GATHER, turn)
        for i in starts:
            keys[i] = where
            for wait in program.waits_of[i]:
                keys[wait] = (use, _GATHER, k + 0.5)
    return [use for use, _ in used]


def _window(program: Program, starts: Iterable[int], default: int) -> int:
    collectives = (program.ops[i].collective for i in starts)
    return max((c.window for c in collectives if c is not None), default=0) or default


def _ready(
    program: Program,
    buckets: list[list[int]],
    keys: list[Key],
    unit_end: Mapping[float, int],
    *,
    keep_starts: bool,
) -> list[tuple[Key, list[int]]]:
    """Where each of the buckets, which stand as they are launched, is ready; in that order, or in
    their own: then one that is ready before its turn is ready at it."""
    made, found = _made_at(program, keys), list[Key]()
    for starts in buckets:
        at = max((made[j] for i in starts for j in program.predecessors[i]), default=(-1, 0, 0))
        found.append((unit_end.get(at[0], at[0]), _REDUCE, at[2]))
    if keep_starts:
        return list(zip(accumulate(found, max), buckets, strict=True))
    return sorted(zip(found, buckets, strict=True))


def _place_reduces(
    program: Program,
    ready: list[tuple[Key, list[int]]],
    policy: OverlapPolicy,
    keys: list[Key],
    late: set[int],
    uses: list[float],
) -> None:
    end = float(len(program.ops))
    for k, (where, starts) in enumerate(ready):
        window = _window(program, starts, policy.max_pending_reduces)
        if window > 0:
            # One reduce more would be one too many: wait for the oldest just before it starts.
            due = k + window
            until: Key = (ready[due][0][0] if due < len(ready) else end, _REDUCE, due - 0.5)
        else:
            # Before the gathers that go out where that one is used.
            use = bisect_right(uses, where[0]) - window - 1
            until = (uses[use], _GATHER, use - 0.25) if use < len(uses) else (end, _REDUCE, k)
        for i in starts:
            keys[i] = (where[0], _REDUCE, k)
            for wait in program.waits_of[i]:
                keys[wait] = until
                late.add(wait)


def _made_at(program: Program, keys: list[Key]) -> list[Key]:
    """Key of the op that makes what each op passes on; views pass on what they read."""
    made = list(keys)
    for i, op in enumerate(program.ops):
        if op.kind == "view":
            made[i] = max((made[j] for j in program.predecessors[i]), default=(-1, 0, 0))
    return made


def _push_followers(program: Program, keys: list[Key], late: set[int]) -> None:
    """What needs a late op is late with it, rather than pulling it forward."""
    for i, before in enumerate(program.predecessors):
        behind = [keys[j] for j in before if j in late]
        if behind:
            late.add(i)
            keys[i] = max(keys[i], *behind)


def _keep_starts(program: Program, keys: list[Key], first_use: list[float]) -> None:
    """Delay a start to those before it in the sequence, but no gather beyond its first use."""
    previous: Key = (-1, 0, 0)
    for i, op in program.starts():
        latest: Key = (inf, 0, 0)
        if op.sends == "gather":
            latest = (first_use[i], _GATHER, inf)
        keys[i] = previous = min(max(keys[i], previous), latest)


def _float_views(
    program: Program, keys: list[Key], followers: list[list[int]], late: Set[int]
) -> None:
    """A view costs nothing and pins what it reads: it belongs to its first user."""
    for i, op in enumerate(program.ops):
        if op.kind == "view" and followers[i] and i not in late:
            keys[i] = (inf, 0, 0)


def _pull_predecessors(program: Program, keys: list[Key], *, keep_starts: bool) -> None:
    """Make keys grow along dependencies: what an early op needs is early with it."""
    next_start: Key | None = None
    for i in range(len(program.ops) - 1, -1, -1):
        if keep_starts and program.ops[i].kind == "start":
            keys[i] = min(keys[i], next_start) if next_start else keys[i]
            next_start = keys[i]
        for j in program.predecessors[i]:
            keys[j] = min(keys[j], keys[i])


def starts_in(program: Program, order: Iterable[str]) -> list[str]:
    """The starts among ``order``: the sequence in which a rank launches collectives."""
    starts = {op.name for _, op in program.starts()}
    return [name for name in order if name in starts]
