"""Two sequences in time, of which one lacks some: which is which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_NEAR = range(1, 4)
"""How far apart two pairs may be that are compared by the time between them, whatever is better
by number: two in between may be missing, or somebody else's."""


class _Pairs(NamedTuple):
    """Pairs in order: a last one, and those before it."""

    number: int
    disagreement: float  # of the gaps between them
    last: tuple[int, int]
    offset: float  # from the one of the last pair to the other, in time
    before: _Pairs | None

    def then(self, pair: tuple[int, int], offset: float) -> _Pairs:
        """These, and one more."""
        gap = abs(offset - self.offset)
        return _Pairs(self.number + 1, self.disagreement + gap, pair, offset, self)


_NONE = _Pairs(0, 0.0, (-1, -1), 0.0, None)


def align(
    wanted: Sequence[float], found: Sequence[float], fits: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    """Pairs (index in ``wanted``, index in ``found``), both ascending: as many as can be.

    Among so many, the pairs between which as much time goes by in ``wanted`` as in ``found``:
    where one of several that look alike is missing, the gap that it leaves tells which. It is the
    longest common subsequence, by dynamic programming, with the gaps in time to decide ties.

    Args:
        wanted: times, ascending; 0 is where a step begins.
        found: times in the same scale, likewise.
        fits: whether the two at these indices may be a pair.
    """
    if len(wanted) == len(found) and all(fits(i, i) for i in range(len(wanted))):
        return [(i, i) for i in range(len(wanted))]
    ends: dict[tuple[int, int], _Pairs] = {}  # the best that end with a pair
    prefix = [_NONE] * (len(found) + 1)  # the best of what was wanted so far and found until there
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
    """The most; among so many, those whose gaps agree best; among these, the first."""
    return min(tried, key=lambda pairs: (-pairs.number, pairs.disagreement))
