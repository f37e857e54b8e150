"""Which results of a program are ever stored, and where, once a compiler has lowered it.

The rules, which stand for Inductor's without repeating them:

- A cheap elementwise loop over few buffers is repeated by each kernel that reads it. Its result is
  never stored; those kernels read the loop's inputs instead.
- If loops share a kernel (:mod:`inductor_passes.machine.fusion`), a result that is read only in
  that kernel is not stored either.
- An elementwise loop writes over a buffer that its kernel is the last to read, if that buffer has
  as many bytes as the result. A buffer that a collective has written is never written over.

Known to be off: kernels are taken to run where their loops stand in the program.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inductor_passes.ir.program import Op, Program
from inductor_passes.ir.sizes import formula_of
from inductor_passes.machine.fusion import Kernels, Loop
from inductor_passes.machine.simulate import touched


@dataclass(frozen=True)
class RepeatLimits:
    """Limits up to which a loop is repeated; beyond them it is stored. Inductor's on a GPU."""

    reads: int = 4  # buffers read by a loop whose result several ops read
    reads_of_one: int = 8  # buffers read by a loop whose result only one op reads
    ops: int = 30  # operations of a loop whose result several ops read, with those it repeats


def as_stored(
    program: Program,
    loops: Mapping[str, Loop],
    spent: Collection[str] = (),
    limits: RepeatLimits = RepeatLimits(),
) -> Program:
    """``program`` as it lies in memory: results that are not stored have no bytes, and a result
    that is written over a buffer shares the storage of that buffer.

    Args:
        program: in any valid order.
        loops: the compute ops that are loops, by name; the others are kernels.
        spent: inputs that nobody needs after the program has read them, so that they may be written
            over.
        limits: up to which loops are repeated.
    """
    repeated = _Repeated(program, loops, limits)
    read = [repeated.op(op) for op in program.ops]
    lowered = replace(program, ops=tuple(map(repeated.lowered, read)))
    own = {name: loop for name, loop in loops.items() if name not in repeated.names}
    kernels = Kernels(lowered, own)
    gone = repeated.storages | {
        kernels.storage[name]
        for i, op in enumerate(lowered.ops)
        if op.name in own and not own[op.name].stored
        for name in op.writes
        if program.writer.get(name) == i and not kernels.leaves(i, op, name)
    }
    over = _written_over(lowered, kernels, own, gone, spent)
    buffers = {}
    for name, buffer in program.buffers.items():
        nbytes = 0 if buffer.storage in gone else buffer.nbytes
        storage = over.get(buffer.storage, buffer.storage)
        buffers[name] = replace(buffer, nbytes=nbytes, storage=storage)
    return replace(program, ops=tuple(read), buffers=buffers)


@dataclass
class _Tree:
    """Buffers that a kernel reads, and operations it computes, when it repeats a loop."""

    reads: dict[str, None] = field(default_factory=dict)
    ops: int = 1
    heavy: bool = False


class _Repeated:
    """The loops that their readers repeat: ``names`` of the ops, ``storages`` of their results."""

    def __init__(self, program: Program, loops: Mapping[str, Loop], limits: RepeatLimits) -> None:
        self.program, self.loops, self.limits = program, loops, limits
        self.names: set[str] = set()
        self.trees: dict[str, _Tree] = {}
        self.readers = _readers(program)
        self.returned = program.storages(program.outputs)
        for i, op in enumerate(program.ops):
            if op.kind == "view":
                for name in op.writes:
                    if op.reads and op.reads[0] in self.trees:
                        self.trees[name] = self.trees[op.reads[0]]
            elif op.kind == "compute" and self._may_be(i, op):
                tree = self._tree(op)
                if self._is_cheap(op, tree):
                    self.names.add(op.name)
                    self.trees[op.writes[0]] = tree
        made = (op.writes[0] for op in program.ops if op.name in self.names)
        self.storages = program.storages(made)

    def op(self, op: Op) -> Op:
        """``op`` with the reads of the loops that it repeats added to its own."""
        if op.kind != "compute" or op.name in self.names:
            return op
        return replace(op, reads=tuple(dict.fromkeys((*op.reads, *self._tree(op).reads))))

    def lowered(self, op: Op) -> Op:
        """``op``, as :meth:`op` made it, without reads of results that are not stored. An op that
        is repeated elsewhere becomes a view."""
        if op.name in self.names:
            return replace(op, kind="view", reads=())
        reads = tuple(n for n in op.reads if self.program.storage[n] not in self.storages)
        return replace(op, reads=reads)

    def _tree(self, op: Op) -> _Tree:
        loop = self.loops.get(op.name)
        tree = _Tree(heavy=loop is not None and loop.heavy)
        for name in op.reads:
            below = self.trees.get(name)
            if below is None:
                tree.reads[name] = None
                tree.ops += 1  # a load counts as an operation
            else:
                tree.reads.update(below.reads)
                tree.ops += below.ops
                tree.heavy |= below.heavy
        return tree

    def _may_be(self, i: int, op: Op) -> bool:
        """Whether ``op`` is a loop with one result of its own, which only loops read."""
        loop = self.loops.get(op.name)
        if loop is None or loop.reduces or loop.stored or len(op.writes) != 1:
            return False
        (name,) = op.writes
        if self.program.writer.get(name) != i or self.program.storage[name] != name:
            return False
        readers = [self.program.ops[j].name for j in self.readers[name]]
        return name not in self.returned and all(reader in self.loops for reader in readers)

    def _is_cheap(self, op: Op, tree: _Tree) -> bool:
        reads = len(self.program.storages(tree.reads))
        if reads > self.limits.reads_of_one:
            return False
        if len(self.readers[op.writes[0]]) < 2:
            return True
        return not tree.heavy and reads <= self.limits.reads and tree.ops <= self.limits.ops


def _readers(program: Program) -> defaultdict[str, set[int]]:
    """The ops that read each buffer, other than views, directly or through views."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        behind = {i}
        if op.kind == "view":
            behind = set().union(*(found[name] for name in op.writes))
        for name in op.reads:
            found[name] |= behind
    return found


def _written_over(
    program: Program,
    kernels: Kernels,
    loops: Mapping[str, Loop],
    gone: Collection[str],
    spent: Collection[str],
) -> dict[str, str]:
    """For each result that is written over a buffer which was read, the storage of that buffer."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(program.ops):
        if op.name in loops and op.kind == "compute":
            members[kernels.of[i]].append(i)
    ends = {i: group[-1] for group in members.values() for i in group}
    last: dict[str, int] = {}
    for i, storages in enumerate(touched(program)):
        for storage in storages:
            last[storage] = max(last.get(storage, 0), ends.get(i, i))
    left = {*program.outputs, *program.inputs, *program.resident} - {*spent}
    left |= {name for _, op in program.starts() for name in op.writes}
    taken = program.storages(left) | {*gone}
    over: dict[str, str] = {}
    for group in members.values():
        made, read = _made_and_read(program, group)
        dead = [s for s in read if s not in taken and last[s] <= ends[group[0]]]
        new = [s for i, s in made if loops[program.ops[i].name].elementwise and s not in gone]
        for storage, spare in _fitting(program, new, dead):
            over[storage] = over.get(spare, spare)
            taken.add(spare)
    return over


def _fitting(
    program: Program, new: Iterable[str], dead: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Pairs of a new storage and the dead one it takes: the first of the same :func:`_room` that no
    other has taken. New storages for which there is none are left out."""
    free: defaultdict[Hashable, deque[str]] = defaultdict(deque)
    for storage in dead:
        free[_room(program, storage)].append(storage)
    for storage in new:
        if fitting := free[_room(program, storage)]:
            yield storage, fitting.popleft()


def _made_and_read(
    program: Program, group: Sequence[int]
) -> tuple[list[tuple[int, str]], list[str]]:
    """For ops that share a kernel: pairs of an op and a storage that it makes; and the storages
    that the kernel reads but does not make."""
    made = [(i, storage) for i in group for storage in sorted(program.first_written(i))]
    own = {storage for _, storage in made}
    read = dict.fromkeys(program.storage[n] for i in group for n in program.ops[i].reads)
    return made, [storage for storage in read if storage not in own]


def _room(program: Program, storage: str) -> Hashable:
    """A key that is equal for storages with the same bytes, at any open sizes, and the same bytes
    per element. It compares plain numbers and formulas, so nothing is noted."""
    nbytes = program.storage_nbytes[storage]
    return program.buffers[storage].itemsize, int(nbytes), formula_of(nbytes)
