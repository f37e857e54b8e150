"""Timelines and memory, against sums done by hand. Compute takes 10 us, a wire 1 us a byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layered import KINDS, layered
from programs import ROUND_COST, layers, random_program

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Collective
from inductor_passes.ir.text import parse
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import Span, live_by_use, memory, simulate, slowed_us, touched
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlap


def gather(name: str, nbytes: int, group: str = "dp") -> str:
    return (
        f"start {name}(p) -> full_{name}: {nbytes} | "
        f"gather group={group} ranks=4 nbytes={nbytes} dtype=f32"
    )


def timeline(*lines: str):
    return simulate(parse("\n".join(("input x: 8", "resident p: 8", *lines))), ROUND_COST)


def test_a_gather_that_is_waited_for_at_once_is_exposed():
    found = timeline(gather("g", 25), "wait w(full_g)", "compute f(x) -> y: 8")
    assert found.spans == (Span("g", "dp", 0, 25), Span("f", "compute", 25, 35))
    assert found.exposed_us == {"g": 25}
    assert (found.total_us, found.compute_us, found.wire_us) == (35, 10, 25)


def test_compute_hides_a_gather():
    found = timeline(
        gather("g", 25), "compute f(x) -> y: 8", "compute f2(x) -> z: 8", "wait w(full_g)"
    )
    assert found.exposed_us == {"g": 5}
    assert found.total_us == 25
    hidden = timeline(gather("g", 10), "compute f(x) -> y: 8", "wait w(full_g)")
    assert hidden.exposed_us == {"g": 0}
    assert hidden.total_us == 10


def test_compute_is_slower_while_anything_is_in_transfer():
    """Half as fast for 12 us, in which 6 us of it are done, then 4 more; the next, all of 10."""
    lines = ("input x: 8", "resident p: 8", gather("g", 12), "compute f(x) -> y: 8")
    program = parse("\n".join([*lines, "compute f2(x) -> z: 8", "wait w(full_g)"]))
    found = simulate(program, replace(ROUND_COST, compute_beside=0.5))
    assert found.spans[1:] == (Span("f", "compute", 0, 16), Span("f2", "compute", 16, 26))
    assert (found.compute_us, found.slowed_us, found.total_us) == (20, 6, 26)
    assert found.exposed_us == {"g": 0} and found.stalled_us == 0
    assert slowed_us(10, in_transfer_us=95, compute_beside=0.5) == 10
    assert slowed_us(10, in_transfer_us=-2, compute_beside=0.5) == 0


def test_a_lane_runs_one_transfer_at_a_time():
    found = timeline(
        gather("a", 30), gather("b", 20), "compute f(x) -> y: 8", "wait w(full_a)", "wait v(full_b)"
    )
    assert found.spans == (
        Span("a", "dp", 0, 30),
        Span("b", "dp", 30, 50),
        Span("f", "compute", 0, 10),
    )
    assert found.exposed_us == {"a": 20, "b": 20}
    assert found.total_us == 50


def test_the_order_of_waits_says_whose_exposure_it_is():
    found = timeline(gather("a", 30), gather("b", 20), "wait v(full_b)", "wait w(full_a)")
    assert found.exposed_us == {"a": 0, "b": 50}
    found = timeline(gather("a", 30), gather("b", 20), "wait w(full_b, full_a)")
    assert found.exposed_us == {"a": 0, "b": 50}
    found = timeline(gather("a", 30), gather("b", 20), "wait w(full_a, full_b)")
    assert found.exposed_us == {"a": 30, "b": 20}


def test_two_lanes_run_side_by_side():
    found = timeline(
        gather("a", 30),
        gather("b", 50, "tp"),
        "compute f(x) -> y: 8",
        "wait w(full_a)",
        gather("c", 5),
        "wait v(full_b)",
        "wait u(full_c)",
    )
    assert found.spans[:2] == (Span("a", "dp", 0, 30), Span("b", "tp", 0, 50))
    assert found.spans[-1] == Span("c", "dp", 30, 35)
    assert found.exposed_us == {"a": 20, "b": 20, "c": 0}
    assert (found.total_us, found.wire_us) == (50, 85)


def test_a_lane_that_was_idle_starts_when_launched():
    found = timeline(
        gather("a", 5), "compute f(x) -> y: 8", gather("b", 5), "wait w(full_a)", "wait v(full_b)"
    )
    assert found.spans[-1] == Span("b", "dp", 10, 15)
    assert found.exposed_us == {"a": 0, "b": 5}


def test_layers_as_they_come_are_fully_exposed():
    found = simulate(parse(layers(4, "forward")), ROUND_COST)
    assert (found.compute_us, found.wire_us, found.total_us) == (40, 256, 296)
    found = simulate(parse(layers(4, "backward")), ROUND_COST)
    assert (found.compute_us, found.wire_us, found.total_us) == (120, 512, 632)


def test_views_cost_nothing():
    found = timeline("view v(x) -> y: 8 @x")
    assert (found.spans, found.total_us) == ((), 0)


def test_exposed_times_add_up_and_stay_below_the_wire():
    for seed in range(300):
        found = simulate(random_program(seed, 25), ROUND_COST)
        exposed = sum(found.exposed_us.values())
        assert exposed == pytest.approx(found.total_us - found.compute_us), seed
        assert 0 <= exposed <= found.wire_us, seed
        assert min(found.exposed_us.values(), default=0) >= 0, seed


def test_spans_of_a_lane_do_not_overlap():
    for seed in range(100):
        spans = simulate(random_program(seed, 25), ROUND_COST).spans
        for lane in {span.lane for span in spans}:
            ends = 0.0
            for span in (s for s in spans if s.lane == lane):
                assert ends <= span.begin_us <= span.end_us, seed
                ends = span.end_us


def test_linear_cost():
    cost = LinearCost(
        latency_us=30, link_gb_s=100, memory_gb_s=1000, launch_us=5, op_us={"known": 7}
    )
    # 100 GB/s are 1e5 bytes a us, 1000 GB/s 1e6.
    assert cost.collective_us(Collective("gather", "dp", 4, 10**6, "f32")) == 30 + 10
    program = parse(
        "input x: 1000000\ncompute f(x) -> y: 3000000\n"
        "compute known(x) -> z: 8\ncompute add(x) -> x"
    )
    assert [cost.compute_us(program, op) for op in program.ops] == [5 + 4, 7, 5 + 1]


GATHERED = """\
input x: 100
resident p: 10
compute cast(p) -> half: 5
start g(half) -> full: 40 | gather group=dp ranks=8 nbytes=40 dtype=bf16
compute f(x) -> a: 7
wait w(full) -> weight: 40 @full
view v(weight) -> t: 40 @full
compute mm(a, t) -> b: 3
compute tail(b) -> y: 2
output y
"""


def test_memory_of_a_gather_from_its_start_to_the_last_use_of_a_view():
    found = memory(parse(GATHERED))
    assert found.resident_nbytes == 10
    assert found.live_nbytes == (
        100 + 5,  # cast
        100 + 5 + 40,  # g
        100 + 5 + 40 + 7,  # f: the last use of x
        5 + 40 + 7,  # w: what the collective reads is alive until here
        40 + 7,  # v
        40 + 7 + 3,  # mm: the last use of the view, and of a
        3 + 2,  # tail
    )
    assert (found.peak_nbytes, found.peak_op) == (10 + 152, "f")


def test_memory_of_a_reduce_until_its_wait():
    text = """\
input d: 8
compute wgrad(d) -> full: 64
start r(full) -> part: 16 | reduce group=dp ranks=4 nbytes=64 dtype=f32 op=sum
compute one(d) -> a: 1
compute two(d) -> b: 1
wait w(part) -> grad: 16 @part
compute divide(grad) -> y: 16
output y
output a
output b
"""
    live = (8 + 64, 72 + 16, 88 + 1, 89 + 1, 64 + 16 + 2, 16 + 2 + 16)
    assert memory(parse(text)).live_nbytes == live
    earlier = parse(text).reorder(["wgrad", "r", "w", "one", "two", "divide"])
    assert memory(earlier).live_nbytes == (72, 88, 88, 16 + 9, 16 + 10, 16 + 2 + 16)


def test_what_the_caller_keeps_is_never_freed():
    found = memory(parse("resident p: 10\nresident q: 20\ninput x: 4\ncompute f(p, x) -> y: 2"))
    assert (found.resident_nbytes, found.live_nbytes, found.peak_nbytes) == (30, (6,), 36)


def test_outputs_stay():
    found = memory(
        parse(
            "input x: 4\ncompute f(x) -> y: 2\nview v(y) -> z: 2 @y\ncompute g() -> u: 1\noutput z"
        )
    )
    assert found.live_nbytes == (6, 2, 3)


def test_an_unused_input_may_not_be_freed_before_it_is_touched():
    found = memory(
        parse("input x: 4\ninput unused: 50\ncompute f(x) -> y: 2\ncompute g(y) -> z: 1")
    )
    assert found.live_nbytes == (56, 53)


def test_a_view_counts_once_and_not_what_it_repeats():
    found = memory(parse("input x: 4\nview expand(x) -> y: 9 @x\ncompute f(y, x) -> z: 1"))
    assert found.live_nbytes == (4, 5)


def test_a_resident_view_is_resident():
    found = memory(parse("resident p: 10\nview v(p) -> q: 10 @p\ncompute f(q) -> z: 1"))
    assert found.live_nbytes == (0, 1)


def test_memory_without_ops():
    found = memory(parse("input x: 4\nresident p: 10\noutput x"))
    assert (found.live_nbytes, found.peak_nbytes, found.peak_op) == ((), 14, "")


def test_a_wait_touches_what_its_collective_reads_and_writes():
    program = parse(
        """\
        input x: 64
        resident p: 16
        start g(p) -> full: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32
        wait w(full) -> weight: 64 @full
        compute mm(x, weight) -> y: 64
        output y
        """
    )
    needed = touched(program)
    assert set(needed[program.index["g"]]) == {"p", "full"}
    assert set(needed[program.index["w"]]) == {"p", "full"}
    assert set(needed[program.index["mm"]]) == {"x", "full", "y"}


def brute_force(program) -> tuple[int, ...]:
    """Live bytes by looking, at each op, at every storage anew."""
    size = {b.name: b.nbytes for b in program.buffers.values() if b.storage == b.name}
    storage = {b.name: b.storage for b in program.buffers.values()}
    ops = range(len(program.ops))
    resident = {storage[n] for n in program.resident}
    needed = list(map(set, touched(program)))
    uses = {s: [i for i in ops if s in needed[i]] for s in size}
    for name in program.inputs:
        uses[storage[name]] = [0, *(uses[storage[name]] or ops)]
    for name in program.outputs:
        uses[storage[name]] = [*uses[storage[name]], len(program.ops)]
    spans = {s: (min(u), max(u)) for s, u in uses.items() if u and s not in resident}
    return tuple(sum(size[s] for s, (a, b) in spans.items() if a <= i <= b) for i in ops)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_what_is_launched_together_against_brute_force(kind):
    """Each start has several waits, and holds what it sends until the last of them."""
    for seed in range(8):
        program, _, fqns = layered(seed, 4, kind)
        merged = merge(program, plan_buckets(program, assign_by_module(fqns)))
        after = merged.reorder(overlap(merged, OverlapPolicy()))
        assert memory(after).live_nbytes == brute_force(after), seed


def test_memory_against_brute_force():
    for seed in range(150):
        program = random_program(seed, 25)
        found = memory(program)
        assert found.live_nbytes == brute_force(program), seed
        assert found.peak_nbytes == max(found.live_nbytes) + found.resident_nbytes, seed
        assert found.live_nbytes[program.index[found.peak_op]] == max(found.live_nbytes), seed


def test_parts_that_forward_leaves_are_of_parameters():
    """A copy of some rows, and what backward gathers; what data goes into is an activation."""
    forward = parse(
        "\n".join(
            [
                "input x: 8",
                "resident p: 8",
                "start g(p) -> full: 32 | gather group=dp ranks=4 nbytes=32 dtype=f32",
                "wait w(full) -> weight: 32 @full",
                "compute part(weight) -> piece: 16",
                "compute mm(x, weight, piece) -> y: 64",
                "output piece",
                "output y",
            ]
        )
    ).verify()
    assert live_by_use(forward) == {
        "activations": 8 + 64,
        "gathered parameters": 32 + 16,
        "full gradients": 0,
        "gradient shards": 0,
    }
    backward = parse(
        "\n".join(
            [
                "input y: 64",
                "input piece: 16",
                "start g(piece) -> full: 32 | gather group=near ranks=2 nbytes=32 dtype=f32",
                "wait w(full) -> weight: 32 @full",
                "compute mm(y, weight, piece) -> z: 8",
                "output z",
            ]
        )
    ).verify()
    found = live_by_use(backward)
    assert (found["activations"], found["gathered parameters"]) == (64 + 8, 32 + 16)
