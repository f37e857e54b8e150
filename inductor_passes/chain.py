"""A program reduced to a chain of events: what a planner decides about, and between what.

Compute keeps its order under :func:`~inductor_passes.order.overlap`, so it is a line on which
gathers are first used and gradients become ready. With every gather as late and every reduce
waited for as early as can be, that line is laid bare; what a plan adds to its memory are gathers
that were launched and not yet used, gradients that nobody has waited for, and what launched reduces
leave.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

from inductor_passes.cost import CostModel
from inductor_passes.lineage import dependent, following, origins, reduced_nbytes
from inductor_passes.order import OverlapPolicy, overlap
from inductor_passes.program import Collective, Op, Program
from inductor_passes.simulate import memory

APART = 8


@dataclass(frozen=True)
class Unit:
    """What is planned as one: a collective, or neighbours on the chain.

    Attributes:
        starts: names of the start ops.
        collectives: theirs.
        nbytes: of a gather, what it fills; of a reduce, the gradients that it keeps alive.
        alone: its place depends on other collectives, so it shares a bucket with none.
        then: the all-reduces of what it reduced, by the names of their starts.
        left_nbytes: of a reduce, what it fills, which stays to the end.
        then_nbytes: what is added to that once it was waited for: by ``then``, or by a cast.
    """

    starts: tuple[str, ...]
    collectives: tuple[Collective, ...]
    nbytes: int
    alone: bool
    then: tuple[tuple[str, Collective], ...] = ()
    left_nbytes: int = 0
    then_nbytes: int = 0


@dataclass(frozen=True)
class Event:
    """A point of the chain, or a stretch of it.

    Attributes:
        kind: ``"run"`` computes; ``"use"`` is just before the first use of the next gather,
            ``"made"`` just after the gradients of the next reduce; ``"start"`` and ``"wait"`` are
            those of a collective that is not data parallelism's.
        us: compute time of a run, time on the lane of a start.
        nbytes: most live bytes during a run, or as what was made is sent, without what a plan adds.
        lane: of a start.
        at: of a wait, which of the collectives in flight it waits for, in order of their starts.
        used: gathers that were used first here or before.
        made: reduces that are ready.
    """

    kind: Literal["run", "use", "made", "start", "wait"]
    us: float = 0.0
    nbytes: int = 0
    lane: int = 0
    at: int = 0
    used: int = 0
    made: int = 0


@dataclass(frozen=True)
class Chain:
    """Events in order, and the units they are about.

    Attributes:
        events: see :class:`Event`.
        gathers: in order of first use.
        reduces: in order of readiness, with the all-reduces that follow no reduce.
        lanes: index of the lane of each group.
    """

    events: tuple[Event, ...]
    gathers: tuple[Unit, ...]
    reduces: tuple[Unit, ...]
    lanes: dict[str, int] = field(hash=False)

    @cached_property
    def gathered(self) -> list[int]:
        """Bytes of all gathers before each, and of all."""
        return list(accumulate((unit.nbytes for unit in self.gathers), initial=0))

    @cached_property
    def reduced(self) -> list[int]:
        """Bytes of the gradients of all reduces before each, and of all."""
        return list(accumulate((unit.nbytes for unit in self.reduces), initial=0))

    @cached_property
    def left(self) -> list[int]:
        """Bytes of what all reduces before each leave, and of all."""
        return list(accumulate((unit.left_nbytes for unit in self.reduces), initial=0))

    @cached_property
    def then_left(self) -> list[int]:
        """Bytes that are added once they were waited for, likewise."""
        return list(accumulate((unit.then_nbytes for unit in self.reduces), initial=0))

    def held(self, made: int, launched: int, waited: int) -> int:
        """Bytes of gradients and of what is left of them, by how many reduces are so far."""
        whole = self.reduced[made] - self.reduced[waited]
        return whole + self.left[launched] + self.then_left[waited]


def chain_of(program: Program, cost: CostModel) -> Chain:
    """The chain of a program whose collectives are single."""
    program = program.reorder(overlap(program, OverlapPolicy(1, 1)))
    origin = origins(program)
    follows = following(program, origin)
    groups = dict.fromkeys(op.collective.group for _, op in program.starts() if op.collective)
    lanes = {group: lane for lane, group in enumerate(groups)}
    ours = [(i, op.sends) for i, op in program.starts()]
    gathers = [i for i, kind in ours if kind == "gather"]
    reduces = [i for i, kind in ours if "reduce" in kind and i not in follows]
    events: list[Event] = []
    for event in _events(program, cost, lanes, follows):
        used = events[-1].used if events else 0
        made = events[-1].made if events else 0
        used, made = used + (event.kind == "use"), made + (event.kind == "made")
        events.append(replace(event, used=used, made=made))
    units = _units(program, gathers, reduces, follows, origin)
    return Chain(tuple(_joined_runs(events)), *units, lanes)


def _events(
    program: Program, cost: CostModel, lanes: Mapping[str, int], follows: Mapping[int, int]
) -> Iterator[Event]:
    """The events of a program whose collectives are where they are needed, not yet counted."""
    live = memory(_without_gradients(program)).live_nbytes
    nbytes = program.storage_nbytes
    flying: list[int] = []
    for i, op in enumerate(program.ops):
        c = op.collective
        if op.kind == "compute":
            us = cost.compute_us(program, op)
            # What takes neither time nor bytes may be a shard's pad, which only some ranks have.
            if us or any(nbytes[storage] for storage in program.storages(op.writes)):
                yield Event("run", us=us, nbytes=live[i])
        for start in program.start_of.get(i, ()):
            if start in flying:
                yield Event("wait", at=flying.index(start))
                flying.remove(start)
        if c is not None and c.kind == "other":
            yield Event("run", nbytes=live[i])
            yield Event("start", us=cost.collective_us(c), lane=lanes[c.group])
            flying.append(i)
        elif c is not None and i not in follows:
            yield Event("use" if c.kind == "gather" else "made", nbytes=live[i])


def _without_gradients(program: Program) -> Program:
    """``program`` without what reduces keep alive and what they leave."""
    left = reduced_nbytes(program)
    ops = tuple(replace(op, reads=()) if "reduce" in op.sends else op for op in program.ops)
    buffers = {
        name: replace(buffer, nbytes=0) if buffer.storage in left else buffer
        for name, buffer in program.buffers.items()
    }
    return replace(program, ops=ops, buffers=buffers)


def _joined_runs(events: Sequence[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        if joined and event.kind == joined[-1].kind == "run":
            us, nbytes = joined[-1].us + event.us, max(joined[-1].nbytes, event.nbytes)
            joined[-1] = replace(event, us=us, nbytes=nbytes)
        else:
            joined.append(event)
    return joined


def _units(
    program: Program,
    gathers: Sequence[int],
    reduces: Sequence[int],
    follows: Mapping[int, int],
    origin: Mapping[str, int],
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Units of single gathers and of single reduces."""
    size = program.storage_nbytes
    kept = program.storages((*program.outputs, *program.resident))
    stuck = dependent(program, follows)
    made: dict[int, int] = {}  # of what a reduce left: with a cast it can be more
    for storage, i in origin.items():
        made[i] = max(made.get(i, 0), size[storage])
    after: dict[int, list[Op]] = {}
    for all_reduce, reduce in follows.items():
        after.setdefault(reduce, []).append(program.ops[all_reduce])

    def filled(op: Op) -> int:
        return sum(size[s] for s in program.storages(op.writes))

    def unit(i: int, storages: set[str]) -> Unit:
        op, then = program.ops[i], after.get(i, [])
        left = filled(op) if op.sends == "reduce" else 0
        return Unit(
            starts=(op.name,),
            collectives=(op.collective,) if op.collective else (),
            nbytes=sum(size[s] for s in storages - kept),
            alone=i in stuck or not (op.collective and op.collective.fqns),
            then=tuple((o.name, o.collective) for o in then if o.collective),
            left_nbytes=left,
            then_nbytes=sum(map(filled, then)) if then else max(0, made.get(i, 0) - left),
        )

    def sent(i: int) -> set[str]:
        """Storages that a gather alone keeps: what it makes and, as far as it was cast, sends."""
        reads, writes = map(program.storages, (program.ops[i].reads, program.ops[i].writes))
        return writes if i in stuck else writes | reads - program.storages(program.inputs)

    found_gathers = [unit(i, sent(i)) for i in gathers]
    found_reduces: list[Unit] = []
    seen: set[str] = set()  # gradients that share a storage stay until the last is reduced
    for i in reversed(reduces):
        storages = program.storages(program.ops[i].reads)
        found_reduces.insert(0, unit(i, storages - seen))
        seen |= storages
    return tuple(found_gathers), tuple(found_reduces)


def coarsen(chain: Chain, limit: int, budget_nbytes: float = inf) -> Chain:
    """Join neighbours so that at most about ``2 * limit`` gathers and as many reduces are left.

    Large ones stay as they are, and so do the first and the last few of each kind: what is
    exposed has its place there. So do those that are alive where the budget leaves no room for
    one more pair of joined ones: there they come and go by themselves, or not at all.
    """
    used, made = _joints(chain.gathers, limit), _joints(chain.reduces, limit)
    room = budget_nbytes - _largest(chain.gathered, used) - _largest(chain.reduced, made)
    tight = [
        event
        for event in chain.events
        if event.kind == "run" and event.nbytes + chain.held(*[event.made] * 3) > room
    ]
    used = _parted(used, {event.used for event in tight})
    made = _parted(made, {event.made for event in tight})
    events = []
    for event in chain.events:
        n_used, n_made = bisect_left(used, event.used), bisect_right(made, event.made) - 1
        if event.kind == "use" and used[n_used - 1] != event.used - 1:
            continue
        if event.kind == "made" and made[n_made] != event.made:
            continue
        early = chain.gathered[used[n_used]] - chain.gathered[event.used]
        late = chain.reduced[event.made] - chain.reduced[made[n_made]]
        nbytes = event.nbytes + early + late
        events.append(replace(event, used=n_used, made=n_made, nbytes=nbytes))
    gathers, reduces = _joined(chain.gathers, used), _joined(chain.reduces, made)
    return Chain(tuple(_joined_runs(events)), gathers, reduces, chain.lanes)


def _largest(sums: Sequence[int], joints: Sequence[int]) -> int:
    """Bytes of the largest of joined units, from the bytes before each unit."""
    return max((sums[end] - sums[begin] for begin, end in pairwise(joints)), default=0)


def _parted(joints: Sequence[int], at: Iterable[int]) -> list[int]:
    """``joints`` with the joined units around some counts of units apart."""
    parted = {bisect_left(joints, n) for n in at}
    singles = {i for k in parted if k for i in range(joints[k - 1], joints[k])}
    return sorted(singles.union(joints))


def _joints(units: Sequence[Unit], limit: int) -> list[int]:
    """Where joined units begin, and the end."""
    if len(units) <= 2 * limit:
        return list(range(len(units) + 1))
    nbytes = [sum(c.nbytes for c in unit.collectives) for unit in units]
    most, size = sum(nbytes) / limit, 0
    joints = [0]
    for i in range(1, len(units)):
        size += nbytes[i - 1]
        edge = i <= APART or i >= len(units) - APART
        if edge or units[i].alone or units[i - 1].alone or size + nbytes[i] > most:
            joints.append(i)
            size = 0
    return [*joints, len(units)]


def _joined(units: Sequence[Unit], joints: Sequence[int]) -> tuple[Unit, ...]:
    joined = []
    for begin, end in pairwise(joints):
        parts = units[begin:end]
        starts = tuple(name for unit in parts for name in unit.starts)
        collectives = tuple(c for unit in parts for c in unit.collectives)
        then = tuple(pair for unit in parts for pair in unit.then)
        joined.append(
            Unit(
                starts=starts,
                collectives=collectives,
                nbytes=sum(unit.nbytes for unit in parts),
                alone=parts[0].alone,
                then=then,
                left_nbytes=sum(unit.left_nbytes for unit in parts),
                then_nbytes=sum(unit.then_nbytes for unit in parts),
            )
        )
    return tuple(joined)
