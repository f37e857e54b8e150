"""What all orders of a program must respect, whichever collectives are launched as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from math import inf

from inductor_passes.ir.positions import by_key
from inductor_passes.ir.program import Program

# (position in the old order, class at that position, place within the class), compared in turn.
Key = tuple[float, float, float]
IN_PLACE = 1  # the class of an op that stays at its position


class Needs:
    """What is known of a program whichever collectives are launched as one.

    Attributes:
        program: the program.
        followers: positions of the ops that need each op.
        first_use: see :func:`first_uses`; a use within a unit counts as at the unit's first op.
        unit_end: position of the last op of each op's unit, for ops that are in one.
        views: positions of the views.
        own_keys: for each op, its key if it stays where it is.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.followers = followers_of(program)
        begin, self.unit_end = _unit_ends(program)
        self.first_use = [begin.get(i, i) for i in first_uses(program, self.followers)]
        self.views = [i for i, op in enumerate(program.ops) if op.kind == "view"]
        self.own_keys: list[Key] = [(i, IN_PLACE, 0) for i in range(len(program.ops))]
        # A planner tries many orders of one program. They differ in what is launched as one, but
        # hardly in which ops move, so most of them ask for the same.
        self.behind = cache(self._behind)
        self.near = cache(self._near)

    def _behind(self, late: frozenset[int]) -> list[tuple[int, list[int]]]:
        """The ops that depend on a ``late`` op, directly or not. Each comes with those of its
        predecessors that are late, or depend on a late op."""
        behind: set[int] = set()
        found = list(late)
        while found:
            new = [i for i in self.followers[found.pop()] if i not in behind]
            behind.update(new)
            found += new
        before = self.program.predecessors
        return [(i, [j for j in before[i] if j in late or j in behind]) for i in sorted(behind)]

    def _near(self, moved: bytes) -> list[tuple[int, ...]]:
        """For each op, the predecessors that may stand behind it by their keys. Two ops of which
        neither has ``moved`` are still in their order."""
        return [
            before if moved[i] else tuple(j for j in before if moved[j])
            for i, before in enumerate(self.program.predecessors)
        ]


def followers_of(program: Program) -> list[list[int]]:
    """Positions of the ops that need each op."""
    followers: list[list[int]] = [[] for _ in program.ops]
    for i, before in enumerate(program.predecessors):
        for j in before:
            followers[j].append(i)
    return followers


def first_uses(program: Program, followers: list[list[int]]) -> list[float]:
    """Position of the first compute or start that needs each op's result, directly or through views
    and waits; infinite if there is none, and for computes, of which nobody asks."""
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


def nearest_order(needs: Sequence[set[int]], place: Sequence[int]) -> list[int]:
    """Indices sorted by place, but each after those it needs; indices in a cycle are left out."""
    waiting: dict[int, list[int]] = {}  # by index: those that had their turn, but still wait for it
    left: dict[int, int] = {}  # by waiting index: how many indices it still waits for
    done = [False] * len(needs)
    order: list[int] = []
    for turn in by_key(place):
        if ahead := [j for j in needs[turn] if not done[j]]:
            left[turn] = len(ahead)
            for j in ahead:
                waiting.setdefault(j, []).append(turn)
            continue
        if turn not in waiting:
            order.append(turn)
            done[turn] = True
            continue
        ready = [(place[turn], turn)]
        while ready:
            _, at = heappop(ready)
            order.append(at)
            done[at] = True
            for follower in waiting.pop(at, ()):
                left[follower] -= 1
                if not left[follower]:
                    heappush(ready, (place[follower], follower))
    return order
