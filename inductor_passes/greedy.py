"""The published greedy rule (SimpleFSDP, arXiv 2411.00284), to compare the auto planner with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from inductor_passes.bound import lower_bound_us
from inductor_passes.buckets import assign_by_module, plan_buckets
from inductor_passes.chain import Chain, chain_of
from inductor_passes.cost import CostModel
from inductor_passes.invariant import rank_invariant
from inductor_passes.plan import Plan, budget_error, default_budget, evaluate
from inductor_passes.program import Program, ProgramError
from inductor_passes.schedule import Schedule, Segment, buckets_of, singles
from inductor_passes.wire import Rest, TransferTimes, What

# Where the fit of a cost model's bandwidth was measured to; as large as buckets of one Llama 3 8B
# layer in bf16 come.
MAX_NBYTES = 512 * 2**20


def plan_greedy(
    program: Program,
    cost: CostModel,
    fqns: Sequence[str],
    *,
    budget_nbytes: int | None = None,
    device_nbytes: int | None = None,
    max_nbytes: int = MAX_NBYTES,
) -> Plan:
    """Buckets by the greedy rule, gathered one ahead, with one reduce behind.

    Walk the parameters in order of use. One joins the bucket while the bucket's gather plus the
    last reduce hide behind the compute with the bucket before, memory suffices and the bucket has
    at most ``max_nbytes``; otherwise it begins the next. Gradients that are ready when a bucket
    closes are reduced as one. A graph without gathers closes its reduces by the same rule.

    The rule knows nothing of compute that is slower beside transfers, and its idea of memory is
    rough. If what it makes passes the budget after all, it is given less room above what single
    collectives take, an eighth at a time.

    Args and errors: see :func:`~inductor_passes.auto.plan_auto`.
    """
    program, cost = rank_invariant(program, cost)
    bound = lower_bound_us(program, cost)
    chain = chain_of(program, cost)
    least = evaluate(program, cost, buckets_of(singles(chain), chain, fqns), bound)
    if least is None:
        raise ProgramError("the program's collectives cannot be launched one by one")
    if budget_nbytes is None:
        by_module = plan_buckets(program, assign_by_module(fqns))
        manual = evaluate(program, cost, by_module, bound) or least
        budget_nbytes = default_budget(manual, least, device_nbytes)
    if least.peak_nbytes > budget_nbytes:
        raise budget_error(program, least, budget_nbytes)
    wire, room = TransferTimes(chain, cost), budget_nbytes - least.peak_nbytes
    for eighths in range(8, 0, -1):
        allowed = least.peak_nbytes + room * eighths // 8
        schedule = _Greedy(chain, wire, allowed, max_nbytes).schedule()
        plan = evaluate(program, cost, buckets_of(schedule, chain, fqns), bound)
        if plan is not None and plan.peak_nbytes <= budget_nbytes:
            return replace(plan, budget_nbytes=budget_nbytes)
    return replace(least, budget_nbytes=budget_nbytes)


class _Greedy:
    def __init__(
        self, chain: Chain, wire: TransferTimes, budget_nbytes: int, max_nbytes: int
    ) -> None:
        self.chain, self.wire = chain, wire
        self.budget, self.most = budget_nbytes, max_nbytes
        self.rest = Rest(chain, wire)
        self.made_at_use = [event.made for event in chain.events if event.kind == "use"]

    def schedule(self) -> Schedule:
        n = len(self.chain.reduces)
        if self.chain.gathers:
            begins = self._gathers()
            flushes = {self.made_at_use[begin] for begin in begins} | {0, n}
        else:
            begins, flushes = [], self._reduces() | {0, n}
        gathers = tuple(
            Segment(begin, end, begins[max(0, k - 1)])
            for k, (begin, end) in enumerate(pairwise([*begins, len(self.chain.gathers)]))
        )
        cuts = sorted(flushes)
        reduces = tuple(
            Segment(begin, end, min([n, *cuts[k + 2 : k + 3]]))
            for k, (begin, end) in enumerate(pairwise(cuts))
        )
        return Schedule(gathers, reduces, 0.0)

    def _gathers(self) -> list[int]:
        """Where the buckets of gathers begin."""
        begins = [0]
        for unit in range(1, len(self.chain.gathers)):
            if not self._joins(begins, unit):
                begins.append(unit)
        return begins

    def _joins(self, begins: list[int], unit: int) -> bool:
        """Whether a unit joins the last bucket."""
        last, units = begins[-1], self.chain.gathers
        if len(begins) == 1 or units[unit].alone or units[unit - 1].alone:
            return False  # nothing hides the first gather: it is as small as can be
        if sum(c.nbytes for u in units[last : unit + 1] for c in u.collectives) > self.most:
            return False
        before = begins[-2]
        compute = self.rest.from_use[before] - self.rest.from_use[last]
        flushed = [self.made_at_use[begin] for begin in begins]
        reduced = (flushed[-3], flushed[-2]) if len(begins) > 2 else (0, flushed[-2])
        busy = self._us("gather", last, unit + 1) + self._us("reduce", *reduced)
        return busy <= compute and self._peak(before, last, unit + 1, reduced[0]) <= self.budget

    def _us(self, what: What, begin: int, end: int) -> float:
        return sum(us for _, us in self.wire.sends(what, begin, end))

    def _peak(self, before: int, last: int, end: int, held: int) -> int:
        """Live bytes at most while the bucket before is computed with and the last is in flight."""
        gathered = self.chain.gathered
        return max(
            (
                run.nbytes
                + gathered[end]
                - gathered[run.used]
                # What is ready counts as launched: the rule is rough.
                + self.chain.held(run.made, run.made, held)
                for run in self.rest.runs_between(before, last)
            ),
            default=0,
        )

    def _reduces(self) -> set[int]:
        """Where buckets of reduces end in a graph without gathers."""
        flushes: set[int] = set()
        opened, compute = 0, 0.0
        for event in self.chain.events:
            compute += event.us if event.kind == "run" else 0.0
            if event.kind == "made" and self._us("reduce", opened, event.made) > compute:
                opened, compute = event.made, 0.0
                flushes.add(opened)
        return flushes
