"""The local search: its states are plans, its moves legal, what it finds fits and is no worse."""

from __future__ import annotations

from collections import Counter
from math import inf
from types import SimpleNamespace

import pytest
from layered import KINDS, layered
from programs import ROUND_COST, layers

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.text import parse
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.simulate import memory
from inductor_passes.planner.invariant import common_ops, rank_invariant
from inductor_passes.planner.plan import evaluate
from inductor_passes.planner.regular import Shape, least, regular
from inductor_passes.planner.search import small
from inductor_passes.planner.search.local_search import LocalSearch, best_two
from inductor_passes.planner.search.moves import (
    all_turned,
    apart,
    around,
    everywhere_alike,
    joined,
    pairs,
    repairs,
    small_repairs,
)
from inductor_passes.planner.search.small import small_program
from inductor_passes.planner.search.tried import Score, launches_price
from inductor_passes.planner.segments import (
    END,
    FIRST,
    Segment,
    bare,
    lines_of,
    named_buckets,
    of_kind,
    plain_buckets,
    state_of,
    windows_of,
)

BACKWARD = parse(layers(8, "backward"))
LINES = lines_of(bare(BACKWARD))


def search_of(program, cost, fqns, budget_nbytes=10**9, work=30_000) -> LocalSearch:
    program, cost = rank_invariant(program, cost)
    by_module = plan_buckets(program, assign_by_module(fqns))
    manual = evaluate(program, cost, by_module, lower_bound_us(program, cost))
    assert manual is not None
    tried_on = small_program(program, bare(program), cost, fqns, budget_nbytes)
    return LocalSearch(
        program, tried_on, fqns, manual=manual, budget_nbytes=budget_nbytes, work=work
    )


def of_places(state) -> Counter[tuple[str, int]]:
    return Counter((s.kind, m) for s in state for m in s.members)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_a_state_and_back(kind):
    program, _, fqns = layered(1, 6, kind)
    lines = lines_of(bare(program))
    itself = {name: name for name in lines.sent}
    for shape in (Shape(3, 2, 2, 1), Shape(2, 3, 6, -1), Shape(6, 1, 3, 3)):
        state = regular(shape, lines)
        again = state_of(named_buckets(state, lines, fqns), lines, itself)
        assert set(again) == set(state)


def test_a_turn_stays_where_it_is_when_others_are_cut():
    state = (
        Segment("gather", (0, 1), FIRST),
        Segment("gather", (2, 3), FIRST),
        Segment("gather", (4, 5), 2),
    )
    assert windows_of(of_kind(state, "gather")) == [2, 3, 2]
    parted = (state[0], Segment("gather", (2,), FIRST), Segment("gather", (3,), 2), state[2])
    assert windows_of(of_kind(parted, "gather")) == [2, 3, 2, 3]  # two buckets ahead of it now


def test_reduces_count_from_themselves():
    state = (
        Segment("reduce", (0,), 1),
        Segment("reduce", (1,), END),
        Segment("reduce", (2,), -2),
    )
    assert windows_of(state) == [1, 2, -2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_move_is_a_plan_of_the_same_collectives(kind):
    program, _, _ = layered(2, 6, kind)
    lines = lines_of(bare(program))
    state = regular(Shape(3, 2, 3, 1), lines)
    everything, seen = of_places(state), 0
    for segment in state:
        near = list(around(state, segment, lines))
        for new in (*near, *all_turned(state, lines)):
            assert of_places(new) == everything
            assert all(s.members == tuple(sorted(s.members)) for s in new)
            for s in new:
                assert len({lines.classes[s.kind][m] for m in s.members}) == 1
            plain_buckets(new, lines)
            alike = everywhere_alike(state, new, lines)
            assert alike is None or of_places(alike) == everything
            seen += new != state
    assert seen > 20


def test_what_helps_one_layer_is_done_at_all():
    state = regular(Shape(4, 2, 4, 1), LINES)
    first = of_kind(state, "gather")[1]
    cut = [first._replace(members=first.members[:1]), first._replace(members=first.members[1:])]
    new = (*(s for s in state if s != first), *cut)
    alike = everywhere_alike(state, new, LINES)
    # The first gather starts before everything, and its turn is like no other's.
    assert [len(s.members) for s in of_kind(alike, "gather")] == [2, 1, 1, 1, 1, 1, 1]


def test_repairs_take_less():
    state = regular(Shape(2, 3, 2, 2), LINES)
    gathers = {s for s in state if s.kind == "gather"}
    for new in (*small_repairs(state, gathers, LINES), *repairs(state, (gathers, gathers), LINES)):
        assert of_places(new) == of_places(state)
    singles = list(repairs(state, (set(state), set(state)), LINES))
    assert any({len(s.members) for s in new} == {1} for new in singles)


@pytest.mark.parametrize("kind", KINDS)
def test_a_climb_ends_at_a_plan_that_fits_and_is_no_worse(kind):
    better = 0
    for seed in range(4):
        program, cost, fqns = layered(seed, 8, kind)
        search = search_of(program, cost, fqns)
        low = search.tried(least(search.lines))
        search.budget_nbytes = low.memory.peak_nbytes * 1.2
        search.seen.clear()
        start = search.starts()[0]
        end = search.climb(start)
        assert not end.score.over_nbytes
        assert start.score.over_nbytes or end.score.price_us <= start.score.price_us
        better += end.score.price_us < start.score.price_us
        whole = rank_invariant(program, cost)
        plan = evaluate(*whole, search.buckets_of(end.state), 0.0)
        rough = 1.1 if kind == "hybrid" else 1.0  # see test_compact
        assert plan.peak_nbytes <= search.budget_nbytes * rough
        if kind not in ("tensor_parallel", "hybrid"):
            assert plan.step_us == pytest.approx(end.score.step_us)
    assert better or kind == "replicate"


def test_work_is_counted_in_ops_and_ends_the_search():
    program, cost, fqns = layered(0, 8, "backward")
    search = search_of(program, cost, fqns, work=20 * 200)
    search.climb(search.starts()[0])
    tried = search.allowed - search.left
    assert 0 < tried * len(common_ops(search.program, search.cost)) <= 20 * 200


def test_nothing_is_tried_twice():
    search = search_of(BACKWARD, ROUND_COST, [f"layers.{k}.weight" for k in range(8)])
    state = regular(Shape(4, 2, 4, 1), search.lines)
    assert search.tried(state) is not None
    assert search.tried(tuple(reversed(state))) is None


def test_what_stands_still_longest_is_moved_first():
    search = search_of(BACKWARD, ROUND_COST, [f"layers.{k}.weight" for k in range(8)])
    tried = search.tried(regular(Shape(4, 2, 4, 1), search.lines))
    worst = max(tried.timeline.exposed_us, key=tried.timeline.exposed_us.__getitem__)
    first = search._by_stall(tried)[0]
    assert worst in {search.lines.starts[first.kind][m] for m in first.members}


def test_a_launch_must_bring_something():
    assert launches_price(20, 20) == pytest.approx(0.005)
    assert launches_price(10, 20) == pytest.approx(0.0025)
    assert launches_price(0, 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_climb_ends_at_few_launches(kind):
    """As few as are wanted, from a start with more; and it is worth more."""
    program, cost, fqns = layered(1, 6, kind)
    search = search_of(program, cost, fqns)
    start = search.tried(least(search.lines))
    search.most_launches = start.launches // 2
    end = search.climb(start)
    assert end.launches <= search.most_launches
    assert len(search.buckets_of(end.state)) == end.launches
    assert end.score < start.score


def test_launches_are_not_counted_where_the_plan_by_module_does_not_fit():
    program, cost, fqns = layered(1, 6, "backward")
    manual = search_of(program, cost, fqns).manual
    assert search_of(program, cost, fqns, manual.peak_nbytes).most_launches == len(manual.buckets)
    assert search_of(program, cost, fqns, manual.peak_nbytes - 1).most_launches == inf


def test_pairs_that_are_joined_at_once_are_apart():
    state = least(LINES)
    found = list(pairs(state, LINES))
    some = apart(found, 3)
    assert len(some) == 3
    assert len({segment for pair in some for segment in pair}) == 6
    assert of_places(joined(state, some)) == of_places(state)
    assert len(joined(state, some)) == len(state) - 3


def test_a_plan_by_module_is_a_start(monkeypatch):
    """Of many modules each start of the search stands for some collectives of the plan."""
    monkeypatch.setattr(small, "UNITS", 20)
    program, cost, fqns = layered(0, 40, "backward")
    search = search_of(program, cost, fqns)
    assert len(search.lines.starts["gather"]) < 40
    buckets = plan_buckets(program, assign_by_module(fqns))
    tried = search.by_buckets(buckets)
    assert tried is not None
    sent = [name for bucket in search.buckets_of(tried.state) for name in bucket.starts]
    assert sorted(sent) == sorted(name for bucket in buckets for name in bucket.starts)


@pytest.mark.parametrize(
    ("fit", "best"),
    [
        ((0, 1, 0, 1), [1, 3]),
        ((0, 0, 1, 0), [2, 3]),
        ((0, 0, 0, 0), [3, 0]),
        ((1, 1, 1, 1), [0, 1]),
    ],
)
def test_the_best_two_fit_if_two_do(fit, best):
    """Of four, in the order of their prices; of those that do not fit, the fourth takes least."""
    over = [0 if fits else nbytes for fits, nbytes in zip(fit, (5, 6, 7, 4), strict=True)]
    shapes = {
        i: SimpleNamespace(price_us=i, fits=bool(fit[i]), score=Score(over[i], i, i))
        for i in (2, 0, 3, 1)
    }
    assert best_two(shapes) == best


def test_searches_of_one_graph_share_a_program_if_the_same_is_glued(monkeypatch):
    monkeypatch.setattr(small, "UNITS", 20)
    program, cost, fqns = layered(0, 60, "backward")
    program, cost = rank_invariant(program, cost)
    late = bare(program)
    tight = memory(late).peak_nbytes
    first = small_program(program, late, cost, fqns, 10 * tight)
    assert small_program(program, late, cost, fqns, 11 * tight, known=first) is first
    other = small_program(program, late, cost, fqns, tight, known=first)
    assert other.first_of != first.first_of
    assert other.program == small_program(program, late, cost, fqns, tight).program
