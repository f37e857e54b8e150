"""Any program through plan, merge, order and text, with all that must hold: some hundred here.

More of them, others for another first one::

    python tests/ir/test_any_program.py 10000
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
from layered import KINDS, layered
from programs import random_program

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.ir.text import parse, to_text
from inductor_passes.ir.verify import verify_unchanged
from inductor_passes.machine.cost import CostModel, LinearCost
from inductor_passes.machine.simulate import memory, simulate
from inductor_passes.planner.auto import plan_auto
from inductor_passes.planner.plan import BudgetError
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlap, overlapped, starts_in

NUMBER = 150
FEW = 2_000  # ops that a search simulates
LIMITS = (1, 2, 3, 100)


def any_program(seed: int) -> tuple[Program, CostModel, list[str]]:
    """A random graph, or layers of one of the parallelisms; what it costs; its parameters."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return layered(seed, rng.randint(1, 5), rng.choice(KINDS))
    program = random_program(seed, rng.randint(4, 24))
    fqns = dict.fromkeys(fqn for _, op in program.starts() for fqn in op.collective.fqns)
    cost = LinearCost(rng.choice((0, 5, 30)), 1e-3 * rng.choice((1, 4, 50)), launch_us=10)
    return program, replace(cost, compute_beside=rng.choice((1.0, 0.5))), list(fqns)


def buckets_for(seed: int, program: Program, cost: CostModel, fqns: list[str]) -> list[Bucket]:
    """Planned by the model of a machine, with a budget or without one; or by module."""
    rng = random.Random(f"buckets {seed}")
    if rng.random() < 0.3:
        return list(plan_buckets(program, assign_by_module(fqns)))
    budget = rng.choice((None, rng.randint(50, 1200)))
    try:
        plan = plan_auto(program, cost, fqns, budget_nbytes=budget, work=FEW)
    except BudgetError as error:
        if budget is None or error.smallest_nbytes <= budget:
            raise
        budget = error.smallest_nbytes
        plan = plan_auto(program, cost, fqns, budget_nbytes=budget, work=FEW)
    assert budget is None or plan.peak_nbytes <= budget
    assert plan.lower_bound_us <= plan.step_us * (1 + 1e-9)
    return list(plan.buckets)


def try_program(seed: int) -> bool:
    """Whether its buckets could be merged: those of one module may need each other."""
    program, cost, fqns = any_program(seed)
    rng = random.Random(f"order {seed}")
    buckets = buckets_for(seed, program, cost, fqns)
    ours = [op.name for _, op in program.starts() if op.collective.fqns and op.sends != "other"]
    named = [name for bucket in buckets for name in bucket.starts]
    assert len(named) == len({*named}) and {*named} <= {*ours}
    try:
        merged = merge(program, buckets).verify()
    except ProgramError as error:
        if "put them into different buckets" not in str(error):
            raise
        return False
    verify_unchanged(program, merged)
    policy = OverlapPolicy(rng.choice(LIMITS), rng.choice(LIMITS))
    order = overlap(merged, policy)
    after = merged.reorder(order).verify()
    assert overlapped(merged, policy) == after
    verify_unchanged(program, after)
    for made in (merged, after):  # what is passed on as known is what is found
        found = replace(made)
        for known in ("storage", "storage_nbytes", "start_of", "waits_of"):
            assert list(getattr(made, known).items()) == list(getattr(found, known).items())
        assert list(map(set, made.predecessors)) == list(map(set, found.predecessors))
    assert parse(to_text(after)) == after
    kept = overlap(after, policy, keep_starts=True)
    after.reorder(kept).verify()
    assert starts_in(after, kept) == [op.name for _, op in after.starts()]
    timeline = simulate(after, cost)
    assert timeline.stalled_us <= timeline.total_us * (1 + 1e-9)
    assert 0 <= memory(after).resident_nbytes <= memory(after).peak_nbytes
    return True


@pytest.mark.slow(quick=["0"])
@pytest.mark.parametrize("first", [0, NUMBER])
def test_any_program(first):
    # The last one was told of a budget that fits, and with that of another.
    merged = [try_program(seed) for seed in (*range(first, first + NUMBER), 8065)]
    assert sum(merged) > 0.8 * NUMBER


if __name__ == "__main__":
    n = int(sys.argv[1])
    print(f"{n:,} programs, {sum(map(try_program, range(n))):,} of them merged: all hold")
