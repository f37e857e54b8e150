"""A program with the same plans and a tenth of the ops, on which plans are tried.

Compute between two places where a plan can launch or wait for something becomes one op, and views,
which take no time, are dropped. A plan takes the same time and memory in the compact program,
except (slightly) if there are all-reduces, which may be launched within a run, or collectives of
others, which count as compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from inductor_passes.ir.program import Buffer, Op, Program
from inductor_passes.machine.bound import moving
from inductor_passes.machine.cost import CostModel
from inductor_passes.machine.simulate import alone_us, lifetimes, memory, touched
from inductor_passes.planner.invariant import FixedCost
from inductor_passes.planner.segments import bare
from inductor_passes.transform.needs import followers_of


def compact(program: Program, cost: CostModel) -> tuple[Program, FixedCost]:
    """``program`` and its cost with as few ops as a plan can tell apart.

    Args:
        program: with nothing merged, or only what :mod:`inductor_passes.planner.search.glue` keeps
            together.
        cost: of its ops.
    """
    # Gathers are waited for at their uses, and reduces launched when they are ready: so every
    # place where a plan can launch or wait lies between two runs.
    late = bare(program)
    sides = _Sides(late)
    runs = _Runs(late, cost, sides)

    def is_plain(i: int) -> bool:
        kind = late.ops[i].kind
        plain = i in sides.in_turn or (kind in ("compute", "view") and i not in sides.moving)
        return plain and late.in_place.isdisjoint(sides.touched[i])

    kept = (i for i in range(len(late.ops)) if i not in sides.gone)
    for plain, run in groupby(kept, is_plain):
        members = list(run)
        if plain:
            runs.add(members[0], members[-1] + 1)
        else:
            for i in members:
                runs.keep(i)
    return runs.program(), FixedCost(runs.op_us, cost)


class _Sides:
    """Ops that serve only one start, and so go with that start or with its wait.

    Attributes:
        touched: storages that each op needs alive.
        moving: ops that keep no place, but go with collectives.
        before: by start, the ops whose results only this start needs.
        behind: by start, the ops that need its result, and nothing of other collectives.
        waits: by start with several waits, all of these, if they wait for nothing else.
        gone: ops that go with others.
        in_turn: starts of somebody else's collectives that are waited for at once, and the waits.
            They count as compute, so transfers slow them here, though not in the whole program,
            where the time of a plan that is found is computed anew.
    """

    def __init__(self, bare: Program) -> None:
        self.bare = bare
        self.touched, self.moving = touched(bare), moving(bare)
        self.before: defaultdict[int, list[int]] = defaultdict(list)
        self.behind: defaultdict[int, list[int]] = defaultdict(list)
        followers = followers_of(bare)
        self.waits = {
            start: waits
            for start, waits in bare.waits_of.items()
            if len(waits) > 1 and all(len(bare.start_of[w]) == 1 for w in waits)
        }
        self._prepare(followers)
        self._follow(followers)
        others = [i for i, op in bare.starts() if op.sends == "other"]
        alone = [i for i in others if bare.waits_of[i] == (i + 1,) and bare.start_of[i + 1] == (i,)]
        self.in_turn = {*alone, *(i + 1 for i in alone)}
        self.gone = {i for found in (*self.before.values(), *self.behind.values()) for i in found}
        self.gone.update(w for waits in self.waits.values() for w in waits[1:])

    def _is_side(self, i: int) -> bool:
        op = self.bare.ops[i]
        plain = op.kind in ("compute", "view") and i in self.moving
        return plain and self.bare.in_place.isdisjoint(self.touched[i])

    def _prepare(self, followers: Sequence[Sequence[int]]) -> None:
        start_of: dict[int, int] = {}
        kept = self.bare.storages(self.bare.outputs)
        for i in reversed(range(len(self.bare.ops))):
            if self.bare.ops[i].sends == "gather":
                start_of[i] = i
            elif self._is_side(i) and followers[i]:
                starts = {start_of.get(j, -1) for j in followers[i]}
                own = kept.isdisjoint(self.bare.storages(self.bare.ops[i].writes))
                if len(starts) == 1 and -1 not in starts and own:
                    start_of[i] = starts.pop()
                    self.before[start_of[i]].insert(0, i)

    def _follow(self, followers: Sequence[Sequence[int]]) -> None:
        start_of: dict[int, int] = {}
        for i in range(len(self.bare.ops)):
            if self.bare.ops[i].kind == "wait":
                waited = self.bare.start_of[i]
                if len(waited) == 1 and self.bare.ops[waited[0]].sends == "reduce":
                    start_of[i] = waited[0]
            elif self._is_side(i) and all(self._is_side(j) for j in followers[i]):
                starts = {start_of.get(j, -1) for j in self.bare.predecessors[i]}
                if len(starts) == 1 and -1 not in starts:
                    start_of[i] = starts.pop()
                    self.behind[start_of[i]].append(i)


class _Runs:
    """The compact program, as it is made.

    Attributes:
        ops: made so far.
        op_us: times of its computes.
        unit_as: by unit that has ops in a run, the unit that it has become.
    """

    def __init__(self, bare: Program, cost: CostModel, sides: _Sides) -> None:
        self.bare, self.sides, self.us = bare, sides, alone_us(bare, cost)
        self.ops: list[Op] = []
        self.op_us: dict[str, float] = {}
        self.scratch: dict[str, Buffer] = {}
        self.unit_as: dict[int, int] = {}
        self.size, self.live = bare.storage_nbytes, memory(bare).live_nbytes
        self.lives = lifetimes(bare)
        self.given, self.kept = bare.storages(bare.inputs), bare.storages(bare.outputs)

    def keep(self, i: int) -> None:
        """Add op ``i`` and the ops that go with it. A view of existing storages is left out."""
        op = self.bare.ops[i]
        if op.kind == "wait":
            self._keep_wait(i)
            return
        reads, writes = self._storages(op.reads), self._storages(op.writes)
        if op.kind == "view" and set(writes) <= set(reads):
            return
        if op.kind == "compute":
            self.op_us[op.name] = self.us[i]
        if op.kind == "start":
            own = self._made(self.sides.before[i])
            reads = tuple(s for s in self._read((*self.sides.before[i], i)) if s not in own)
            writes = (*writes, *own)
        unit = self.unit_as.get(op.unit, op.unit)
        self.ops.append(replace(op, reads=reads, writes=writes, unit=unit))

    def _keep_wait(self, i: int) -> None:
        op, starts = self.bare.ops[i], self.bare.start_of[i]
        reads, behind = self._storages(op.reads), list[int]()
        if len(starts) == 1:
            reads = self._read(self.sides.waits.get(starts[0], (i,)))
            behind = self.sides.behind[starts[0]]
        for start in starts:
            if i == self.sides.waits.get(start, self.bare.waits_of[start][-1:])[0]:
                reads = (*reads, *self._made(self.sides.before[start]))
        self.ops.append(replace(op, reads=reads, writes=()))
        if behind:
            own = self._made(behind)
            reads = tuple(s for s in self._read(behind) if s not in own)
            us = sum(self.us[j] for j in behind)
            self._compute(self.bare.ops[behind[-1]].name, us, reads, own)

    def add(self, begin: int, end: int) -> None:
        """Add the ops from ``begin`` to before ``end`` as one; as two, if one would take more
        memory than they do."""
        members = [i for i in range(begin, end) if i not in self.sides.gone]
        made = self._made(members)
        left = [s for s in made if self.lives[s][1] >= end or s in self.kept]
        begun = [s for s in self.sides.touched[begin] if s not in self.given]
        before = self.live[begin] - sum(self.size[s] for s in begun if self.lives[s][0] == begin)
        room = max(self.live[begin:end]) - before - sum(self.size[s] for s in left)
        own = set(made)
        reads = tuple(s for s in self._read(members) if s not in own)
        name = self.bare.ops[members[-1]].name
        unit = self._unit(members)
        if room < 0:  # storages that are read last here are freed before all results are made
            room = max(self.live[begin:end]) - before
            self._compute(f"{name} (reads)", 0.0, reads, self._scratch(name, room), unit)
            reads, room = (), 0
        us = sum(self.us[i] for i in members)
        used_later = all(s not in self.lives or self.lives[s][1] >= end for s in reads)
        if used_later and not (us or left or room):
            return  # views
        self._compute(name, us, reads, (*left, *self._scratch(name, room)), unit)

    def _unit(self, members: Sequence[int]) -> int:
        """The unit of a run. All units with ops in it become that unit, as no plan cuts between
        them."""
        units = dict.fromkeys(self.bare.ops[i].unit for i in members if self.bare.ops[i].unit)
        first = next((self.unit_as.get(unit, unit) for unit in units), 0)
        self.unit_as.update(dict.fromkeys(units, first))
        return first

    def _scratch(self, name: str, nbytes: int) -> tuple[str, ...]:
        """A buffer of ``nbytes`` that is alive only during an op; none for 0 bytes."""
        if nbytes:
            self.scratch[name] = Buffer(f"{name} scratch", nbytes)
        return (f"{name} scratch",) if nbytes else ()

    def _compute(
        self, name: str, us: float, reads: Iterable[str], writes: Iterable[str], unit: int = 0
    ) -> None:
        self.op_us[name] = us
        self.ops.append(Op(name, "compute", tuple(reads), tuple(writes), unit=unit))

    def _made(self, ops: Iterable[int]) -> tuple[str, ...]:
        """Storages that some ops make."""
        storage = self.bare.storage
        written = ((storage[n], i) for i in sorted(set(ops)) for n in self.bare.ops[i].writes)
        new = (s for s, i in written if s not in self.given and self.lives[s][0] == i)
        return tuple(dict.fromkeys(new))

    def _read(self, ops: Iterable[int]) -> tuple[str, ...]:
        return self._storages(n for i in ops for n in self.bare.ops[i].reads)

    def _storages(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.bare.storage.__getitem__, names)))

    def program(self) -> Program:
        """The compact program, of all that was added."""
        buffers = {s: Buffer(s, nbytes) for s, nbytes in self.size.items()}
        buffers |= {buffer.name: buffer for buffer in self.scratch.values()}
        resident = frozenset(self.bare.storages(self.bare.resident))
        inputs, outputs = self._storages(self.bare.inputs), self._storages(self.bare.outputs)
        return _with_few_buffers(Program(tuple(self.ops), buffers, inputs, resident, outputs))


def _with_few_buffers(program: Program) -> Program:
    """``program`` with one buffer in place of all that the same ops read and write. Its ops do not
    read inputs that the caller keeps or that have no bytes. In any order of the ops, as many bytes
    are alive as before."""
    ends = [frozenset(end) for end in (program.inputs, program.resident, program.outputs)]
    in_place = program.in_place  # its order counts, so it stays as it is
    there = {n for n in program.inputs if n in program.resident or not program.buffers[n].nbytes}
    there -= in_place
    ops = [replace(op, reads=tuple(n for n in op.reads if n not in there)) for op in program.ops]
    uses: defaultdict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        for k, names in enumerate((op.reads, op.writes)):
            for name in names:
                uses[name].append(2 * i + k)
    first: dict[object, str] = {}
    nbytes: defaultdict[str, int] = defaultdict(int)
    as_one: dict[str, str] = {}
    for name in [name for name in program.buffers if name in uses or name in ends[0]]:
        alike = name if name in in_place else (*uses[name], *(name in end for end in ends))
        as_one[name] = first.setdefault(alike, name)
        nbytes[as_one[name]] += program.buffers[name].nbytes

    def those(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(as_one[name] for name in names))

    return Program(
        tuple(replace(op, reads=those(op.reads), writes=those(op.writes)) for op in ops),
        {name: Buffer(name, size) for name, size in nbytes.items()},
        those(program.inputs),
        frozenset(those(program.resident)),
        those(program.outputs),
    )
