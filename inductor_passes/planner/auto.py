"""The auto planner: buckets and windows by cost model, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from inductor_passes.ir.buckets import assign_by_module, of_few_members, plan_buckets
from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cost import CostModel
from inductor_passes.planner.invariant import common_ops, rank_invariant
from inductor_passes.planner.plan import (
    CLOSE,
    NEAR,
    BudgetError,
    Plan,
    budget_error,
    default_budget,
    evaluate,
)
from inductor_passes.planner.regular import in_parts, least
from inductor_passes.planner.search.climbs import climbed
from inductor_passes.planner.search.halves import by_halves
from inductor_passes.planner.search.local_search import LocalSearch
from inductor_passes.planner.search.small import Small, small_program
from inductor_passes.planner.search.tried import launches_price
from inductor_passes.planner.segments import State, bare, lines_of, named_buckets
from inductor_passes.transform.windows import buckets_by_module

# If compute hardly ever stands still, a plan by module within this factor of the bound is good
# enough. What it loses is then time beside transfers; the bound counts the transfers of a lane as
# one, which no memory could hold.
HIDDEN = 1.02
# Without a budget a *lean* plan is looked for, too, if the default budget exceeds the memory of
# single collectives by more than the fraction LITTLE of itself. A lean plan may make LEAN_LAUNCHES
# times the launches of the plan by module; the search for it gets the fraction LEAN_WORK of the
# work.
LITTLE, LEAN_LAUNCHES, LEAN_WORK = 0.1, 2, 1 / 4
# Worth of all the memory, as a fraction of the time: a tenth of the memory is worth half a percent.
MEMORY = 0.05
PARTS = (2, 3, 4)  # into which each module's bucket is cut, where whole buckets do not fit
# Ops that a search simulates, counting only ops that all ranks have: a base, and so many more for
# each such op of the program.
WORK, WORK_PER_OP = 140_000, 15


def plan_auto(
    program: Program,
    cost: CostModel,
    fqns: Sequence[str],
    *,
    budget_nbytes: int | None = None,
    device_nbytes: int | None = None,
    work: int | None = None,
) -> Plan:
    """The buckets and windows that make one graph fast.

    The plan by module (:func:`~inductor_passes.ir.buckets.assign_by_module`) is taken if it fits
    and takes at most 0.5 % longer than the lower bound; or at most 2 %, if compute stands still for
    at most 0.5 % of the bound. If it is as fast as that but does not fit, its buckets are cut into
    halves, thirds or quarters: the first such plan is taken that fits and is at most 1 % slower.

    Else a local search (:mod:`inductor_passes.planner.search`) climbs from the most promising of
    many regular plans, from the plan by module, and from the best plan that fits (for a whole
    training step, first from the plans of its halves). It ends when a plan is within 1 % of the
    bound, moves lead no further, or its work is done. The plan by module is still taken if it fits
    and is at most 0.5 % slower than the best, so that slightly different costs give the same plan.
    If the plan by module fits, no plan with more launches is taken: hosts, networks and kernels
    beside them pay for a launch in ways that no model of a launch's time knows.

    Without a budget, a plan may take the memory of the plan by module with one more bucket of
    gradients pending. Memory that buys little is given back: a lean plan, which takes at most half
    of the memory beyond the least and makes at most twice the launches, is taken if it is at most
    1 % slower, and the memory that it saves is worth its time and launches.

    Args:
        program: a forward or backward graph as it was read, nothing merged.
        cost: the same on all ranks.
        fqns: of the parameters, in an order that all ranks share.
        budget_nbytes: budget of live bytes, without shards of parameters (see
            :func:`~inductor_passes.planner.invariant.rank_invariant`). Default: as in the last
            paragraph, or ``device_nbytes``, if that is less and single collectives meet it.
        device_nbytes: live bytes that a device has room for.
        work: ops that the search simulates in all.

    Raises:
        BudgetError: no schedule meets the budget.
        ValueError: the cost model has no time for an op.
        ProgramError: the collectives cannot be launched one by one.
    """
    program, cost = rank_invariant(program, cost)
    planner = _Planner(program, cost, fqns, work)
    if budget_nbytes is not None:
        return planner.fastest(budget_nbytes)
    return planner.by_default(device_nbytes)


class _Planner:
    """Plans of one graph, within several budgets.

    Attributes:
        late: the program with each gather late and each wait early.
        manual: the plan by module, or, if that cannot be made, the one with single collectives.
        work: ops that a search simulates; None: as many as the program's size says.
        small: the small program that the last search tried its plans on.
    """

    def __init__(
        self, program: Program, cost: CostModel, fqns: Sequence[str], work: int | None
    ) -> None:
        self.program, self.cost, self.fqns, self.work = program, cost, fqns, work
        self.bound_us = lower_bound_us(program, cost)
        self.late = bare(program)
        self.small: Small | None = None
        self.assignment = assign_by_module(fqns)
        by_module = self.evaluated(buckets_by_module(program, self.assignment))
        self.manual = by_module or self.least

    def evaluated(self, buckets: Sequence[Bucket]) -> Plan | None:
        """See :func:`~inductor_passes.planner.plan.evaluate`."""
        return evaluate(self.program, self.cost, of_few_members(buckets), self.bound_us)

    @cached_property
    def least(self) -> Plan:
        """The plan of single collectives, which hardly overlap."""
        lines = lines_of(self.late)
        low = self.evaluated(named_buckets(least(lines), lines, self.fqns))
        if low is None:
            raise ProgramError("the program's collectives cannot be launched one by one")
        return low

    @cached_property
    def roomy(self) -> Plan:
        """The plan by module with another bucket of gradients pending, if that takes more."""
        buckets = plan_buckets(self.program, self.assignment)
        if buckets == self.manual.buckets:  # of a forward, say
            return self.manual
        more = self.evaluated(buckets) or self.manual
        return max((more, self.manual), key=lambda plan: plan.peak_nbytes)

    def by_default(self, device_nbytes: int | None) -> Plan:
        """A plan that takes no more than :attr:`roomy`, and less where that costs little time."""
        most_nbytes = default_budget(self.roomy, self.least, device_nbytes)
        more_nbytes = most_nbytes - self.least.peak_nbytes
        if more_nbytes <= LITTLE * most_nbytes:
            return self.fastest(most_nbytes)
        lean = self._lean(self.least.peak_nbytes + more_nbytes // 2)
        fast = self.fastest(most_nbytes)
        if lean is None or not self._is_worth(lean, fast):
            return fast
        return replace(lean, budget_nbytes=most_nbytes)

    def _lean(self, budget_nbytes: int) -> Plan | None:
        """A plan by parts of modules, if the plan by module is fast; else what a short search
        finds."""
        most_launches = LEAN_LAUNCHES * len(self.manual.buckets)
        if _is_enough(self.manual):
            return self._as_good(self._in_parts(most_launches), budget_nbytes)
        try:
            return self.fastest(budget_nbytes, LEAN_WORK, most_launches)
        except BudgetError:
            return None

    def _is_worth(self, lean: Plan, fast: Plan) -> bool:
        """Whether ``lean`` is at most 1 % slower, and saves memory worth its time and launches."""
        saved = 1 - lean.peak_nbytes / fast.peak_nbytes
        more_us = self._price_us(lean) - self._price_us(fast)
        return (
            lean.step_us <= NEAR * fast.step_us and more_us <= MEMORY * saved * lean.lower_bound_us
        )

    def _in_parts(self, most_launches: float) -> list[Plan]:
        """The plan by module in ever smaller parts, as far as launches allow it."""
        whole = self.manual.buckets
        parts = [in_parts(self.program, whole, n) for n in PARTS if n * len(whole) <= most_launches]
        return [plan for plan in map(self.evaluated, parts) if plan is not None]

    def _as_good(self, plans: Iterable[Plan], budget_nbytes: int) -> Plan | None:
        """The first of ``plans`` that fits and is about as fast as the plan by module."""
        fitting = _fitting(plans, budget_nbytes)
        return next((p for p in fitting if p.step_us <= NEAR * self.manual.step_us), None)

    def fastest(self, budget_nbytes: int, share: float = 1.0, most_launches: float = inf) -> Plan:
        """The fastest plan within a budget and ``most_launches`` that a search with this ``share``
        of the work finds."""
        manual = self.manual
        fits = manual.peak_nbytes <= budget_nbytes
        if fits and _is_enough(manual):
            return replace(manual, budget_nbytes=budget_nbytes)
        smaller = [] if fits else self._in_parts(most_launches)
        if _is_enough(manual) and (plan := self._as_good(smaller, budget_nbytes)):
            return replace(plan, budget_nbytes=budget_nbytes)
        halves = self._of_halves(budget_nbytes, share)
        self.small = small_program(
            self.program, self.late, self.cost, self.fqns, budget_nbytes, self.small
        )
        search = LocalSearch(
            self.program,
            self.small,
            self.fqns,
            manual=manual,
            budget_nbytes=budget_nbytes,
            work=self._work_on(self.program, share),
            most_launches=most_launches,
        )

        def found(state: State) -> Plan | None:
            return self.evaluated(search.buckets_of(state))

        plans = [manual, self.roomy, self.least, *smaller, *climbed(search, manual, halves, found)]
        fitting = _fitting(plans, budget_nbytes, most_launches)
        more = (found(state) for state in search.smallest())
        fitting = fitting or _fitting(more, budget_nbytes, most_launches)
        if not fitting:
            # The error suggests the memory of one of these two, since a search within another
            # budget may not find again what this one found.
            smallest = min((self.least, manual), key=lambda plan: plan.peak_nbytes)
            raise budget_error(self.program, smallest, budget_nbytes)
        return replace(self._chosen(fitting), budget_nbytes=budget_nbytes)

    def _work_on(self, program: Program, share: float) -> int:
        """A share of the ops that a search for plans of ``program`` simulates."""
        known = self.work
        ops = WORK + WORK_PER_OP * len(common_ops(program, self.cost)) if known is None else known
        return int(share * ops)

    def _of_halves(self, budget_nbytes: int, share: float) -> list[Bucket]:
        """The buckets of a whole step, from plans of its two halves, each made with a share of the
        work; none if the program is no whole step."""

        def plan(half: Program) -> Sequence[Bucket]:
            work = self._work_on(half, share)
            found = plan_auto(half, self.cost, self.fqns, budget_nbytes=budget_nbytes, work=work)
            return found.buckets

        try:
            return by_halves(self.program, plan)
        except BudgetError:  # the whole may fit all the same
            return []

    def _price_us(self, plan: Plan) -> float:
        """The time of a plan plus the price of its launches, which is counted as in the search."""
        launches = launches_price(len(plan.buckets), len(self.manual.buckets))
        return plan.step_us + launches * plan.lower_bound_us

    def _chosen(self, plans: Sequence[Plan]) -> Plan:
        """The plan of the lowest price. If the plan by module is among ``plans``, plans with more
        launches are left out, and the plan by module is preferred if it is about as fast."""
        fits, most = self.manual in plans, len(self.manual.buckets)
        few = [plan for plan in plans if not fits or len(plan.buckets) <= most]
        best = min(few, key=self._price_us)
        return self.manual if fits and self.manual.step_us <= CLOSE * best.step_us else best


def _fitting(
    plans: Iterable[Plan | None], budget_nbytes: int, most_launches: float = inf
) -> list[Plan]:
    there = [plan for plan in plans if plan is not None and len(plan.buckets) <= most_launches]
    return [plan for plan in there if plan.peak_nbytes <= budget_nbytes]


def _is_enough(manual: Plan) -> bool:
    """Whether the plan by module is so fast that a search could at most find fewer and larger
    buckets, for little gain."""
    bound_us = manual.lower_bound_us
    hidden = manual.exposed_us <= (CLOSE - 1) * bound_us
    return manual.step_us <= (HIDDEN if hidden else CLOSE) * bound_us
