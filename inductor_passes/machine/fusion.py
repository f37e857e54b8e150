"""Which bytes reach memory once a compiler has fused a program's loops.

The rule, which stands for Inductor's without repeating it:

- A *kernel* (matmul, attention, sort, collective) reads its inputs from memory and writes its
  results there. A *loop* (pointwise, copy, indexing, reduction) may share a kernel with others.
- Loops share a kernel if no kernel has to run between them and their iterations fit: a pointwise
  result goes into any loop that reads it; the result of a reduction goes into loops over that
  result, and, if it reduces the last dimension, into loops over its input (norms, softmax); two
  loops that read one buffer go together if they have equally many iterations. A reduction of the
  last dimension never shares a kernel with a reduction of other dimensions or of all.
- A loop runs as late as its readers allow: what backward recomputes from saved tensors is
  computed in the kernel that uses it.
- Within a shared kernel, a result that is read only there takes no bytes, and a buffer is read
  once. A result that another kernel reads, or that is returned, is written once.
- Views are free, and a view reads no more than its own bytes, nor more than its storage has.
  Indexing reads as many bytes of its table as it returns; writing by index touches the bytes that
  it writes, or copies the whole buffer if the old value is still needed.

Known to be off: Inductor duplicates a pointwise op into several kernels where we let them share
one (we count its reads once); it refuses fusions over sizes and strides that we accept; and a
buffer that is still in a cache is paid for as if it were not.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inductor_passes.ir.program import Op, Program
from inductor_passes.ir.sizes import least

_UNLIMITED = sys.maxsize
Reduces = Literal["", "inner", "outer"]


@dataclass(frozen=True)
class Loop:
    """An op that can share a kernel with others."""

    numel: int  # iterations: elements of the result, or of what is reduced
    result_numel: int  # elements of the result
    # A reduction is ``"inner"`` if it is over the last dimension but not over all of them, else
    # ``"outer"``; empty for other loops.
    reduces: Reduces = ""
    elementwise: bool = False  # each element of the result is made of those at the same index
    heavy: bool = False  # takes long, so is not to be repeated
    stored: bool = False  # the result is stored even if nobody reads it outside of its kernel

    def goes_into(self, reader: Loop) -> bool:
        """Whether a loop that reads the result can run in the same kernel."""
        if not self.reduces or reader.numel == self.result_numel:
            return True
        return self.reduces == "inner" and reader.numel == self.numel


@dataclass(frozen=True)
class Traffic:
    """What one op adds to the kernel that it runs in."""

    nbytes: int  # read from and written to memory
    kernels: int  # 1 for the first op of a kernel, else 0


def traffic_of(
    program: Program, loops: Mapping[str, Loop], touches: Mapping[str, int]
) -> dict[str, Traffic]:
    """Memory traffic of each compute op once loops are fused.

    Args:
        program: in any valid order.
        loops: the compute ops that are loops, by name; the others are kernels.
        touches: for ops that index, by name: most bytes that the op touches of any one buffer.
    """
    kernels = Kernels(program, loops)
    found: dict[str, Traffic] = {}
    launched: set[int] = set()
    for i, op in enumerate(program.ops):
        if op.kind == "compute":
            kernel, limit = kernels.of[i], touches.get(op.name, _UNLIMITED)
            nbytes = kernels.read(i, op, limit) + kernels.written(i, op, limit)
            found[op.name] = Traffic(nbytes, int(kernel not in launched))
            launched.add(kernel)
    return found


class Kernels:
    """Which ops share a kernel, and what their kernels have read so far.

    ``of`` holds a number per op, equal for ops that share a kernel; a view's number is not used.
    """

    def __init__(self, program: Program, loops: Mapping[str, Loop]) -> None:
        self.program, self.loops = program, loops
        self.storage = program.storage
        self.of = self._share()
        self.readers: defaultdict[str, set[int]] = defaultdict(set)
        for i, op in enumerate(program.ops):
            if op.kind != "view":
                for name in op.reads:
                    self.readers[self.storage[name]].add(self.of[i])
        self.returned = program.storages(program.outputs)
        self.held: defaultdict[int, set[str]] = defaultdict(set)
        self.paid: defaultdict[tuple[int, str], int] = defaultdict(int)

    def read(self, i: int, op: Op, limit: int) -> int:
        """Bytes that ``op`` reads from memory, beyond what its kernel has read or made."""
        held, nbytes = self.held[self.of[i]], 0
        for name in dict.fromkeys(op.reads):
            storage = self.storage[name]
            if name not in held and storage not in held:
                key = (self.of[i], storage)
                rest = self.program.buffers[storage].nbytes - self.paid[key]
                more = least(self.program.buffers[name].nbytes, limit, rest)
                self.paid[key] += more
                nbytes += more
                held.add(name)
        return nbytes

    def written(self, i: int, op: Op, limit: int) -> int:
        """Bytes that ``op`` writes to memory: what another kernel, or the caller, reads."""
        made = [name for name in op.writes if self.program.writer.get(name) == i]
        size = {name: least(self.program.buffers[name].nbytes, limit) for name in op.writes}
        updated = sum(size[name] for name in op.writes if name not in made)
        self.held[self.of[i]].update(self.storage[name] for name in made)
        # The result of an op that writes in place is the buffer it wrote to: count it once.
        return updated or sum(size[name] for name in made if self.leaves(i, op, name))

    def leaves(self, i: int, op: Op, name: str) -> bool:
        """Whether a result of ``op`` is needed outside its kernel."""
        storage = self.storage[name]
        elsewhere = bool(self.readers[storage] - {self.of[i]}) or storage in self.returned
        return elsewhere or op.name not in self.loops

    def _share(self) -> list[int]:
        """The kernel of each op: loops are joined, pairs without a reduction across rows first.

        Whether a kernel reads along rows or across them decides how it runs: it cannot do both.
        """
        of = list(range(len(self.program.ops)))
        members = {i: [i] for i in of}
        loops = [self.loops.get(op.name) for op in self.program.ops]
        reduces = [loop.reduces if loop else "" for loop in loops]
        pairs = sorted(
            self._pairs(), key=lambda pair: "outer" in (reduces[pair[0]], reduces[pair[1]])
        )
        for j, i in pairs:
            into, gone = of[j], of[i]
            kinds = {reduces[into], reduces[gone]} - {""}
            if into != gone and len(kinds) < 2:
                reduces[into] = next(iter(kinds), "")
                for member in members[gone]:
                    of[member] = into
                members[into] += members.pop(gone)
        return of

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Loops that could share a kernel: maker and reader, or two readers of one buffer."""
        makers = _makers(self.program)
        levels = _levels(self.program, self.loops, makers)
        reader: dict[tuple[str, int], int] = {}
        for i, op in enumerate(self.program.ops):
            loop = self.loops.get(op.name)
            if loop is not None:
                shares = [(self.storage[name], loop.numel) for name in op.reads]
                before = makers[i] + [reader[share] for share in shares if share in reader]
                reader.update(dict.fromkeys(shares, i))
                yield from (
                    (j, i)
                    for j in before
                    if levels[j] == levels[i] and self.program.ops[j].name in self.loops
                )


def _makers(program: Program) -> list[list[int]]:
    """For each op, the ops that last wrote the storages it reads; views are looked through."""
    last: dict[str, int] = {}
    found = []
    for i, op in enumerate(program.ops):
        storages = dict.fromkeys(program.storage[name] for name in op.reads)
        found.append([last[storage] for storage in storages if storage in last])
        if op.kind != "view":
            last.update((program.storage[name], i) for name in op.writes)
    return found


def _levels(
    program: Program, loops: Mapping[str, Loop], makers: Sequence[Sequence[int]]
) -> list[int]:
    """How many kernels and collectives must come before each op; loops are as late as they may be.

    Of two loops at one level, no path from the first to the second passes a kernel, or a loop
    that could not share theirs.
    """
    ops = program.ops

    def gap(j: int, i: int) -> int:
        made, reader = loops.get(ops[j].name), loops.get(ops[i].name)
        if made is None:
            return int(ops[j].kind != "view")
        return int(reader is not None and not made.goes_into(reader))

    before = [
        [(j, gap(j, i)) for j in {*program.predecessors[i], *makers[i]}] for i in range(len(ops))
    ]
    levels: list[int] = []
    for edges in before:
        levels.append(max((levels[j] + steps for j, steps in edges), default=0))
    latest: dict[int, int] = {}
    for i in reversed(range(len(ops))):
        if ops[i].kind == "view" or ops[i].name in loops:
            levels[i] = latest.get(i, levels[i])
        for j, steps in before[i]:
            latest[j] = min(latest.get(j, levels[i] - steps), levels[i] - steps)
    return levels
