"""Which of several launches that look alike is missing: the time between the others tells."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from simplefsdp.inspection.align import align


def alike(i, j):
    return True


@pytest.mark.parametrize("missing", range(6))
def test_the_gap_tells_which_one_is_missing(missing):
    wanted = [0, 10, 20, 30, 50, 60]
    found = [us for i, us in enumerate(wanted) if i != missing]
    left = [i for i in range(6) if i != missing]
    assert align(wanted, found, alike) == list(zip(left, range(5), strict=True))


def test_it_tells_where_the_run_drifts():
    """A graph twice as slow as predicted: what matters is the gap next to the missing one."""
    wanted = [10.0 * i for i in range(12)]
    found = [us if us <= 50 else 50 + 1.7 * (us - 50) for us in wanted]
    del found[4]
    pairs = align(wanted, found, alike)
    assert [i for i, _ in pairs] == [0, 1, 2, 3, *range(5, 12)]


def test_somebody_elses_launch_is_left_over():
    wanted, found = [0, 10, 20, 30], [0, 10, 13, 20, 30]
    assert align(wanted, found, alike) == [(0, 0), (1, 1), (2, 3), (3, 4)]


def test_sizes_come_before_times():
    sizes, seen = "abca", "bca"
    pairs = align([0, 1, 2, 3], [0, 1, 2], lambda i, j: sizes[i] == seen[j])
    assert pairs == [(1, 0), (2, 1), (3, 2)]


def test_nothing_to_align():
    assert align([], [1.0], alike) == align([1.0], [], alike) == []
    assert align([0.0], [0.0], lambda i, j: False) == []


def test_each_missing_launch_costs_one_match():
    """Against every choice of pairs: as many as can be, whatever is missing and strange."""
    rng = random.Random(0)
    for _ in range(60):
        sizes = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        wanted = sorted(rng.randrange(100) for _ in sizes)
        seen = [(us, size) for us, size in zip(wanted, sizes, strict=True) if rng.random() < 0.7]
        found = sorted([*seen, *((rng.randrange(100), 1) for _ in range(rng.randrange(3)))])

        def fits(i, j, sizes=sizes, found=found):
            return sizes[i] == found[j][1]

        pairs = align(wanted, [us for us, _ in found], fits)
        assert all(fits(i, j) for i, j in pairs)
        assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
        assert len(pairs) == longest(sizes, [size for _, size in found])
        assert len(pairs) >= len(seen)


def longest(one, other):
    for n in range(min(len(one), len(other)), 0, -1):
        if {*combinations(one, n)} & {*combinations(other, n)}:
            return n
    return 0


def test_many_launches_take_no_time():
    wanted = [10.0 * i for i in range(300)]
    found = [us for i, us in enumerate(wanted) if i not in (7, 150, 151, 299)]
    left = [i for i in range(300) if i not in (7, 150, 151, 299)]
    assert [i for i, _ in align(wanted, found, alike)] == left
