"""Pairs up the elements of two sequences of times, of which some elements may lack a partner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_NEAR = range(1, 4)
"""How many places back, in either sequence, an earlier pair is tried as predecessor of a new pair:
up to two elements in between may lack a partner."""


class _Pairs(NamedTuple):
    """A list of pairs in order, linked from the last pair to the first."""

    number: int
    disagreement: float  # sum over consecutive pairs: by how much the offset changes
    last: tuple[int, int]
    offset: float  # time in ``found`` minus time in ``wanted``, for the last pair
    before: _Pairs | None

    def then(self, pair: tuple[int, int], offset: float) -> _Pairs:
        """These pairs, and one more."""
        gap = abs(offset - self.offset)
        return _Pairs(self.number + 1, self.disagreement + gap, pair, offset, self)


_NONE = _Pairs(0, 0.0, (-1, -1), 0.0, None)


def align(
    wanted: Sequence[float], found: Sequence[float], fits: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    """Pairs (index in ``wanted``, index in ``found``), both ascending: as many pairs as possible.

    Among solutions with equally many pairs, the best is the one in which the times between
    consecutive pairs agree best in ``wanted`` and ``found``. So if one of several elements that
    look alike is missing, the gap that it leaves tells which one. This is the longest common
    subsequence, by dynamic programming, with ties decided by the gaps in time.

    Args:
        wanted: times, ascending; 0 is where a step begins.
        found: times, likewise, on the same scale.
        fits: whether the elements at these two indices may be a pair.
    """
    if len(wanted) == len(found) and all(fits(i, i) for i in range(len(wanted))):
        return [(i, i) for i in range(len(wanted))]
    ends: dict[tuple[int, int], _Pairs] = {}  # for each pair, the best list that ends with it
    # The best lists for the elements of ``wanted`` so far, by how many of ``found`` they may use.
    prefix = [_NONE] * (len(found) + 1)
    for i in range(len(wanted)):
        longer = list(prefix)
        for j in range(len(found)):
            longer[j + 1] = _best(longer[j + 1], longer[j])
            if fits(i, j):
                near = (ends.get((i - a, j - b), _NONE) for a in _NEAR for b in _NEAR)
                offset = found[j] - wanted[i]
                ends[i, j] = _best(*(p.then((i, j), offset) for p in (_NONE, *near, prefix[j])))
                longer[j + 1] = _best(longer[j + 1], ends[i, j])
        prefix = longer
    pairs = prefix[-1]
    found_pairs = []
    while pairs.before is not None:
        found_pairs.append(pairs.last)
        pairs = pairs.before
    return found_pairs[::-1]


def _best(*tried: _Pairs) -> _Pairs:
    """The list with most pairs; among equals the one whose gaps agree best; else the first."""
    return min(tried, key=lambda pairs: (-pairs.number, pairs.disagreement))
