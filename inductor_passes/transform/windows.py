"""How many buckets of gradients are pending, where nobody has planned it.

A reduce in flight keeps its full gradients alive. It is waited for before the next is launched
where that costs nothing: where compute is about to wait for a gather behind it on the wire::

    used          g2           g1          g0
    launched      g1        r2 g0       r1          r0
                                       ^ r2 is waited for here; where g0 is used it has ended anyway

Where a backward gathers nothing (parameters stay from forward on), or reduces have a communicator
of their own, compute would stand still for it, and the policy of the order holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from inductor_passes.ir.buckets import Assignment, plan_buckets
from inductor_passes.ir.program import Bucket, Program
from inductor_passes.transform.needs import first_uses, followers_of


def buckets_by_module(program: Program, assignment: Assignment) -> tuple[Bucket, ...]:
    """What ``bucketing="manual"`` is: :func:`~inductor_passes.ir.buckets.plan_buckets` of a program
    in which nothing is merged, in the order of the model; with a window of 1 for those of reduces
    that cost no time with it."""
    buckets = plan_buckets(program, assignment)
    used = first_uses(program, followers_of(program))
    uses: list[tuple[float, str]] = []  # of buckets of gathers
    ready: list[tuple[int, str, int]] = []  # of buckets of reduces, with the bucket's place
    for place, bucket in enumerate(buckets):
        starts = [program.index[name] for name in bucket.starts]
        collective = program.sent[bucket.starts[0]]
        if collective.kind == "gather":
            use = min(used[i] for i in starts)
            uses += [(use, collective.group)] if use < inf else []
        elif collective.kind == "reduce":
            ready.append((max(starts), collective.group, place))
    uses.sort()
    ready.sort()
    last = len(ready) - 1
    alike = [k for k in range(last) if ready[k][1] == ready[k + 1][1]]  # on one wire with the next
    brief = {k for k in alike if _is_waited_behind(k, uses, ready)}
    # The ends of a backward: its first gathers are there before its first reduce, and behind its
    # last gather there is little to compute.
    if brief and brief.issuperset(range(1, last - 2)):
        brief.update(alike)
    places = {ready[k][2] for k in brief}
    return tuple(replace(b, window=1) if i in places else b for i, b in enumerate(buckets))


def _is_waited_behind(
    k: int, uses: Sequence[tuple[float, str]], ready: Sequence[tuple[int, str, int]]
) -> bool:
    """Whether a gather that is launched behind the ``k``-th reduce is first used between the launch
    of the next and of the one after it. Gathers are launched where the one before is first used."""
    at, group, _ = ready[k]
    until = ready[k + 2][0] if k + 2 < len(ready) else inf
    return any(
        launched > at and ready[k + 1][0] < use <= until and its == group
        for (launched, _), (use, its) in pairwise(uses)
    )
