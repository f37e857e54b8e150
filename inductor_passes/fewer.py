"""Fewer launches in the same time: buckets of a plan joined while that costs nothing.

A search cuts where a cut may gain something. Where it gained nothing, a cut is one launch more,
and one more shape of the compute around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from inductor_passes import buckets as buckets_module
from inductor_passes.merge import bucket_class
from inductor_passes.plan import Plan
from inductor_passes.program import Bucket, Program
from inductor_passes.regular import join, sent_by, turn_of

PATIENCE = 8  # plans in a row that are not fine: larger buckets are less likely to be joined


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
    patience = PATIENCE
    refused: set[tuple[str, str]] = set()
    while True:
        pair = next((p for p in _pairs(plan.buckets, program) if _labels(p) not in refused), None)
        if pair is None:
            return plan
        better = None
        for buckets in _with_one_for(pair, plan.buckets, program, fqns):
            if not patience:
                return plan
            patience -= 1
            found = evaluated(buckets)
            if found is not None and is_fine(found):
                better = found
                break
        if better is None:
            refused.add(_labels(pair))
        else:
            plan, patience = better, PATIENCE


_Pair = tuple[Bucket, Bucket]


def _labels(pair: _Pair) -> tuple[str, str]:
    return pair[0].label, pair[1].label


def _pairs(buckets: Sequence[Bucket], program: Program) -> list[_Pair]:
    """Buckets that may be one and follow one another, those of the fewest bytes first.

    Not the first gathers nor the last reduces, which nothing hides: the less there is in them, the
    better, also where costs are not what the model says.
    """
    alike: dict[tuple[object, ...], list[Bucket]] = {}
    for bucket in sorted(buckets, key=lambda bucket: turn_of(bucket, program)):
        alike.setdefault(bucket_class(sent_by(bucket, program)[0]), []).append(bucket)

    def nbytes(pair: _Pair) -> int:
        return sum(c.nbytes for bucket in pair for c in sent_by(bucket, program))

    def is_allowed(pair: _Pair) -> bool:
        return sum(len(bucket.starts) for bucket in pair) <= buckets_module.MOST_MEMBERS

    pairs: list[_Pair] = []
    for (kind, *_), same in alike.items():
        first, last = int(kind == "gather"), len(same) - int(kind == "reduce")
        pairs += pairwise(same[first:last])
    return sorted(filter(is_allowed, pairs), key=nbytes)


def _with_one_for(
    pair: _Pair, buckets: Sequence[Bucket], program: Program, fqns: Sequence[str]
) -> Iterator[list[Bucket]]:
    """``buckets`` with one in the place of ``pair``, with the window of either."""
    first, second = pair
    one = join(pair, program, fqns, {bucket.label for bucket in buckets})
    for window in dict.fromkeys((first.window, second.window)):
        own = replace(one, window=window)
        yield [own if bucket is first else bucket for bucket in buckets if bucket is not second]
