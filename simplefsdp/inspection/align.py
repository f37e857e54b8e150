"""Two sequences in time, of which one lacks some: which is which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_NEAR = range(1, 4)
"""How far apart two pairs may be that are compared by the time between them, whatever is better
by number: two in between may be missing, or somebody else's."""


class _Best(NamedTuple):
    """Pairs: as many as can be, then those whose gaps agree best."""

    number: int
    disagreement: float
    pair: tuple[int, int]
    before: _Best | None


def align(
    wanted: Sequence[float], found: Sequence[float], fits: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    """Pairs (index in ``wanted``, index in ``found``), both ascending: as many as can be.

    Among so many, the pairs between which as much time goes by in ``wanted`` as in ``found``:
    where one of several that look alike is missing, the gap that it leaves tells which.

    Args:
        wanted: times, ascending; 0 is where a step begins.
        found: times in the same scale, likewise.
        fits: whether the two at these indices may be a pair.
    """
    if len(wanted) == len(found) and all(fits(i, i) for i in range(len(wanted))):
        return [(i, i) for i in range(len(wanted))]
    return _Search(wanted, found, fits).pairs()


class _Search:
    """Longest common subsequence, by dynamic programming, with the gaps in time to decide ties."""

    def __init__(
        self,
        wanted: Sequence[float],
        found: Sequence[float],
        fits: Callable[[int, int], bool],
    ) -> None:
        self.wanted, self.found = wanted, found
        self.at: dict[tuple[int, int], _Best] = {}  # pairs that end with this one
        prefix: list[_Best | None] = [None] * (len(found) + 1)  # pairs of what was wanted so far
        for i in range(len(wanted)):
            longer = list(prefix)
            for j in range(len(found)):
                if fits(i, j):
                    self.at[i, j] = self._ending_with(i, j, prefix[j])
                longer[j + 1] = _better(longer[j + 1], _better(longer[j], self.at.get((i, j))))
            prefix = longer
        self.best = prefix[-1]

    def _ending_with(self, i: int, j: int, before: _Best | None) -> _Best:
        best = _Best(1, abs(self.found[j] - self.wanted[i]), (i, j), None)
        near = [self.at.get((i - a, j - b)) for a in _NEAR for b in _NEAR]
        for last in (*near, before):
            if last is not None:
                k, n = last.pair
                gap = (self.found[j] - self.found[n]) - (self.wanted[i] - self.wanted[k])
                found = _Best(last.number + 1, last.disagreement + abs(gap), (i, j), last)
                best = _better(best, found) or best
        return best

    def pairs(self) -> list[tuple[int, int]]:
        """The best ones, in order."""
        found = []
        last = self.best
        while last is not None:
            found.append(last.pair)
            last = last.before
        return found[::-1]


def _better(one: _Best | None, other: _Best | None) -> _Best | None:
    if one is None or other is None:
        return one or other
    ranks = [(-best.number, best.disagreement) for best in (one, other)]
    return one if ranks[0] <= ranks[1] else other
