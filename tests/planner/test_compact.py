"""The compact program: the same time and the same memory as the whole one, for every plan."""

from __future__ import annotations

import random

import pytest
from layered import KINDS, layered
from programs import random_program

from inductor_passes.ir.program import Bucket, Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import memory
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import evaluate
from inductor_passes.planner.search.compact import compact
from inductor_passes.planner.search.glue import glued
from inductor_passes.planner.segments import bare, lines_of, named_buckets, room_of, with_windows


def some_plans(program: Program, seed: int, fqns: list[str]) -> list[tuple[Bucket, ...]]:
    """Buckets of neighbours, with windows of all kinds."""
    rng, lines, plans = random.Random(seed), lines_of(bare(program)), []
    for _ in range(4):
        state = ()
        for kind, names in lines.starts.items():
            runs: list[list[int]] = []
            for m, known in enumerate(lines.classes[kind]):
                if runs and lines.classes[kind][runs[-1][0]] == known and rng.random() < 0.5:
                    runs[-1].append(m)
                else:
                    runs.append([m])
            choices = (1, 2, 3, -1, -2) if kind == "reduce" and lines.starts["gather"] else (1, 2)
            windows = [rng.choice(choices) for _ in runs]
            state += with_windows(kind, dict(zip(map(tuple, runs), windows, strict=True)))
            assert sum(map(len, runs)) == len(names)
        plans.append(named_buckets(state, lines, fqns))
    return plans


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_takes_as_long_and_as_much(kind):
    """All-reduces that send on what was reduced may be launched within a run: about as long."""
    rough = 0.03 if kind == "hybrid" else 1e-9
    for seed in range(12):
        program, cost, fqns = layered(seed, 6, kind)
        program, cost = rank_invariant(program, cost)
        small, small_cost = compact(program, cost)
        small.verify()
        for buckets in some_plans(program, seed, fqns):
            one = evaluate(program, cost, buckets, 1.0)
            other = evaluate(small, small_cost, buckets, 1.0)
            assert (one is None) == (other is None)
            if one is not None:
                if kind != "tensor_parallel":  # whose own collectives count as compute
                    assert other.step_us == pytest.approx(one.step_us, rel=rough), seed
                assert other.peak_nbytes == pytest.approx(one.peak_nbytes, rel=rough), seed


def test_buffers_that_the_same_ops_touch_are_one():
    program = parse("""
        resident p: 0
        input q: 8
        resident r: 6
        input x: 10
        compute a(x, r) -> y: 3, z: 4
        start g(p) -> f: 8, h: 9 | gather group=dp ranks=4 nbytes=17 dtype=f32 fqns=m.p
        wait w(f, h) -> v: 8 @f, u: 9 @h
        compute b(y, z, v, u, q) -> out: 5
        output out
    """)
    small, _ = compact(program, LinearCost())
    sizes = [{small.buffers[n].nbytes for n in (*op.reads, *op.writes)} for op in small.ops]
    assert sizes == [{10, 7}, {17}, {17}, {7, 17, 8, 5}]
    assert small.buffers.keys() - {n for op in small.ops for n in (*op.reads, *op.writes)} == {"p"}
    assert small.resident == {"p"} and small.buffers["p"].nbytes == 6
    assert memory(small).resident_nbytes == memory(program).resident_nbytes


def test_what_is_written_in_place_stays_a_buffer_of_its_own():
    program = parse("""
        input s: 8
        input t: 8
        compute a(s, t) -> s, t
        output s
        output t
    """)
    small, _ = compact(program, LinearCost())
    assert small.inputs == ("s", "t") == small.outputs


def test_any_program_can_be_made_compact():
    for seed in range(300):
        program = random_program(seed, 12)
        small, _ = compact(*rank_invariant(program, LinearCost()))
        small.verify()
        assert sorted(op.name for _, op in small.starts()) == sorted(
            op.name for _, op in program.starts() if op.sends != "other" or op.name in small.index
        )


RUN = """
input x: 10
compute a(x) -> big: 90
compute b(big) -> y: 10
compute c(y) -> z: 50
compute d(z, y) -> out: 20
output out
"""


def test_a_run_is_one_op_with_the_memory_of_its_ops():
    program = parse(RUN)
    small, cost = compact(program, LinearCost(op_us=dict.fromkeys("abcd", 5.0)))
    assert [op.name for op in small.ops] == ["d"]
    assert cost.compute_us(small, small.ops[0]) == 20
    assert memory(small).peak_nbytes == memory(program).peak_nbytes == 100


FREED = """
input big: 100
compute a(big) -> y: 10
compute b(y) -> out: 90
output out
"""


def test_what_is_freed_in_a_run_makes_room_in_it():
    """As one op it would hold 190 bytes at once."""
    program = parse(FREED)
    small, _ = compact(program, LinearCost())
    assert len(small.ops) == 2
    assert memory(small).peak_nbytes == memory(program).peak_nbytes == 110


VIEWED = """
input x: 100
resident p: 8
resident q: 8
compute a({read}) -> y: 8
start g(p) -> full: 32 | gather group=dp ranks=4 nbytes=32 dtype=f32 fqns=p
wait w(full) -> weight: 32 @full
compute mm(y, weight) -> z: 8
compute big(y) -> e: 64
start r(e) -> part: 16 | reduce group=dp ranks=4 nbytes=64 dtype=f32 op=sum fqns=p
wait rw(part) -> shard: 16 @part
view v(x) -> vx: 100 @x
start h(q) -> full2: 32 | gather group=dp ranks=4 nbytes=32 dtype=f32 fqns=q
wait w2(full2) -> weight2: 32 @full2
compute mm2(z, weight2{also}) -> o: 8
output o
output shard
"""


@pytest.mark.parametrize(
    ("read", "also", "is_left_out"),
    [("x", "", False), ("p", "", False), ("x", ", x", True), ("p", ", vx", True)],
    ids=["last use", "only use", "used later", "its view is used later"],
)
def test_a_view_is_left_out_if_what_it_views_is_used_later(read, also, is_left_out):
    us = dict.fromkeys(("a", "mm", "mm2", "big"), 5.0)
    program = parse(VIEWED.format(read=read, also=also))
    program, cost = rank_invariant(program, LinearCost(op_us=us))
    small, _ = compact(program, cost)
    assert ("v" not in small.index) == is_left_out
    assert memory(small).peak_nbytes == memory(bare(program)).peak_nbytes


def small_and_large(n: int) -> str:
    lines = ["input x0: 8"]
    for k in range(n):
        nbytes = 800 if k % 4 == 0 else 8
        lines += [
            f"resident p{k}: {nbytes // 4}",
            f"start g{k}(p{k}) -> f{k}: {nbytes} | gather group=dp ranks=4 nbytes={nbytes} "
            f"dtype=f32 fqns=m.p{k}",
            f"wait w{k}(f{k}) -> v{k}: {nbytes} @f{k}",
            f"compute c{k}(x{k}, v{k}) -> x{k + 1}: 8",
        ]
    return "\n".join([*lines, f"output x{n}"])


def test_small_neighbours_are_launched_together():
    program = parse(small_and_large(80))
    fqns = [f"m.p{k}" for k in range(80)]
    few, of = glued(program, bare(program), fqns, 24, 10**9)
    left = [op for _, op in few.starts()]
    assert len(left) == 8 + 8 + 2 * 16  # a large one and the three behind it, 16 times; the ends
    assert {of[f"g{k}"] for k in (33, 34, 35)} == {"g33"}
    assert all(of[f"g{k}"] == f"g{k}" for k in (*range(8), *range(72, 80)))
    assert all(not op.collective.bucket for op in left)
    many, _ = glued(program, bare(program), fqns, 100, 10**9)
    assert len(list(many.starts())) == 80


def test_what_would_fill_the_room_stays_by_itself():
    program = parse(small_and_large(80))
    peak = memory(bare(program)).peak_nbytes
    tight, _ = glued(program, bare(program), [], 24, peak)
    roomy, _ = glued(program, bare(program), [], 24, 10 * peak)
    assert len(list(tight.starts())) >= len(list(roomy.starts()))
    late = bare(program)
    room = room_of(late, lines_of(late), peak)["gather"]
    assert 0 <= min(room) < max(room)


def test_small_neighbours_leave_room_where_the_first_is_used():
    """Every fourth place has no room for a second gather."""
    lines = ["input x0: 8"]
    for k in range(200):
        scratch = f", s{k}: 1000" if k % 4 == 1 else ""
        lines += [
            f"resident p{k}: 2",
            f"start g{k}(p{k}) -> f{k}: 8 "
            f"| gather group=dp ranks=4 nbytes=8 dtype=f32 fqns=layers.{k}.w",
            f"wait w{k}(f{k}) -> v{k}: 8 @f{k}",
            f"compute c{k}(x{k}, v{k}) -> x{k + 1}: 8{scratch}",
        ]
    program, _ = rank_invariant(parse("\n".join([*lines, "output x200"])), LinearCost(20, 1e-2))
    late = bare(program)
    least_nbytes = memory(late).peak_nbytes
    few, _ = glued(program, late, [], 48, least_nbytes)
    assert 50 < sum(1 for _ in few.starts()) < 200
    assert memory(bare(few)).peak_nbytes <= least_nbytes
