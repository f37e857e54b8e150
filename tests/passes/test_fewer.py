"""Neighbouring buckets are joined where that costs nothing, and only there."""

from __future__ import annotations

import itertools
from collections import Counter

from layered import KINDS, layered
from programs import ROUND_COST, layers

from inductor_passes import auto, fewer
from inductor_passes import buckets as module
from inductor_passes.auto import plan_auto
from inductor_passes.bound import lower_bound_us
from inductor_passes.fewer import with_fewer_buckets
from inductor_passes.invariant import rank_invariant
from inductor_passes.merge import bucket_class
from inductor_passes.plan import Plan, evaluate
from inductor_passes.program import Bucket
from inductor_passes.regular import sent_by, turn_of
from inductor_passes.text import parse

SIX = parse(layers(6, "forward"))
FQNS = [f"layers.{k}.weight" for k in range(6)]


def plan_of(*buckets: tuple[str, ...]) -> Plan:
    found = evaluated([Bucket("+".join(starts), starts) for starts in buckets])
    assert found is not None
    return found


def evaluated(buckets) -> Plan | None:
    return evaluate(SIX, ROUND_COST, tuple(buckets), 0.0)


def members(plan: Plan) -> list[tuple[str, ...]]:
    return sorted(bucket.starts for bucket in plan.buckets)


SINGLES = plan_of(*((f"g{k}",) for k in range(6)))


def test_all_but_the_first_gather_become_one_if_all_is_fine():
    found = with_fewer_buckets(SINGLES, SIX, FQNS, evaluated, lambda plan: True)
    assert members(found) == [("g0",), ("g1", "g2", "g3", "g4", "g5")]
    assert found.step_us > SINGLES.step_us  # which was said to be fine


def test_nothing_is_joined_that_costs_something():
    def is_fine(plan: Plan) -> bool:
        return plan.step_us <= SINGLES.step_us

    found = with_fewer_buckets(SINGLES, SIX, FQNS, evaluated, is_fine)
    assert found.step_us <= SINGLES.step_us
    for at in range(1, len(found.buckets) - 1):  # and what is left apart is so for a reason
        first, second = found.buckets[at : at + 2]
        one = Bucket("one", first.starts + second.starts, first.window)
        others = [b for b in found.buckets if b not in (first, second)]
        assert not is_fine(evaluated([*others, one]))


def test_a_joined_bucket_may_be_waited_for_one_launch_later():
    """With a launch less, the wait that stood before the next one comes too early."""

    def is_fine(plan: Plan) -> bool:
        return all(bucket.window == 1 for bucket in plan.buckets if len(bucket.starts) > 1)

    found = with_fewer_buckets(SINGLES, SIX, FQNS, evaluated, is_fine)
    assert {bucket.window for bucket in SINGLES.buckets} == {0}
    assert [bucket.window for bucket in found.buckets if len(bucket.starts) > 1] == [1]


def test_members_travel_in_the_order_of_the_fqns():
    found = with_fewer_buckets(SINGLES, SIX, FQNS[::-1], evaluated, lambda plan: True)
    assert members(found) == [("g0",), ("g5", "g4", "g3", "g2", "g1")]


def test_a_bucket_has_few_members(monkeypatch):
    monkeypatch.setattr(module, "MOST_MEMBERS", 2)
    found = with_fewer_buckets(SINGLES, SIX, FQNS, evaluated, lambda plan: True)
    assert max(map(len, members(found))) == 2 and len(found.buckets) == 4


def test_so_many_plans_are_tried_in_vain(monkeypatch):
    monkeypatch.setattr(fewer, "PATIENCE", 3)
    tried: list[object] = []

    def count(buckets) -> Plan | None:
        tried.append(buckets)
        return evaluated(buckets)

    found = with_fewer_buckets(SINGLES, SIX, FQNS, count, lambda plan: False)
    assert found == SINGLES and len(tried) == 3


def test_a_plan_with_fewer_buckets_is_as_good(monkeypatch):
    """Of plans that were searched for: joined where it costs nothing, within time and memory."""
    joined: Counter[str] = Counter()
    for kind, seed in itertools.product(KINDS, range(4, 10)):
        program, cost, fqns = layered(seed, 10, kind)
        found = plan_auto(program, cost, fqns)
        with monkeypatch.context() as context:
            context.setattr(auto, "with_fewer_buckets", lambda plan, *_: plan)
            before = plan_auto(program, cost, fqns)
        plain, costs = rank_invariant(program, cost)
        enough_us = max(auto.CLOSE * before.step_us, auto.NEAR * lower_bound_us(plain, costs))
        assert found.step_us <= enough_us + 1e-9 and found.peak_nbytes <= found.budget_nbytes
        assert found == before or len(found.buckets) < len(before.buckets)
        assert _ends(found.buckets, plain) == _ends(before.buckets, plain)
        joined[kind] += found != before
    assert len(+joined) > 2, "hardly a plan was joined: choose others"


def _ends(buckets, program) -> set[tuple[str, ...]]:
    """The first bucket of each kind of gather, the last of each kind of reduce."""
    of: dict[object, list[Bucket]] = {}
    for bucket in sorted(buckets, key=lambda b: turn_of(b, program)):
        of.setdefault(bucket_class(sent_by(bucket, program)[0]), []).append(bucket)
    gathers = {same[0].starts for (kind, *_), same in of.items() if kind == "gather"}
    return gathers | {same[-1].starts for (kind, *_), same in of.items() if kind == "reduce"}
