"""Which full parameters to keep from forward to backward: memory spent, and a gather saved.

What is kept lives from its use in forward to its use in backward, so the parameters that backward
needs first cost least and save most: nothing can hide the first gather of a graph. Modules are
kept in that order, as many as pay and as the budget holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from inductor_passes.ir.buckets import Assignment, plan_buckets
from inductor_passes.ir.program import Bucket, Op, Program
from inductor_passes.machine.cost import CostModel
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import evaluate
from inductor_passes.transform.windows import buckets_by_module

CLOSE = 1.002


@dataclass(frozen=True)
class Costed:
    """A program and what its ops cost."""

    program: Program
    cost: CostModel


@dataclass(frozen=True)
class Kept:
    """What stays from forward to backward, and how backward gathers the rest."""

    fqns: frozenset[str] = frozenset()  # of parameters that stay as they are
    way: int = 0  # the index of the way


def choose_kept(
    ways: Sequence[tuple[Costed, Costed]],
    assignment: Assignment,
    candidates: Collection[str],
    *,
    budget_nbytes: int | None = None,
    device_nbytes: int | None = None,
) -> Kept:
    """What to keep, with which the step by module is fastest within the budget.

    Args:
        ways: in which parameters can be gathered again: from all ranks, or from some to whom
            forward left parts. Of each forward, which gathers every parameter, and backward, which
            gathers again those that it needs. The first one keeps nothing.
        assignment: modules are kept whole, as far as they are candidates.
        candidates: parameters that may be kept.
        budget_nbytes: of live bytes in either graph; default: what they take with none kept, or
            ``device_nbytes``, if that is less.
            Bytes are those that all ranks share, see :func:`~inductor_passes.planner.plan.Plan`.
        device_nbytes: live bytes that a device has room for.

    Returns:
        Of the choices that take at most 0.2 % longer than the fastest, one that needs as little
        memory as possible; of these, one with as few modules kept whole.

    Raises:
        ValueError: the cost model has no time for an op.
    """
    steps = [_OneWay.of(forward, backward, assignment, candidates) for forward, backward in ways]
    none = steps[0].worth(0)
    if none is None:
        return Kept()
    budget = budget_nbytes
    if budget is None:
        # With another bucket of gradients pending, as plan_auto has.
        more = steps[0].worth(0, plan_buckets)
        budget = max(none[1], more[1] if more else 0)
        budget = budget if device_nbytes is None else min(budget, device_nbytes)
    fitting = {(0, 0): none}
    for way, step in enumerate(steps):
        for n in [*([0] if way else []), *_growing(len(step.modules))]:
            found = step.worth(n)
            if found is not None and found[1] <= budget:
                fitting[n, way] = found
    fastest = min(us for us, _ in fitting.values())
    n, way = min(
        (choice for choice, (us, _) in fitting.items() if us <= CLOSE * fastest),
        key=lambda choice: (fitting[choice][1], choice),
    )
    return Kept(steps[way].kept(n), way)


@dataclass(frozen=True)
class _OneWay:
    forward: Costed
    backward: Costed
    assignment: Assignment
    modules: Sequence[Sequence[str]]  # parameters, in the order in which backward needs them

    @classmethod
    def of(
        cls,
        forward: Costed,
        backward: Costed,
        assignment: Assignment,
        candidates: Collection[str],
    ) -> _OneWay:
        modules = _modules(backward.program, assignment, candidates)
        its = [Costed(*rank_invariant(g.program, g.cost)) for g in (forward, backward)]
        return cls(its[0], its[1], assignment, modules)

    def kept(self, n: int) -> frozenset[str]:
        return frozenset(fqn for module in self.modules[:n] for fqn in module)

    def worth(
        self,
        n: int,
        buckets_of: Callable[[Program, Assignment], Sequence[Bucket]] = buckets_by_module,
    ) -> tuple[float, int] | None:
        """Time and peak memory with the first ``n`` modules kept."""
        programs = keeping(self.forward.program, self.backward.program, self.kept(n))
        plans = [
            evaluate(program, graph.cost, buckets_of(program, self.assignment), 0.0)
            for program, graph in zip(programs, (self.forward, self.backward), strict=True)
        ]
        if None in plans:
            return None
        found = [plan for plan in plans if plan is not None]
        return sum(plan.step_us for plan in found), max(plan.peak_nbytes for plan in found)


def _growing(n: int) -> list[int]:
    """A few numbers up to ``n``: each by half, or by one, larger than the one before."""
    numbers, at = [], 0
    while at < n:
        at = min(n, at + max(1, at // 2))
        numbers.append(at)
    return numbers


def _modules(
    backward: Program, assignment: Assignment, candidates: Collection[str]
) -> list[list[str]]:
    """The candidates of each module of which backward gathers something, in the order of their use.

    All candidates of a module are kept together: if a weight is kept and its bias is not, the
    compiler may find it cheaper to gather the bias again, which backward did not need, than to save
    what was made of both.
    """
    label_of = {fqn: assignment.label_of.get(fqn, fqn) for fqn in sorted(candidates)}
    gathered = (fqn for c in backward.sent.values() if c.kind == "gather" for fqn in c.fqns)
    used = dict.fromkeys(label_of[fqn] for fqn in gathered if fqn in label_of)
    return [[fqn for fqn, its in label_of.items() if its == label] for label in used]


def keeping(forward: Program, backward: Program, fqns: Collection[str]) -> tuple[Program, Program]:
    """The two programs if full parameters are kept from one to the other.

    Args:
        forward: what it gathers of ``fqns`` becomes an output.
        backward: what it gathers of ``fqns`` becomes an input, and the ops that led to it go.
        fqns: of parameters; their collectives are single.
    """
    gathers = _gathers(backward, fqns)
    given = [name for op in gathers.values() for name in op.writes]
    led = {name for op in gathers.values() for name in op.reads}
    # Parts, which forward would leave for these gathers.
    parts = led.intersection(backward.inputs) - backward.resident
    whole = (name for op in _gathers(forward, fqns).values() for name in op.writes)
    outputs = (name for name in forward.outputs if name not in parts)
    forward = replace(forward, outputs=tuple(dict.fromkeys((*outputs, *whole))))
    waits = {wait for i in gathers for wait in backward.waits_of[i]}
    ops = [
        replace(op, kind="view") if i in waits else op
        for i, op in enumerate(backward.ops)
        if i not in gathers
    ]
    inputs = (*(name for name in backward.inputs if name not in parts), *given)
    backward = replace(backward, ops=(), inputs=inputs)
    return forward, replace(backward, ops=tuple(_without(ops, led, backward.outputs)))


def _without(ops: Sequence[Op], unread: set[str], outputs: Collection[str]) -> list[Op]:
    """``ops`` without those that only made what is ``unread`` now."""
    left: list[Op] = []
    read = set(outputs)
    for op in reversed(ops):
        makes = op.kind in ("compute", "view") and bool(op.writes)
        if makes and unread.issuperset(op.writes) and read.isdisjoint(op.writes):
            unread = unread | set(op.reads)
        else:
            left.append(op)
            read.update(op.reads)
    return left[::-1]


def _gathers(program: Program, fqns: Collection[str]) -> dict[int, Op]:
    """The gathers of nothing but ``fqns``, by position."""
    gathers = (
        (i, op, program.sent[op.name].fqns) for i, op in program.starts() if op.sends == "gather"
    )
    known = set(fqns)
    return {i: op for i, op, sent in gathers if sent and known.issuperset(sent)}
