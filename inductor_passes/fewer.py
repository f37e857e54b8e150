"""Fewer launches in the same time: buckets of a plan joined while that costs nothing.

A search cuts where a cut may gain something. Where it gained nothing, a cut is one launch more,
and one more shape of the compute around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from inductor_passes.buckets import of_few_members
from inductor_passes.plan import Plan
from inductor_passes.program import Bucket, Program
from inductor_passes.regular import alike_in_turn, join, sent_by

PATIENCE = 12  # plans in a row that are not fine: larger buckets are less likely to be joined


def with_fewer_buckets(
    plan: Plan,
    program: Program,
    fqns: Sequence[str],
    evaluated: Callable[[Sequence[Bucket]], Plan | None],
    is_fine: Callable[[Plan], bool],
) -> Plan:
    """``plan`` with neighbouring buckets joined, the smallest first, as long as the plan is fine.

    Args:
        plan: of ``program``.
        program: with nothing merged.
        fqns: of the parameters, in the order in which members travel.
        evaluated: the plan that buckets are, None if they are none.
        is_fine: whether a plan will do as well as ``plan`` does.
    """
    refused: set[tuple[tuple[str, ...], int]] = set()
    in_vain = 0
    while True:
        for one, buckets in _joined_once(plan.buckets, program, fqns):
            known = (one.starts, one.window)
            if known in refused:
                continue
            if in_vain == PATIENCE:
                return plan
            found = evaluated(buckets)
            if found is not None and is_fine(found):
                plan, in_vain = found, 0
                break
            refused.add(known)
            in_vain += 1
        else:
            return plan


def _joined_once(
    buckets: Sequence[Bucket], program: Program, fqns: Sequence[str]
) -> Iterator[tuple[Bucket, list[Bucket]]]:
    """One for two buckets that follow one another, with the window of either or, as there is a
    launch less, one more; and ``buckets`` with it in their place. The fewest bytes first."""
    pairs = [
        pair for _, _, between, _ in alike_in_turn(buckets, program) for pair in pairwise(between)
    ]
    taken = {bucket.label for bucket in buckets}
    for first, second in sorted(pairs, key=lambda pair: _nbytes(pair, program)):
        one = join((first, second), program, fqns, taken)
        if len(of_few_members([one])) > 1:
            continue
        others = [bucket for bucket in buckets if bucket is not second]
        for window in dict.fromkeys((first.window, second.window, second.window + 1)):
            own = replace(one, window=window)
            yield own, [own if bucket is first else bucket for bucket in others]


def _nbytes(buckets: Sequence[Bucket], program: Program) -> int:
    return sum(c.nbytes for bucket in buckets for c in sent_by(bucket, program))
