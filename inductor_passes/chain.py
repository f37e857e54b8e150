"""What a planner sees of a program: a chain of compute, cut where collectives are due.

A gather is due at the first use of what it brings, a reduce is ready when its gradient is made.
Between two such events there is compute of known length, and memory that no plan changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import inf, isfinite
from typing import Literal

from inductor_passes.cost import CostModel
from inductor_passes.order import OverlapPolicy, first_uses, overlap
from inductor_passes.program import Buffer, Collective, Op, Program
from inductor_passes.simulate import memory

Side = Literal["gather", "reduce"]
SIDES: tuple[Side, ...] = ("gather", "reduce")


@dataclass(frozen=True)
class Unit:
    """Collectives that no plan parts: one, or those of a module.

    Attributes:
        starts: names of the start ops.
        messages: what each sends, without names: what may be merged is equal but for the bytes.
    """

    starts: tuple[str, ...]
    messages: tuple[Collective, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the full tensors."""
        return sum(m.nbytes for m in self.messages)


@dataclass(frozen=True)
class Event:
    """A unit is due, or ready.

    Attributes:
        kind: ``"gather"``, the next one is used now; ``"reduce"``, the next one's gradient is
            made; ``"begin"``, the program begins.
        work_us: compute until the next event.
        others_us: of it, time of collectives that are not data parallelism's, which the compute
            around them may hide.
        base_nbytes: most bytes alive until the next event if every gather were started when it
            is used, and every reduce done when it is ready.
    """

    kind: Literal["begin", "gather", "reduce"]
    work_us: float
    others_us: float
    base_nbytes: int


@dataclass(frozen=True)
class Chain:
    """A program as planners see it.

    Attributes:
        gathers: in the order of their first uses.
        reduces: in the order in which they are ready.
        events: in order, one per unit after the first, which is the beginning.
        cost: of collectives.
    """

    gathers: tuple[Unit, ...]
    reduces: tuple[Unit, ...]
    events: tuple[Event, ...]
    cost: CostModel

    def transfers(self, kind: Side, begin: int, end: int) -> tuple[tuple[str, float], ...]:
        """Lane and microseconds of each collective that the units ``begin:end`` become."""
        found = self._known.get((kind, begin, end))
        if found is None:
            sums = self._sums[kind]
            found = tuple(
                (message.group, self.cost.collective_us(replace(message, nbytes=n)))
                for message, count, nbytes in sums
                if count[end] > count[begin]
                for n in [nbytes[end] - nbytes[begin]]
            )
            self._known[kind, begin, end] = found
        return found

    @cached_property
    def _known(self) -> dict[tuple[Side, int, int], tuple[tuple[str, float], ...]]:
        return {}

    @cached_property
    def _sums(self) -> dict[Side, list[tuple[Collective, list[int], list[int]]]]:
        return {"gather": _sums_of(self.gathers), "reduce": _sums_of(self.reduces)}


def _sums_of(units: Sequence[Unit]) -> list[tuple[Collective, list[int], list[int]]]:
    """What may be merged, and of it the count and the bytes in the first k units, for each k."""
    kinds = dict.fromkeys(replace(m, nbytes=0) for unit in units for m in unit.messages)
    found = []
    for kind in kinds:
        of_kind = [[m for m in u.messages if replace(m, nbytes=0) == kind] for u in units]
        count = list(accumulate((len(ms) for ms in of_kind), initial=0))
        nbytes = list(accumulate((sum(m.nbytes for m in ms) for ms in of_kind), initial=0))
        found.append((kind, count, nbytes))
    return found


@dataclass(frozen=True)
class KnownCost:
    """Costs that were asked for once, checked, and rounded.

    Attributes:
        op_us: of compute ops, by name.
        model: of collectives.
    """

    op_us: Mapping[str, float]
    model: CostModel
    known: dict[Collective, float] = field(default_factory=dict, compare=False)

    def compute_us(self, program: Program, op: Op) -> float:
        """Of an op of the program that was priced."""
        return self.op_us[op.name]

    def collective_us(self, collective: Collective) -> float:
        """By all but the names."""
        key = replace(collective, fqns=(), bucket="", window=0)
        if key not in self.known:
            what = f"a {key.kind} of {key.nbytes} bytes among {key.ranks} ranks"
            self.known[key] = _checked(self.model.collective_us(key), what)
        return self.known[key]


def _checked(value: object, what: str) -> float:
    if not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise ValueError(
            f"cost model: expected microseconds, 0 or more, for {what}, got {value!r}; mend the "
            "model or the cluster that it was made from"
        )
    return float(value)


def rank_invariant(program: Program, cost: CostModel) -> tuple[Program, KnownCost]:
    """``program`` and its costs without what differs between ranks.

    Shards do, in size: one rank may have a row less, or none. So what is computed from shards
    alone is free here, and takes no memory: before the gather and after the reduce.
    """
    sharded: set[str] = set(program.resident)
    op_us: dict[str, float] = {}
    arriving: dict[str, bool] = {}
    for op in program.ops:
        on_shards = bool(op.reads) and sharded.issuperset(op.reads)
        if op.collective is not None:
            leaves_shards = op.collective.kind == "reduce"
            stays = op.collective.kind == "all_reduce" and on_shards
            arriving.update(dict.fromkeys(op.writes, leaves_shards or stays))
            continue
        if op.kind == "wait":
            on_shards = any(arriving.get(name, False) for name in op.reads)
        if on_shards:
            sharded.update(op.writes)
        if op.kind == "compute":
            us = 0.0 if on_shards else _checked(cost.compute_us(program, op), f"op {op.name}")
            op_us[op.name] = us
    shards = {program.buffers[name].storage for name in sharded} | {
        name for name, comes_sharded in arriving.items() if comes_sharded
    }
    buffers = {
        name: Buffer(name, 0 if b.storage in shards else b.nbytes, b.storage)
        for name, b in program.buffers.items()
    }
    return replace(program, buffers=buffers), KnownCost(op_us, cost)


def chain_of(program: Program, cost: CostModel, *, max_units: int = 400) -> Chain:
    """The chain of a program that :func:`rank_invariant` gave.

    Args:
        program: unmerged.
        cost: of it.
        max_units: of a kind; if there are more, those of a module become one.
    """
    program = program.reorder(overlap(program, OverlapPolicy(1, 0)))
    due = sorted(_due(program), key=lambda found: found[:2])
    gathers, gather_at = _units([d for d in due if d[1] == 1], max_units, first=True)
    reduces, reduce_at = _units([d for d in due if d[1] == 0], max_units, first=False)
    # At the same place what is ready comes before what is used: they are an op apart.
    at = sorted([(p, 1) for p in gather_at] + [(p, 0) for p in reduce_at])
    live = memory(program).live_nbytes
    work = [cost.compute_us(program, o) if o.kind == "compute" else 0.0 for o in program.ops]
    others = list(_others_us(program, cost))
    events = []
    kinds: dict[int, Side] = {0: "reduce", 1: "gather"}
    places = [(0.0, -1), *at]
    for i, (place, kind) in enumerate(places):
        stop = min(places[i + 1][0] if i + 1 < len(places) else inf, len(program.ops))
        begin, end = int(min(place, len(program.ops))), int(stop)
        base = max(live[begin:end], default=0)
        theirs = sum(others[begin:end])
        us = sum(work[begin:end]) + theirs
        events.append(Event(kinds.get(kind, "begin"), us, theirs, base))
    return Chain(gathers, reduces, tuple(events), cost)


Due = tuple[float, int, str, Collective]


def _due(program: Program) -> Iterator[Due]:
    """Where each collective of data parallelism's is due: the op before which it must arrive
    (1), or after which it may leave (0)."""
    used = first_uses(program)
    made = list(range(len(program.ops)))
    after_reduce = set[int]()
    for i, op in enumerate(program.ops):
        before = program.predecessors[i]
        if op.kind == "view":
            made[i] = max((made[j] for j in before), default=-1)
        starts = [program.ops[s].collective for s in program.start_of.get(i, ())]
        reduced = any(c is not None and c.kind == "reduce" for c in starts)
        if reduced or (op.kind != "start" and any(j in after_reduce for j in before)):
            after_reduce.add(i)
        c = op.collective
        if c is None or c.kind == "other" or not c.fqns:
            continue
        if c.kind == "gather":
            yield used[i], 1, op.name, c
        elif not any(j in after_reduce for j in before):
            yield max((made[j] for j in before), default=-1) + 1, 0, op.name, c


def _units(
    due: Sequence[Due], max_units: int, *, first: bool
) -> tuple[tuple[Unit, ...], list[float]]:
    """Units, and where each is due."""

    def module(found: Due) -> str:
        fqn = found[3].fqns[0]
        return fqn.rpartition(".")[0].rpartition(".")[0] or fqn

    by_module = groupby(due, module) if len(due) > max_units else ((None, [d]) for d in due)
    groups = [list(found) for _, found in by_module]
    units = tuple(
        Unit(
            tuple(name for _, _, name, _ in group),
            tuple(replace(c, fqns=(), bucket="", window=0) for *_, c in group),
        )
        for group in groups
    )
    return units, [group[0 if first else -1][0] for group in groups]


def _others_us(program: Program, cost: CostModel) -> Iterator[float]:
    """Time of the collectives that are not ours, where each is waited for."""
    for i in range(len(program.ops)):
        waited = [program.ops[start].collective for start in program.start_of.get(i, ())]
        yield sum(
            cost.collective_us(c)
            for c in waited
            if c is not None and (c.kind == "other" or not c.fqns)
        )
