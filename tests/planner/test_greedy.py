"""The greedy rule, step by step, and against the auto planner."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from layered import KINDS, layered
from programs import ROUND_COST, layers

from inductor_passes.ir.text import parse
from inductor_passes.planner.auto import CLOSE, plan_auto
from inductor_passes.planner.greedy import plan_greedy
from inductor_passes.planner.plan import BudgetError

ROOM = 10**9
FQNS = [f"layers.{k}.weight" for k in range(6)]


def starts(plan, kind: str) -> list[str]:
    return [" ".join(b.starts) for b in plan.buckets if b.starts[0].startswith(kind)]


def test_forward():
    """A gather takes 2 us a layer: five hide behind the 10 us of a layer, and not one more."""
    cost = replace(ROUND_COST, link_gb_s=64 / 2e3)
    plan = plan_greedy(parse(layers(6, "forward")), cost, FQNS, budget_nbytes=ROOM)
    assert starts(plan, "g") == ["g0", "g1 g2 g3 g4 g5"]
    assert (plan.step_us, plan.lower_bound_us) == (62 + 0, 62)


def test_the_gather_and_the_last_reduce_hide_together():
    """20 us of compute: two gathers and no reduce yet, then what 20 us and 40 us have room for."""
    cost = replace(ROUND_COST, link_gb_s=64 / 8e3)
    plan = plan_greedy(parse(layers(6, "backward")), cost, FQNS, budget_nbytes=ROOM)
    assert starts(plan, "g") == ["g5", "g3 g4", "g0 g1 g2"]
    assert starts(plan, "r") == ["r5", "r3 r4", "r0 r1 r2"]


def test_a_bucket_has_a_largest_size():
    cost = replace(ROUND_COST, latency_us=1, link_gb_s=math.inf)
    program = parse(layers(6, "forward"))
    plan = plan_greedy(program, cost, FQNS, budget_nbytes=ROOM, max_nbytes=128)
    assert starts(plan, "g") == ["g0", "g1 g2", "g3 g4", "g5"]


def test_memory_closes_a_bucket():
    cost = replace(ROUND_COST, latency_us=1, link_gb_s=math.inf)
    program = parse(layers(6, "forward"))
    plan = plan_greedy(program, cost, FQNS, budget_nbytes=8 * 64)
    assert plan.peak_nbytes <= 8 * 64
    with pytest.raises(BudgetError, match="no schedule fits 64 bytes"):
        plan_greedy(program, cost, FQNS, budget_nbytes=64)


@pytest.mark.slow(quick=["replicate"])
@pytest.mark.parametrize("kind", KINDS)
def test_auto_is_no_slower(kind):
    for seed in range(10):
        program, cost, fqns = layered(seed, 5, kind)
        greedy = plan_greedy(program, cost, fqns, budget_nbytes=ROOM)
        auto = plan_auto(program, cost, fqns, budget_nbytes=ROOM, work=40_000)
        assert greedy.lower_bound_us <= greedy.step_us + 1e-9
        assert auto.step_us <= greedy.step_us * CLOSE, seed
