"""The published greedy rule (SimpleFSDP, arXiv 2411.00284), to compare the auto planner with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Collective, Program, ProgramError
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cost import CostModel
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import Plan, budget_error, default_budget, evaluate
from inductor_passes.planner.regular import least
from inductor_passes.planner.segments import (
    Kind,
    Lines,
    State,
    bare,
    lines_of,
    named_buckets,
    room_of,
    with_windows,
)
from inductor_passes.transform.merge import sent_together

# The largest size at which the bandwidths of cost models were measured; a bucket of one Llama 3 8B
# layer in bf16 is about as large.
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

    Walk the parameters in order of use. A parameter joins the open bucket while that bucket's
    gather plus the last reduce hide behind the compute with the bucket before, memory suffices and
    the bucket has at most ``max_nbytes``; otherwise it begins the next bucket. Gradients that are
    ready when a bucket closes are reduced as one. A graph without gathers closes its buckets of
    reduces by the same rule.

    The rule knows nothing of compute that is slower beside transfers, and its idea of memory is
    rough. If its plan exceeds the budget after all, it is run again with an eighth less of the room
    above single collectives, and so on.

    Args and errors: see :func:`~inductor_passes.planner.auto.plan_auto`.
    """
    program, cost = rank_invariant(program, cost)
    bound = lower_bound_us(program, cost)
    late = bare(program)
    lines = lines_of(late)

    def planned(state: State) -> Plan | None:
        return evaluate(program, cost, named_buckets(state, lines, fqns), bound)

    low = planned(least(lines))
    if low is None:
        raise ProgramError("the program's collectives cannot be launched one by one")
    if budget_nbytes is None:
        by_module = plan_buckets(program, assign_by_module(fqns))
        manual = evaluate(program, cost, by_module, bound) or low
        budget_nbytes = default_budget(manual, low, device_nbytes)
    if low.peak_nbytes > budget_nbytes:
        raise budget_error(program, low, budget_nbytes)
    rule, room = _Greedy(late, cost, lines), room_of(late, lines, budget_nbytes)["gather"]
    for eighths in range(8, 0, -1):
        plan = planned(rule.state([min(max_nbytes, eighths / 8 * free) for free in room]))
        if plan is not None and plan.peak_nbytes <= budget_nbytes:
            return replace(plan, budget_nbytes=budget_nbytes)
    return replace(low, budget_nbytes=budget_nbytes)


class _Greedy:
    def __init__(self, late: Program, cost: CostModel, lines: Lines) -> None:
        self.cost, self.lines = cost, lines
        # For each gather: compute before its first use, and number of reduces ready by then.
        self.used_us: list[float] = []
        self.made: list[int] = []
        self.ready_us: list[float] = []  # for each reduce: compute before it
        now, waited = 0.0, set[str]()
        for i, op in enumerate(late.ops):
            now += cost.compute_us(late, op) if op.kind == "compute" else 0.0
            for start in (late.ops[j] for j in late.start_of.get(i, ())):
                if start.sends == "gather" and start.name not in waited:
                    waited.add(start.name)
                    self.used_us.append(now)
                    self.made.append(len(self.ready_us))
            if op.sends == "reduce":
                self.ready_us.append(now)

    def state(self, limits: Sequence[float]) -> State:
        """The plan by the rule. ``limits`` has for each place the most bytes of a bucket that is
        gathered while the bucket that begins at that place is used."""
        gathers, reduces = len(self.used_us), len(self.ready_us)
        begins = self._gathers(limits) if gathers else []
        ends = {self.made[begin] for begin in begins} if gathers else self._reduces()
        alone = range(len(self.lines.starts["all_reduce"]) + 1)
        return (
            *self._segments("gather", [*begins, gathers]),
            *self._segments("reduce", sorted(ends | {0, reduces})),
            *self._segments("all_reduce", alone),
        )

    def _segments(self, kind: Kind, cuts: Sequence[int]) -> State:
        """The segments between ``cuts``, one per class."""
        runs = []
        for begin, end in pairwise(cuts):
            of: dict[object, list[int]] = {}
            for m in range(begin, end):
                of.setdefault(self.lines.classes[kind][m], []).append(m)
            runs += [tuple(members) for members in of.values()]
        return with_windows(kind, dict.fromkeys(runs, 2))

    def _gathers(self, limits: Sequence[float]) -> list[int]:
        """Where the buckets of gathers begin."""
        begins = [0]
        for m in range(1, len(self.used_us)):
            if not self._joins(begins, m, limits):
                begins.append(m)
        return begins

    def _joins(self, begins: list[int], m: int, limits: Sequence[float]) -> bool:
        """Whether a gather joins the last bucket."""
        last = begins[-1]
        if len(begins) == 1:
            return False  # nothing hides the first gather: it is as small as can be
        if sum(self.lines.nbytes["gather"][last : m + 1]) > limits[begins[-2]]:
            return False
        ready = [self.made[begin] for begin in begins]
        reduced = (ready[-3], ready[-2]) if len(begins) > 2 else (0, ready[-2])
        busy = self._us("gather", last, m + 1) + self._us("reduce", *reduced)
        return busy <= self.used_us[last] - self.used_us[begins[-2]]

    def _us(self, kind: Kind, begin: int, end: int) -> float:
        """Time on the wire of a run of collectives, if those of each class are merged."""
        sent: dict[object, Collective] = {}
        for m in range(begin, end):
            key = self.lines.classes[kind][m]
            sent[key] = sent_together(sent.get(key), self.lines.sent[self.lines.starts[kind][m]])
        return sum(map(self.cost.collective_us, sent.values()))

    def _reduces(self) -> set[int]:
        """Where buckets of reduces end in a graph without gathers."""
        ends: set[int] = set()
        opened, before = 0, 0.0
        for m, now in enumerate(self.ready_us):
            if self._us("reduce", opened, m + 1) > now - before:
                opened, before = m + 1, now
                ends.add(opened)
        return ends
