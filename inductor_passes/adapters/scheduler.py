"""Inductor's scheduler nodes <-> a :class:`Program`; they are permuted, never changed.

The scheduler knows the real kernels: fusion is done and memory has been planned by moving nodes,
which undoes what was ordered before. So the planned order is imposed here once more, on top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inductor_passes.adapters import _torch
from inductor_passes.adapters.fx import collective_of
from inductor_passes.ir.program import Buffer, Collective, Op, Program, ProgramError


@dataclass(frozen=True)
class SchedulerReading:
    """A program and where it came from."""

    program: Program  # sizes of buffers are 0: an order needs dependencies and collectives only
    # The scheduler nodes of each op, by its name. Those that name the results of a list-valued
    # start belong to the start.
    snodes: dict[str, tuple[Any, ...]]


def read(snodes: Sequence[Any]) -> SchedulerReading:
    """Read a list of scheduler nodes as a program.

    Raises:
        ProgramError: the nodes break a rule, as by using a result before its wait.
    """
    launched: dict[str, tuple[str, ...]] = {}
    for snode in snodes:
        if _torch.is_scheduled_start(snode):
            launched |= _torch.scheduled_mutations(snode)
    reads = [_torch.scheduled_reads(snode, launched) for snode in snodes]
    reader = _Reader(_results_of_starts(snodes, reads))
    for snode, names in zip(snodes, reads, strict=True):
        reader.read(snode, names)
    program = Program(tuple(reader.ops), reader.buffers, tuple(reader.inputs))
    return SchedulerReading(
        program.verify(), {name: tuple(found) for name, found in reader.snodes.items()}
    )


def write(reading: SchedulerReading, order: Sequence[str], count: int) -> list[Any]:
    """The scheduler nodes in the order of the named ops.

    Raises:
        ProgramError: not each of the ``count`` nodes that were read comes back once.
    """
    permuted = [snode for name in order for snode in reading.snodes[name]]
    if len(permuted) != count or len({id(snode) for snode in permuted}) != count:
        raise ProgramError(f"{count} scheduler nodes became {len(permuted)}")
    return permuted


def lowered_at(reading: SchedulerReading) -> list[int]:
    """Place of each op among all as they were lowered, before fusion; of fused ones, the first."""
    return [_torch.lowered_at(reading.snodes[op.name][0]) for op in reading.program.ops]


def _results_of_starts(
    snodes: Sequence[Any], reads_of: Sequence[tuple[str, ...]]
) -> dict[str, str]:
    """Start that fills each buffer somebody waits for. A start nobody waits for is not here."""
    owner: dict[str, str] = {}
    used: set[str] = set()
    waited: set[str] = set()
    for snode, reads in zip(snodes, reads_of, strict=True):
        if _torch.is_scheduled_start(snode):
            owner.update(dict.fromkeys(_torch.scheduled_writes(snode), str(snode.get_name())))
        elif _torch.is_scheduled_item(snode) and reads[0] in owner:
            owner.update(dict.fromkeys(_torch.scheduled_writes(snode), owner[reads[0]]))
            continue
        (waited if _torch.is_scheduled_wait(snode) else used).update(reads)
    refused = {owner[name] for name in owner if name in used and name not in waited}
    return {n: start for n, start in owner.items() if n in waited and start not in refused}


class _Reader:
    def __init__(self, results: dict[str, str]) -> None:
        self.start_of = results
        self.results_of: defaultdict[str, list[str]] = defaultdict(list)
        for result, start in results.items():
            self.results_of[start].append(result)
        self.ops: list[Op] = []
        self.snodes: dict[str, list[Any]] = {}
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[str] = []
        self.owner: dict[str, str] = {}  # by the name of the list that a start returns: the start

    def read(self, snode: Any, reads: tuple[str, ...]) -> None:
        name, writes = str(snode.get_name()), _torch.scheduled_writes(snode)
        if _torch.is_scheduled_item(snode) and reads[0] in self.owner:
            self.snodes[self.owner[reads[0]]].append(snode)
            return
        self.snodes[name] = [snode]
        if name in self.results_of:
            self.owner.update(dict.fromkeys(writes, name))
            results = tuple(self.results_of[name])
            self._add(Op(name, "start", reads, results, _collective(snode)))
        elif pending := tuple(n for n in reads if n in self.start_of):
            # A wait also lists the inputs of its collective, which must live as long.
            storage = self.buffers[pending[0]].storage
            self._add(Op(name, "wait", pending, writes), storage)
        else:
            self._add(Op(name, "compute", reads, writes))

    def _add(self, op: Op, storage: str = "") -> None:
        for name in op.reads:
            if name not in self.buffers:
                self.buffers[name] = Buffer(name, 0)
                self.inputs.append(name)
        for name in op.writes:
            self.buffers.setdefault(name, Buffer(name, 0, storage))
        self.ops.append(op)


def _collective(snode: Any) -> Collective:
    starts = [n for n in _torch.origins_of(snode) if _torch.is_collective_start(n)]
    if len(starts) != 1:
        return Collective("other", "", 0, 0, "")
    return collective_of(starts[0], lambda _: None)  # all that we planned is marked
