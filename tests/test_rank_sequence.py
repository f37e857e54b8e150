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
    for i in range(30 * PERIOD):
        for sequence in two:
            sequence.note(OTHER if i % 7 == 0 else ONE)
    assert not two[1]._waiting
    assert len(keys_of(two[0])) == 32  # those that are old go


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
        with pytest.raises(RankMismatchError, match="rank 1 has sent"):
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
    ends = "other.weight; then one.weight; then other.weight", "one.weight; then other.weight; then"
    assert f"rank 0 has sent 16 tensors, at the end {ends[0]}" in str(caught.value)
    assert f"rank 1 has sent 16 tensors, at the end {ends[1]}" in str(caught.value)


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


def test_what_was_told_is_not_told_again(two):
    """Who goes back to the last checkpoint in the same process group goes on."""
    low, high = two
    high.note(OTHER)
    told = 0
    for i in range(2 * PERIOD):
        low.note(ONE)
        try:
            high.note(ONE) if i else None
        except RankMismatchError:
            told += 1
    assert told == 1


def test_who_has_the_store_may_be_done(two):
    class Gone:
        def compare_set(self, *_):
            raise dist.DistNetworkError("recv, got 0 bytes")

    two[1]._store = Gone()
    for _ in range(FIRST):
        two[1].note(ONE)
