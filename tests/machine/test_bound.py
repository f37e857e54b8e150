"""The lower bound: by hand, and below whatever a program can be made to take."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from layered import KINDS, all_plans, layered
from programs import ROUND_COST, layers, random_program

from inductor_passes.ir.buckets import Assignment, plan_buckets
from inductor_passes.ir.program import ProgramError
from inductor_passes.ir.text import parse
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import simulate
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlap


@pytest.mark.parametrize(
    ("latency_us", "bound_us"),
    [
        (8, 8 + 40),  # the first gather, then compute
        (25, 25 + 40),
    ],
)
def test_forward(latency_us, bound_us):
    cost = replace(ROUND_COST, latency_us=latency_us, link_gb_s=float("inf"))
    assert lower_bound_us(parse(layers(4, "forward")), cost) == bound_us


def test_forward_on_a_slow_wire():
    """All gathers take 4 * 64 us, merged or not, and the last layer's compute follows."""
    assert lower_bound_us(parse(layers(4, "forward")), ROUND_COST) == 4 * 64 + 10


def test_backward():
    """The first gather, dgrad and wgrad of 4 layers, and the last reduce."""
    program = parse(layers(4, "backward"))
    cost = replace(
        ROUND_COST,
        latency_us=8,
        link_gb_s=float("inf"),
        op_us=dict.fromkeys((f"divide{k}" for k in range(4)), 0.0),
    )
    assert lower_bound_us(program, cost) == 8 + 80 + 8


def test_what_is_in_transfer_holds_compute_up():
    """The first gather's 64 us are idle, of the others each 32 are lost to compute beside them."""
    cost = replace(ROUND_COST, compute_beside=0.5, op_us={f"mm{k}": 100.0 for k in range(4)})
    assert lower_bound_us(parse(layers(4, "forward")), cost) == 64 + 4 * 100 + 3 * 32


def test_nothing():
    assert lower_bound_us(parse("input x: 8\noutput x"), ROUND_COST) == 0


def test_random_programs_take_longer():
    for seed in range(150):
        rng, program = random.Random(seed), random_program(seed, 16)
        cost = LinearCost(rng.choice((0, 5, 30)), 1e-3 * rng.choice((1, 4, 50)), launch_us=10)
        cost = replace(cost, compute_beside=rng.choice((1.0, 0.5)))
        bound = lower_bound_us(program, cost)
        assert bound <= simulate(program, cost).total_us + 1e-9, seed
        fqns = [fqn for _, op in program.starts() for fqn in op.collective.fqns]
        for _ in range(3):
            buckets = plan_buckets(program, Assignment({fqn: rng.choice("xyz") for fqn in fqns}))
            merged = program
            for bucket in buckets:
                try:
                    merged = merge(merged, [replace(bucket, window=rng.randint(0, 4))])
                except ProgramError:
                    continue
            order = overlap(merged, OverlapPolicy(rng.randint(1, 3), rng.randint(1, 3)))
            assert bound <= simulate(merged.reorder(order), cost).total_us + 1e-9, seed


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_near_the_best_plan(kind):
    """On average: no plan of 2 layers may reach it."""
    gaps = []
    for seed in range(10):
        program, cost, _ = layered(seed, 2, kind)
        bound = lower_bound_us(program, cost)
        times = []
        for buckets in all_plans(program, each=False):
            merged = merge(program, buckets)
            order = overlap(merged, OverlapPolicy())
            times.append(simulate(merged.reorder(order), cost).total_us)
        assert bound <= min(times) + 1e-9, seed
        gaps.append(min(times) / bound)
    assert sum(gaps) / len(gaps) < 1.15
