"""Regular plans: all is sent once, in order, in buckets of as many bytes or of as much as fits."""

from __future__ import annotations

import pytest
from layered import KINDS, layered
from programs import ROUND_COST, layers

from inductor_passes.ir.text import parse
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import evaluate
from inductor_passes.planner.regular import (
    PER_MODULE,
    Shape,
    by_room,
    few_shapes,
    gather_shapes,
    least,
    reduce_shapes,
    regular,
)
from inductor_passes.planner.segments import (
    bare,
    even,
    lines_of,
    named_buckets,
    of_kind,
    windows_of,
)
from inductor_passes.transform.merge import bucket_class

SIZES = (10, 10, 60, 10, 10)


def test_runs_have_about_as_many_bytes():
    places = range(5)
    assert even(places, 1, SIZES) == [(0, 1, 2, 3, 4)]
    assert even(places, 2, SIZES) == [(0, 1), (2, 3, 4)]
    assert even(places, 3, SIZES) == [(0, 1), (2,), (3, 4)]
    assert even(places, 9, SIZES) == [(0,), (1,), (2,), (3,), (4,)]


def test_a_shape_is_its_plan():
    lines = lines_of(bare(parse(layers(8, "backward"))))
    state = regular(Shape(gathers=4, ahead=3, reduces=2, behind=-1), lines)
    gathers, reduces = of_kind(state, "gather"), of_kind(state, "reduce")
    assert [s.members for s in gathers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [s.members for s in reduces] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert (windows_of(gathers)[2:], windows_of(reduces)) == ([3, 3], [-1, -1])


def test_what_there_is_not_has_no_shapes():
    forward = lines_of(bare(parse(layers(4, "forward"))))
    like = Shape(4, 2, 4, 1)
    assert reduce_shapes(forward, 4, like) == [like]
    assert len({shape.gathers for shape in gather_shapes(forward, 100)}) == len(PER_MODULE)


@pytest.mark.parametrize("kind", KINDS)
def test_regular_plans_can_be_made(kind):
    """Each sends the same, in buckets of one kind, group, op and dtype, in some legal order."""
    program, cost, fqns = layered(3, 9, kind)
    lines = lines_of(bare(program))
    room = {k: [50.0] * len(names) for k, names in lines.starts.items()}
    states = [regular(shape, lines) for shape in few_shapes(9)]
    states += [least(lines), by_room(lines, room, (0.5, 2), (0.5, 1))]
    everything = sorted(op.name for _, op in program.starts() if op.collective.fqns)
    for state in states:
        buckets = named_buckets(state, lines, fqns)
        assert sorted(name for bucket in buckets for name in bucket.starts) == everything
        for bucket in buckets:
            sent = [program.ops[program.index[name]].collective for name in bucket.starts]
            assert len({bucket_class(c) for c in sent}) == 1
        assert evaluate(program, cost, buckets, 0.0) is not None


def test_buckets_fill_the_room_that_there_is():
    lines = lines_of(bare(parse(layers(6, "forward"))))  # 64 bytes each
    room = {"gather": [0.0, 64.0, 128.0, 128.0, 256.0, 256.0], "reduce": [], "all_reduce": []}
    state = by_room(lines, room, (1.0, 2), (1.0, 1))
    assert [s.members for s in of_kind(state, "gather")] == [(0,), (1,), (2, 3), (4, 5)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replicate"])
def test_no_regular_plan_takes_less_than_the_least(kind):
    for seed in range(6):
        program, cost, fqns = layered(seed, 5, kind)
        program, cost = rank_invariant(program, cost)
        lines = lines_of(bare(program))
        peaks = [
            evaluate(program, cost, named_buckets(state, lines, fqns), 0.0).peak_nbytes
            for state in (least(lines), *(regular(shape, lines) for shape in few_shapes(5)))
        ]
        assert peaks[0] == min(peaks), seed


def test_the_least_waits_for_reduces_at_once():
    program = parse(layers(3, "backward"))
    lines = lines_of(bare(program))
    assert windows_of(of_kind(least(lines), "reduce")) == [-1, -1, 1]
    assert evaluate(program, ROUND_COST, named_buckets(least(lines), lines, []), 0.0) is not None
