"""The published greedy rule, to compare with.

SimpleFSDP (arXiv 2411.00284): walk through the parameters in order of use and add each to the
current bucket as long as the bucket's gather and the last reduce hide behind the compute that runs
meanwhile, and memory suffices; else begin a new bucket. Reduces go out when a bucket ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inductor_passes.auto import Plan, buckets_of, judge, over_budget
from inductor_passes.bound import lower_bound_us
from inductor_passes.buckets import assign_by_module, plan_buckets
from inductor_passes.chain import Chain, Side, chain_of, rank_invariant
from inductor_passes.cost import CostModel
from inductor_passes.program import Program
from inductor_passes.search import Cut, Cuts

MAX_NBYTES = 1 << 30  # of a bucket: nccl-tests' tables, which costs are fitted to, end there


def plan_greedy(
    program: Program,
    cost: CostModel,
    fqns: Sequence[str],
    *,
    budget_nbytes: int | None = None,
    max_nbytes: int = MAX_NBYTES,
) -> Plan:
    """Choose the buckets of a graph by the published rule.

    Arguments and errors as for :func:`inductor_passes.auto.plan_auto`; no bucket of several
    collectives is larger than ``max_nbytes``.
    """
    program, known = rank_invariant(program, cost)
    chain = chain_of(program, known)
    bound = lower_bound_us(chain)
    budget = budget_nbytes
    if budget is None:
        by_module = plan_buckets(program, assign_by_module(fqns))
        budget = next(judge(program, known, [by_module], bound)).peak_nbytes
    cuts = greedy_cuts(chain, budget, max_nbytes)
    buckets = buckets_of(chain, program, fqns, cuts)
    (plan,) = judge(program, known, [buckets], bound)
    if plan.peak_nbytes > budget:
        raise over_budget(program, plan, budget)
    return replace(plan, budget_nbytes=budget)


def greedy_cuts(chain: Chain, budget_nbytes: int, max_nbytes: int) -> Cuts:
    """The rule, on a chain."""
    gathers: list[int] = []
    reduces: list[int] = []
    used = made = 0  # units seen
    hidden_us = meanwhile_us = 0.0  # compute of the bucket before this one, and of this one
    base = 0
    last_reduce_us = 0.0
    begin = 0
    for event in chain.events:
        if event.kind == "gather":
            us = _us(chain, "gather", begin, used + 1) + last_reduce_us
            nbytes = sum(unit.nbytes for unit in chain.gathers[begin : used + 1])
            fits = base + nbytes <= budget_nbytes and nbytes <= max_nbytes
            if used > begin and not (us <= hidden_us and fits):
                gathers.append(used)
                begin, hidden_us, meanwhile_us, base = used, meanwhile_us, 0.0, 0
                if made > (reduces[-1] if reduces else 0):
                    last_reduce_us = _us(chain, "reduce", reduces[-1] if reduces else 0, made)
                    reduces.append(made)
            used += 1
        elif event.kind == "reduce":
            made += 1
        meanwhile_us += event.work_us
        base = max(base, event.base_nbytes)
    gathers += [used] if used > begin else []
    reduces += [made] if made > (reduces[-1] if reduces else 0) else []
    return Cuts(tuple(Cut(end, 2) for end in gathers), tuple(Cut(end, 1) for end in reduces))


def _us(chain: Chain, side: Side, begin: int, end: int) -> float:
    return sum(us for _, us in chain.transfers(side, begin, end))
