"""Many plans of one program, each merged and in order: what a search tries.

``merge`` and then ``overlapped`` would compute the needs of all ops for every plan, though buckets
change few of them. Here the needs of the unmerged program are computed once. For each plan, the ops
of the unmerged program are ordered first; in that order the members of a bucket stand together, and
then become one op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from inductor_passes.ir.positions import by_key
from inductor_passes.ir.program import Bucket, CollectiveKind, Op, Program
from inductor_passes.planner.plan import scheduled
from inductor_passes.transform.merge import merge_starts
from inductor_passes.transform.needs import Key, Needs
from inductor_passes.transform.order import OverlapPolicy, Together, keys_of


class Schedules:
    """The schedules of a program in which nothing is merged, given buckets of all its collectives.

    If merging moves no other ops, as it moves none of what layers compute, they are those of
    :func:`~inductor_passes.planner.plan.scheduled`, up to the order of waits at one place. In other
    programs they may differ, but are legal, too. A plan that is found is evaluated anew.
    """

    def __init__(self, program: Program) -> None:
        self.program, self._needs = program, Needs(program)
        self._starts: dict[Bucket, tuple[list[int], Op]] = {}
        self._others = {i: op for i, op in program.starts() if op.sends == "other"}
        self._written = {
            i
            for i, op in program.starts()
            if i not in self._others
            and not program.in_place.isdisjoint(program.storages((*op.reads, *op.writes)))
        }

    def of(self, buckets: Sequence[Bucket]) -> Program:
        """The program with ``buckets`` merged and in their order.

        Raises:
            ProgramError: a bucket's members depend on each other.
        """
        launches: dict[CollectiveKind, list[Together]] = {}
        merged = dict(self._others)
        first_of = {i: i for i in merged}
        for bucket in buckets:
            members, start = self._start_of(bucket)
            if start.sends:
                window = bucket.window or OverlapPolicy().window(start.sends)
                launches.setdefault(start.sends, []).append(Together(members, window))
            first_of.update(dict.fromkeys(members, members[0]))
            merged[members[0]] = start
        after = None
        if self._written.isdisjoint(first_of):
            after = self._together(keys_of(self._needs, launches), first_of, merged)
        # Otherwise the needs of whole buckets, or what their waits touch, must be computed anew.
        return after or scheduled(self.program, buckets)

    def _start_of(self, bucket: Bucket) -> tuple[list[int], Op]:
        """Positions of a bucket's members, and the one start that they become."""
        if bucket not in self._starts:
            members = [self.program.index[name] for name in bucket.starts]
            start = merge_starts(bucket, [self.program.ops[i] for i in members])
            self._starts[bucket] = members, start
        return self._starts[bucket]

    def _together(
        self, keys: Sequence[Key], first_of: Mapping[int, int], merged: Mapping[int, Op]
    ) -> Program | None:
        """The program sorted by ``keys``, with one op for the members of each bucket, where the
        last of them stands. None if keys of members differ, or a wait for one stands before it."""
        if any(keys[i] != keys[first] for i, first in first_of.items()):
            return None
        waited, left = self.program.start_of, Counter(first_of.values())
        ops: list[Op] = []
        place: dict[int, int] = {}
        start_of: dict[int, tuple[int, ...]] = {}
        for i in by_key(keys):
            if i in first_of:
                first = first_of[i]
                left[first] -= 1
                if left[first]:
                    continue
                place[first] = len(ops)
                ops.append(merged[first])
                continue
            if i in waited:
                at = [place.get(first_of[start], -1) for start in waited[i]]
                if -1 in at:
                    return None
                start_of[len(ops)] = tuple(dict.fromkeys(at))
            ops.append(self.program.ops[i])
        after = self.program.with_ops(ops)
        after.__dict__["start_of"] = start_of
        return after
