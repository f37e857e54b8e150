"""What ranks have gathered, compared through the store: without ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.rank_sequence import FIRST, PERIOD, RankSequence, gathered

ONE, OTHER = gathered(["one.weight"]), gathered(["other.weight"])


@pytest.fixture
def two():
    store = dist.HashStore()
    return [RankSequence(store, rank, (0, 1)) for rank in range(2)]


def keys_of(sequence):
    store = sequence._store
    return [n for n in range(1, 100) if store.check([sequence._key(n)])]


def test_equal_sequences_never_differ(two):
    for i in range(3 * PERIOD):
        for sequence in two:
            sequence.note(OTHER if i % 7 == 0 else ONE)
    assert not two[1]._waiting
    assert len(keys_of(two[0])) <= 8  # those that are old go


@pytest.mark.parametrize("lowest_first", [True, False])
@pytest.mark.parametrize("at", [0, FIRST - 1, FIRST, 1000, PERIOD + 3])
def test_one_difference_is_told(two, at, lowest_first):
    """However far one of the two is ahead of the other, and when it was."""
    low, high = two

    def run(sequence, n, differs):
        for i in range(n):
            sequence.note(OTHER if differs and i == at else ONE)

    n = at + 3 * PERIOD
    if lowest_first:
        run(low, n, False)
        with pytest.raises(RankMismatchError, match=r"rank 1 gathered (one|other)\.weight"):
            run(high, n, True)
    else:
        run(high, n, True)  # nothing to compare with: it does not wait
        run(low, n, False)
        with pytest.raises(RankMismatchError):
            run(high, PERIOD, False)


def test_order_and_number_count(two):
    low, high = two
    for i in range(FIRST):
        low.note((ONE, OTHER)[i % 2])
    for i in range(FIRST - 1):
        high.note((OTHER, ONE)[i % 2])
    with pytest.raises(RankMismatchError) as caught:
        high.note(ONE)
    assert "rank 0 gathered other.weight; then one.weight; then other.weight" in str(caught.value)
    assert "rank 1 gathered one.weight; then other.weight; then one.weight" in str(caught.value)


def test_many_parameters_are_told_by_the_first_and_the_last(two):
    many = gathered([f"layers.{i}.weight" for i in range(FIRST)])
    two[0].note(many)
    with pytest.raises(RankMismatchError, match=r"layers\.15\.weight \(16 parameters\)"):
        two[1].note(gathered(many.fqns[::-1]))


def test_a_store_that_is_used_again_begins_anew(two):
    """As by a process group that is made again over one store."""
    for _ in range(FIRST):
        for sequence in two:
            sequence.note(ONE)
    again = [RankSequence(two[0]._store, rank, (0, 1)) for rank in range(2)]
    for _ in range(FIRST):
        again[1].note(OTHER)
    for _ in range(FIRST):
        again[0].note(OTHER)
    again[1].note(OTHER)
