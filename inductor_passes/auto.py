"""The auto planner: buckets and windows by cost model, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from inductor_passes.bound import lower_bound_us
from inductor_passes.buckets import assign_by_module, new_label, of_few_members, plan_buckets
from inductor_passes.chain import Chain, chain_of, coarsen
from inductor_passes.cost import CostModel
from inductor_passes.fewer import with_fewer_buckets
from inductor_passes.invariant import rank_invariant
from inductor_passes.plan import Plan, budget_error, default_budget, evaluate
from inductor_passes.program import Bucket, Program, ProgramError
from inductor_passes.regular import in_parts, joined, sent_on
from inductor_passes.schedule import Schedule, buckets_of, singles
from inductor_passes.walk import Search, SearchLimits
from inductor_passes.wire import TransferTimes

CLOSE = 1.005
# Units of the chain that is searched: enough for modules in three parts, and no more of them than
# these. (In a shallow model of small layers more of them cost three times the time, and the walk,
# which keeps as many states, drops the better plans.)
FEWEST, MOST = 48, 96
# Of one search after the other: whether its chain has those units, or the fewest; share of the
# memory beyond the least, since one that may take all prefetches so much that gradients find no
# room; and whether reduces may be waited for at uses, which is more to choose from, and so more
# for the walk to drop. The next one is made if the best plan so far takes longer than NEAR the
# bound.
SEARCHES = (
    (True, 1.0, False),
    (True, 1.0, True),
    (False, 1.0, True),
    (True, 0.5, True),
    (False, 0.5, True),
)
NEAR = 1.01
# Nor beyond this, if compute hardly ever stands still. What is left is then what compute loses
# beside transfers; the bound takes them for one transfer, which no memory holds.
HIDDEN = 1.02
TRIES = 3  # where nothing fits, each in less room


def plan_auto(
    program: Program,
    cost: CostModel,
    fqns: Sequence[str],
    *,
    budget_nbytes: int | None = None,
    device_nbytes: int | None = None,
    limits: SearchLimits | None = None,
) -> Plan:
    """The buckets and windows that make one graph fast.

    Plans are merged, ordered and simulated: first the buckets of
    :func:`~inductor_passes.buckets.assign_by_module`; then regular plans like it
    (:mod:`inductor_passes.regular`); it with the first or the last bucket smaller; then what
    searches of the chain find. No more are made once one that fits takes at most 0.5 % longer than
    the lower bound, or, after the first search, 1 %; nor searched for if one takes at most 2 %
    longer, and compute stands still for at most 0.5 % of it. Of those that fit and take at most
    0.5 % longer than the fastest, it is that by module if that is one of them, else the one with
    the fewest buckets, of which neighbours are joined while it stays so fast, or within 1 % of the
    bound: costs that differ a little give one plan, and a launch that gains nothing is none.

    Args:
        program: a forward or backward graph as it was read, nothing merged.
        cost: the same on all ranks.
        fqns: of the parameters, in an order that all ranks share.
        budget_nbytes: of live bytes, those of parameters' shards not counted (see
            :func:`~inductor_passes.invariant.rank_invariant`); default: what the buckets by
            module take, or ``device_nbytes``, if that is less and single collectives meet it.
        device_nbytes: that a device has for them.
        limits: of the search.

    Raises:
        BudgetError: no schedule meets the budget.
        ValueError: the cost model has no time for an op.
        ProgramError: the collectives cannot be launched one by one.
    """
    program, cost = rank_invariant(program, cost)
    found = _Found(program, cost, lower_bound_us(program, cost))
    by_module = found.add(plan_buckets(program, assign_by_module(fqns)))
    if by_module is not None:
        most = inf if device_nbytes is None else device_nbytes
        found.budget_nbytes = min(by_module.peak_nbytes, most)
        if budget_nbytes is not None:
            found.budget_nbytes = budget_nbytes
        if found.is_within(CLOSE):
            return replace(by_module, budget_nbytes=int(found.budget_nbytes))
    fine = chain_of(program, cost)
    least = found.add(buckets_of(singles(fine), fine, fqns))
    if least is None:
        raise ProgramError("the program's collectives cannot be launched one by one")
    manual = by_module or least
    if budget_nbytes is None:
        budget_nbytes = default_budget(manual, least, device_nbytes)
    found.budget_nbytes = budget_nbytes
    _vary(found, manual, fine, fqns)
    _search(found, manual, least, fine, fqns, limits or SearchLimits())
    if not found.fitting:
        smallest = min(found.plans, key=lambda plan: plan.peak_nbytes)
        raise budget_error(program, smallest, budget_nbytes)
    chosen = simplest(found.fitting, manual)
    if chosen is not manual:
        chosen = found.with_fewer_buckets(chosen, fqns)
    return replace(chosen, budget_nbytes=budget_nbytes)


@dataclass
class _Found:
    """The plans so far.

    Attributes:
        program: what they are of.
        cost: of it.
        bound_us: time that no plan can beat.
        budget_nbytes: that they must fit, once it is known.
        plans: all of them.
    """

    program: Program
    cost: CostModel
    bound_us: float
    budget_nbytes: float = inf
    plans: list[Plan] = field(default_factory=list)

    def add(self, buckets: Sequence[Bucket]) -> Plan | None:
        """The plan that ``buckets`` are, if they are one; it is kept."""
        plan = self.evaluated(of_few_members(buckets))
        self.plans += [plan] if plan is not None else []
        return plan

    def evaluated(self, buckets: Sequence[Bucket]) -> Plan | None:
        """The plan that ``buckets`` are, if they are one."""
        return evaluate(self.program, self.cost, buckets, self.bound_us)

    @property
    def fitting(self) -> list[Plan]:
        """Those within the budget."""
        return [plan for plan in self.plans if plan.peak_nbytes <= self.budget_nbytes]

    @property
    def fastest(self) -> Plan:
        """Of those within the budget."""
        return min(self.fitting, key=lambda plan: plan.step_us)

    def with_fewer_buckets(self, plan: Plan, fqns: Sequence[str]) -> Plan:
        """``plan`` with fewer buckets, if it fits so, and is about as fast as the fastest, or so
        near the bound that nothing faster was searched for."""
        enough_us = max(CLOSE * self.fastest.step_us, NEAR * self.bound_us)

        def is_fine(found: Plan) -> bool:
            return found.step_us <= enough_us and found.peak_nbytes <= self.budget_nbytes

        return with_fewer_buckets(plan, self.program, fqns, self.evaluated, is_fine)

    def is_within(self, factor: float) -> bool:
        """Whether the fastest that fits takes at most so many times the bound."""
        return bool(self.fitting) and self.fastest.step_us <= factor * self.bound_us

    def is_hidden(self) -> bool:
        """Whether searches could find no more than fewer and larger buckets, for little."""
        still_us = (CLOSE - 1) * self.bound_us
        return self.is_within(HIDDEN) and self.fastest.exposed_us <= still_us


def _vary(found: _Found, manual: Plan, chain: Chain, fqns: Sequence[str]) -> None:
    """Add plans like ``manual``, until one is so close to the bound that no other matters."""
    buckets, program = manual.buckets, found.program
    shapes = sent_on(buckets, program)
    if manual.peak_nbytes <= found.budget_nbytes:
        shapes = [*shapes, *joined(buckets, program, fqns)]
    else:
        shapes = [*in_parts(buckets, program), *shapes]
    for shape in (*shapes, *_edges_split(buckets, chain)):
        if not found.is_within(CLOSE):
            found.add(shape)


def _search(
    found: _Found, manual: Plan, least: Plan, fine: Chain, fqns: Sequence[str], limits: SearchLimits
) -> None:
    """Add what searches find, until a plan is close to the bound.

    None is made twice: graphs without gathers or without reduces have no uses to wait at, and less
    memory makes no better plan where the plan by module has room in it.
    """
    made: set[tuple[object, ...]] = set()
    units = min(MOST, max(FEWEST, 3 * len(set(assign_by_module(fqns).label_of.values()))))
    for is_fine, share, at_uses in SEARCHES:
        if found.is_within(NEAR if made else CLOSE) or found.is_hidden():
            return
        room = least.peak_nbytes + share * (found.budget_nbytes - least.peak_nbytes)
        if share < 1 and manual.peak_nbytes <= room:
            continue
        chain = coarsen(fine, units if is_fine else FEWEST, room)
        search = (len(chain.events), room, at_uses and bool(chain.gathers and chain.reduces))
        if search not in made:
            made.add(search)
            _add_searched(found, chain, room, fqns, limits, at_uses=at_uses)
    room, least_nbytes = found.budget_nbytes, min(plan.peak_nbytes for plan in found.plans)
    for _ in range(TRIES if not found.fitting else 0):
        # A schedule may take more than its search saw: leave room for that.
        room -= least_nbytes - found.budget_nbytes
        _add_searched(found, coarsen(fine, units, room), room, fqns, limits, at_uses=True)


def _add_searched(
    found: _Found,
    chain: Chain,
    room: float,
    fqns: Sequence[str],
    limits: SearchLimits,
    *,
    at_uses: bool,
) -> None:
    wire = TransferTimes(chain, found.cost)
    for schedule in _promising(Search(chain, wire, room, limits, at_uses).run()):
        found.add(buckets_of(schedule, chain, fqns))


def simplest(plans: Sequence[Plan], manual: Plan) -> Plan:
    """Of the plans that are about as fast as the fastest, the one by module or the smallest."""
    fastest = min(plan.step_us for plan in plans)
    close = [plan for plan in plans if plan.step_us <= CLOSE * fastest]
    return min(close, key=lambda plan: (plan is not manual, len(plan.buckets), plan.step_us))


def _promising(schedules: Sequence[Schedule]) -> Iterator[Schedule]:
    """The fastest, and the one with the fewest buckets of those that are about as fast."""
    if not schedules:
        return
    fastest = schedules[0]
    yield fastest
    close = [s for s in schedules if s.step_us <= CLOSE * fastest.step_us]
    fewest = min(close, key=lambda s: len(s.gathers) + len(s.reduces))
    if fewest is not fastest:
        yield fewest


def _edges_split(buckets: Sequence[Bucket], chain: Chain) -> Iterator[list[Bucket]]:
    """``buckets`` with the first gather apart from its bucket, with the last reduce, with both."""
    ends = [unit.starts[0] for unit in (*chain.gathers[:1], *chain.reduces[-1:])]
    taken = [bucket.label for bucket in buckets]
    for apart in dict.fromkeys([tuple(ends[:1]), tuple(ends[-1:]), tuple(ends)]):
        split = [part for bucket in buckets for part in _split(bucket, apart, taken)]
        if len(split) > len(buckets):
            yield split


def _split(bucket: Bucket, apart: Sequence[str], taken: Sequence[str]) -> list[Bucket]:
    """``bucket`` with its members among ``apart`` by themselves, under a label not ``taken``."""
    single = [name for name in bucket.starts if name in apart]
    others = tuple(name for name in bucket.starts if name not in apart)
    if not single or not others:
        return [bucket]
    return [Bucket(new_label(bucket.label, taken), tuple(single)), Bucket(bucket.label, others)]
