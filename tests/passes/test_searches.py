"""Which searches the auto planner makes: none twice, and of chains no finer than they need be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from programs import ROUND_COST, layers

from inductor_passes import auto
from inductor_passes.auto import plan_auto
from inductor_passes.chain import coarsen
from inductor_passes.cost import LinearCost
from inductor_passes.program import Program
from inductor_passes.text import parse
from inductor_passes.walk import Search, SearchLimits

ROOM = 10**9
FEW = SearchLimits(work=100)
COST = replace(ROUND_COST, latency_us=100)


def searches(
    monkeypatch, program: Program, fqns: list[str], cost: LinearCost = COST, **limits: int
) -> list[tuple]:
    """Budget, units that a kind may be coarsened to, and events, of each search that is made."""
    made, limit = [], []

    def coarsened(chain, units, budget):
        limit.append(units)
        return coarsen(chain, units, budget)

    def search(chain, wire, budget, limits, at_uses):
        made.append((budget, limit[-1], len(chain.events)))
        return Search(chain, wire, budget, limits, at_uses)

    with monkeypatch.context() as patch:
        patch.setattr(auto, "coarsen", coarsened)
        patch.setattr(auto, "Search", search)
        plan_auto(program, cost, fqns, limits=FEW, **limits)
    return made


@pytest.mark.parametrize(("part", "of_one_chain"), [("forward", 1), ("backward", 2)])
def test_no_search_is_made_twice(monkeypatch, part, of_one_chain):
    """With and without waits at uses is the same where there is nothing to wait for."""
    program, fqns = parse(layers(12, part)), [f"layers.{k}.weight" for k in range(12)]
    made = searches(monkeypatch, program, fqns)
    assert made
    assert max(Counter((budget, events) for budget, _, events in made).values()) == of_one_chain


def test_memory_that_is_not_short_is_not_searched_twice(monkeypatch):
    program, fqns = parse(layers(12, "backward")), [f"layers.{k}.weight" for k in range(12)]
    assert len({budget for budget, *_ in searches(monkeypatch, program, fqns)}) == 2
    made = searches(monkeypatch, program, fqns, budget_nbytes=ROOM)
    assert len({budget for budget, *_ in made}) == 1


@pytest.mark.parametrize(("n", "units"), [(12, {48}), (20, {60, 48}), (36, {96, 48})])
def test_the_chain_has_as_many_units_as_modules_need(monkeypatch, n, units):
    program, fqns = parse(layers(n, "backward")), [f"layers.{k}.weight" for k in range(n)]
    made = {units for _, units, _ in searches(monkeypatch, program, fqns)}
    assert made <= units and max(made) == max(units)


def test_nothing_is_searched_for_where_compute_only_slows_beside_transfers(monkeypatch):
    """The bound merges all gathers, as no memory allows; a search would come no nearer to it."""
    lines = [line for line in layers(12, "forward").split("\n") if not line.startswith("output")]
    program, fqns = (
        parse("\n".join([*lines, "output h12"])),
        [f"layers.{k}.weight" for k in range(12)],
    )
    op_us = {f"mm{k}": 2500.0 for k in range(12)}
    cost = replace(ROUND_COST, latency_us=60, op_us=op_us, compute_beside=0.4)
    plan = plan_auto(program, cost, fqns, limits=FEW)
    assert 1.01 < plan.step_us / plan.lower_bound_us < 1.02
    assert plan.exposed_us < 0.005 * plan.step_us
    assert searches(monkeypatch, program, fqns, cost) == []
    monkeypatch.setattr(auto, "HIDDEN", 1.0)
    assert searches(monkeypatch, program, fqns, cost)
