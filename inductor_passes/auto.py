"""The automatic planner: bucket boundaries and windows by cost model and memory budget.

The chain of a program (:mod:`inductor_passes.chain`) is cut by :mod:`inductor_passes.search`; the
best cuts, and the plan by modules, are then written, ordered and simulated in full, and the best of
these is taken. So the plan is never longer than the one by modules, nor over the budget, as
simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from inductor_passes.bound import lower_bound_us
from inductor_passes.buckets import assign_by_module, plan_buckets
from inductor_passes.chain import Chain, chain_of, rank_invariant
from inductor_passes.cost import CostModel
from inductor_passes.merge import merge
from inductor_passes.order import OverlapPolicy, overlap
from inductor_passes.program import Bucket, Collective, Program, ProgramError
from inductor_passes.search import Cut, Cuts, Limits, best_cuts
from inductor_passes.simulate import memory, simulate

# Of two plans that differ by less, the simpler one: costs are not known any better, and a plan
# should stay when they change a little.
TOLERANCE = 0.005
_WORK = 12_000  # partial schedules kept over all events of a search
_FINALISTS = 3  # of them, simulated in full


class BudgetError(ValueError):
    """No schedule fits the memory budget.

    Attributes:
        smallest_nbytes: the smallest peak of those that were looked at.
    """

    def __init__(self, message: str, smallest_nbytes: int) -> None:
        super().__init__(message)
        self.smallest_nbytes = smallest_nbytes


@dataclass(frozen=True)
class Plan:
    """Buckets, and what they are predicted to do. Shards are counted nowhere: they differ by rank.

    Attributes:
        buckets: with their windows.
        step_us: of the graph that was planned.
        exposed_us: of it, how long compute stands still.
        lower_bound_us: what no plan can go below.
        peak_nbytes: of activations, full parameters and gradients.
        budget_nbytes: that it had to keep.
    """

    buckets: tuple[Bucket, ...]
    step_us: float
    exposed_us: float
    lower_bound_us: float
    peak_nbytes: int
    budget_nbytes: int


def plan_auto(
    program: Program, cost: CostModel, fqns: Sequence[str], *, budget_nbytes: int | None = None
) -> Plan:
    """Choose the buckets of a graph so that its step is shortest within a memory budget.

    Args:
        program: one forward or backward graph, nothing merged.
        cost: that all ranks share.
        fqns: of the parameters, in an order that all ranks share: the one inside buckets.
        budget_nbytes: of activations, full parameters and gradients; by default the peak of the
            plan by modules.

    Raises:
        BudgetError: no schedule fits, not even each collective alone and in its place.
        ValueError: the cost model gives something else than microseconds.
    """
    program, known = rank_invariant(program, cost)
    chain = chain_of(program, known)
    bound = lower_bound_us(chain)
    alone = Cuts(
        tuple(Cut(i + 1, 1) for i in range(len(chain.gathers))),
        tuple(Cut(i + 1, 1) for i in range(len(chain.reduces))),
    )
    by_module = plan_buckets(program, assign_by_module(fqns))
    found = list(judge(program, known, (by_module, buckets_of(chain, program, fqns, alone)), bound))
    budget = found[0].peak_nbytes if budget_nbytes is None else budget_nbytes
    width = max(16, _WORK // len(chain.events))
    cuts = best_cuts(chain, Limits(budget, width))[:_FINALISTS]
    found += judge(program, known, (buckets_of(chain, program, fqns, c) for c in cuts), bound)
    fitting = [p for p in found if p.peak_nbytes <= budget]
    if not fitting:
        raise over_budget(program, min(found, key=lambda p: p.peak_nbytes), budget)
    shortest = min(p.step_us for p in fitting)
    simple = [p for p in fitting if p.step_us <= shortest * (1 + TOLERANCE)]
    best = min(simple, key=lambda p: (p.buckets != by_module, len(p.buckets)))
    return replace(best, budget_nbytes=budget)


def judge(
    program: Program, cost: CostModel, candidates: Iterable[Sequence[Bucket]], bound_us: float
) -> Iterator[Plan]:
    """Write buckets into ``program``, order it, and run it on paper; those that can be written."""
    for buckets in candidates:
        try:
            merged = merge(program, buckets)
        except ProgramError:  # a member needs another one's result
            continue
        after = merged.reorder(overlap(merged, OverlapPolicy()))
        timeline, peak = simulate(after, cost), memory(after).peak_nbytes
        exposed_us = sum(timeline.exposed_us.values())
        yield Plan(tuple(buckets), timeline.total_us, exposed_us, bound_us, peak, peak)


def buckets_of(
    chain: Chain, program: Program, fqns: Sequence[str], cuts: Cuts
) -> tuple[Bucket, ...]:
    """The buckets that the cuts of a chain make of its program."""
    label_of: dict[str, str] = {}
    window_of: dict[tuple[bool, str], int] = {}
    for units, buckets in ((chain.gathers, cuts.gathers), (chain.reduces, cuts.reduces)):
        is_gather, begin = units is chain.gathers, 0
        for end, window in buckets:
            names = [name for unit in units[begin:end] for name in unit.starts]
            label = _label([_fqn(program, name) for name in names])
            while (is_gather, label) in window_of:
                label += "'"
            window_of[is_gather, label] = window
            begin = end
            label_of.update(dict.fromkeys(names, label))
    label_of.update(_labels_of_copies(program, label_of))
    place = {fqn: i for i, fqn in enumerate(fqns)}
    groups: dict[tuple[str, Collective], list[str]] = {}
    for _, op in program.starts():
        if op.collective is not None and op.name in label_of:
            message = replace(op.collective, fqns=(), nbytes=0)
            groups.setdefault((label_of[op.name], message), []).append(op.name)
    return tuple(
        Bucket(
            label,
            tuple(sorted(names, key=lambda name: place.get(_fqn(program, name), len(place)))),
            window_of.get((message.kind == "gather", label), 0),
        )
        for (label, message), names in groups.items()
    )


def _fqn(program: Program, start: str) -> str:
    collective = program.ops[program.index[start]].collective
    return collective.fqns[0] if collective is not None else ""


def _label(fqns: Sequence[str]) -> str:
    """Modules of the first and the last parameter of a bucket, or the parameter if it is alone."""
    if len(fqns) == 1:
        return fqns[0]
    first, last = (fqn.rpartition(".")[0] or fqn for fqn in (fqns[0], fqns[-1]))
    return first if first == last else f"{first}..{last}"


def _labels_of_copies(program: Program, label_of: dict[str, str]) -> Iterator[tuple[str, str]]:
    """All-reduces of what is reduced already are in buckets as the reduces are."""
    reduced = {
        _fqn(program, name): label
        for name, label in label_of.items()
        if (c := program.ops[program.index[name]].collective) is not None and c.kind == "reduce"
    }
    for _, op in program.starts():
        c = op.collective
        if c is not None and c.kind == "all_reduce" and op.name not in label_of and c.fqns:
            yield op.name, reduced.get(c.fqns[0], c.fqns[0])


def over_budget(program: Program, smallest: Plan, budget: int) -> BudgetError:
    """What the smallest of the plans holds when it holds most."""
    merged = merge(program, smallest.buckets)
    held = memory(merged.reorder(overlap(merged, OverlapPolicy())))
    gathers = (c.nbytes for op in merged.ops if (c := op.collective) and c.kind == "gather")
    return BudgetError(
        f"memory budget: no schedule of this graph fits into {budget:,} bytes; the smallest found "
        f"needs {smallest.peak_nbytes:,}, at {held.peak_op}, with gathers of up to "
        f"{max(gathers, default=0):,} bytes; the rest are activations and gradients. Raise "
        "memory_budget_gb, or lower the batch, or checkpoint activations",
        smallest.peak_nbytes,
    )
