"""How many buckets of gradients are pending, where nobody has planned it.

A reduce in flight keeps its full gradients alive. It is waited for before the next reduce is
launched if that costs nothing: if compute is about to wait for a gather that is behind it on the
wire::

    used          g2           g1          g0
    launched      g1        r2 g0       r1          r0
                                       ^ r2 is waited for here; where g0 is used it has ended anyway

Where a backward gathers nothing (it has kept the full parameters of forward), or reduces have a
communicator of their own, compute would stand still for that wait, so the policy decides; see
:mod:`inductor_passes.transform.order`.
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
    """The buckets of ``bucketing="manual"``, for a program in the order of the model with nothing
    merged: those of :func:`~inductor_passes.ir.buckets.plan_buckets`, but each bucket of reduces
    has a window of 1 if it costs no time to wait for it so early."""
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
    # If all reduces are brief but those at the ends of a backward, these are brief, too: the first
    # gathers are there before the first reduce, and behind the last gather there is little to
    # compute.
    if brief and brief.issuperset(range(1, last - 2)):
        brief.update(alike)
    places = {ready[k][2] for k in brief}
    return tuple(replace(b, window=1) if i in places else b for i, b in enumerate(buckets))


def _is_waited_behind(
    k: int, uses: Sequence[tuple[float, str]], ready: Sequence[tuple[int, str, int]]
) -> bool:
    """Whether some gather is launched after the ``k``-th reduce and first used between the launches
    of the next two reduces. A gather is launched where the gather before it is first used."""
    at, group, _ = ready[k]
    until = ready[k + 2][0] if k + 2 < len(ready) else inf
    return any(
        launched > at and ready[k + 1][0] < use <= until and its == group
        for (launched, _), (use, its) in pairwise(uses)
    )
