"""``Program``: the one representation that planning, ordering, simulation and inspection share.

A program is a list of ops over buffers, for one forward or backward graph. It says what depends
on what and what communicates. What an op costs is the business of a cost model, and how an op is
executed is that of the backend it was read from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal

from inductor_passes.ir.positions import by_key, moved

Kind = Literal["compute", "view", "start", "wait"]
CollectiveKind = Literal["gather", "reduce", "all_reduce", "other"]
KINDS: tuple[Kind, ...] = ("compute", "view", "start", "wait")
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = ("gather", "reduce", "all_reduce", "other")


class ProgramError(ValueError):
    """A program, or a change of one, that breaks a rule; the message names the op."""


@dataclass(frozen=True)
class Buffer:
    """A tensor."""

    name: str  # unique in its program
    nbytes: int  # its bytes; of the first buffer on a storage, the bytes of that storage
    storage: str = ""  # name of the buffer whose memory this one is a view of; its own name if none
    itemsize: int = 1  # bytes of an element

    def __post_init__(self) -> None:
        if not self.storage:
            object.__setattr__(self, "storage", self.name)


@dataclass(frozen=True)
class Collective:
    """What a start op sends."""

    # ``"gather"``, ``"reduce"`` (a reduce-scatter) and ``"all_reduce"`` are data parallelism's;
    # ``"other"`` is anybody else's, and is never merged.
    kind: CollectiveKind
    # Name of the process group, which is also its communication lane. Names may differ between
    # ranks: compare them, print them, but never sort by them.
    group: str
    ranks: int  # size of the group
    nbytes: int  # bytes of the full (gathered, or not yet scattered) tensors, the same on all ranks
    dtype: str  # of the tensors on the wire
    reduce_op: str = ""  # ``"sum"`` or ``"avg"``; empty for a gather
    # The parameters whose shards or gradients it carries, in their order on the wire.
    fqns: tuple[str, ...] = ()
    bucket: str = ""  # label that members of one bucket share; empty if the planner made none
    window: int = 0  # see :class:`Bucket`
    # Number of tensors that are launched together but sent separately, as in a coalesced bucket; 1
    # for a single buffer.
    members: int = 1


@dataclass(frozen=True)
class Op:
    """One step of a program."""

    name: str  # unique in its program
    # ``"view"`` takes no time and moves no bytes; ``"start"`` launches a collective, and ``"wait"``
    # blocks until the buffers it reads have arrived.
    kind: Kind
    reads: tuple[str, ...]  # names of buffers
    # Names of buffers. One that was written before, or is an input, is mutated in place.
    writes: tuple[str, ...]
    collective: Collective | None = None  # of a start
    # Of computes that run as one piece, a number that they share: no collective is launched or
    # waited for between two of them. 0 for an op by itself.
    unit: int = 0

    @property
    def sends(self) -> CollectiveKind | Literal[""]:
        """Kind of the collective that a start launches; empty for other ops."""
        return self.collective.kind if self.collective is not None else ""


@dataclass(frozen=True)
class Bucket:
    """Collectives that are to be launched as one."""

    label: str  # what the user calls it, a module FQN mostly
    starts: tuple[str, ...]  # names of the start ops, in their order on the wire
    # For gathers, how many buckets are in flight when this one starts; for reduces, how many are
    # pending before this one is waited for. Both count the bucket itself; 0 leaves the number to
    # the policy of :mod:`inductor_passes.transform.order`. A reduce's window may be negative: -n
    # waits just before the n-th next bucket of gathers is first used.
    window: int = 0


@dataclass(frozen=True)
class Program:
    """Ops in the order in which they run."""

    ops: tuple[Op, ...]  # see :class:`Op`
    # By name; each is read or written by an op, or is an input or output.
    buffers: dict[str, Buffer] = field(hash=False)
    inputs: tuple[str, ...] = ()  # buffers that exist before the first op
    # Those inputs that the caller keeps (parameter shards), so never freed.
    resident: frozenset[str] = frozenset()
    outputs: tuple[str, ...] = ()  # buffers that must exist after the last op

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each op."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def writer(self) -> dict[str, int]:
        """Position of the op that first writes each buffer; inputs have none."""
        writers = dict.fromkeys(self.inputs, -1)
        for i, op in enumerate(self.ops):
            for name in op.writes:
                writers.setdefault(name, i)
        return {name: i for name, i in writers.items() if i >= 0}

    @cached_property
    def start_of(self) -> dict[int, tuple[int, ...]]:
        """The starts whose buffers each wait waits for, by position."""
        pending = {b: i for i, op in enumerate(self.ops) if op.kind == "start" for b in op.writes}
        return {
            i: tuple(dict.fromkeys(pending[b] for b in op.reads if b in pending))
            for i, op in enumerate(self.ops)
            if op.kind == "wait"
        }

    @cached_property
    def waits_of(self) -> dict[int, tuple[int, ...]]:
        """The waits of each start, by position."""
        waits: dict[int, list[int]] = {i: [] for i, _ in self.starts()}
        for wait, starts in self.start_of.items():
            for start in starts:
                waits[start].append(wait)
        return {start: tuple(found) for start, found in waits.items()}

    def starts(self) -> Iterator[tuple[int, Op]]:
        """Position and op of each start."""
        return iter(self._starts)

    @cached_property
    def _starts(self) -> list[tuple[int, Op]]:
        return [(i, op) for i, op in enumerate(self.ops) if op.kind == "start"]

    @cached_property
    def sent(self) -> dict[str, Collective]:
        """The collective of each start, by its name."""
        return {op.name: op.collective for _, op in self.starts() if op.collective is not None}

    @cached_property
    def storage(self) -> dict[str, str]:
        """The storage of each buffer."""
        return {name: buffer.storage for name, buffer in self.buffers.items()}

    def storages(self, names: Iterable[str]) -> set[str]:
        """The storages of some buffers."""
        return {self.storage[name] for name in names}

    def first_written(self, i: int) -> set[str]:
        """Storages of the buffers that op ``i`` is the first to write."""
        return self.storages(n for n in self.ops[i].writes if self.writer.get(n) == i)

    @cached_property
    def storage_nbytes(self) -> dict[str, int]:
        """Bytes of each storage; a view that repeats elements may have more bytes than that."""
        return {b.storage: self.buffers[b.storage].nbytes for b in self.buffers.values()}

    def touched_nbytes(self, op: Op) -> int:
        """Bytes of all buffers that ``op`` reads or writes."""
        return sum(self.buffers[name].nbytes for name in {*op.reads, *op.writes})

    @cached_property
    def _overwritten(self) -> list[list[str]]:
        """For each op, the storages of the buffers that it writes but is not the first to write."""
        storage, by = self.storage, self.writer
        return [[storage[n] for n in op.writes if by.get(n) != i] for i, op in enumerate(self.ops)]

    def mutated(self, i: int) -> Iterator[str]:
        """Storages that op ``i`` writes in place."""
        return chain.from_iterable(self._overwritten[j] for j in (i, *self.start_of.get(i, ())))

    @cached_property
    def in_place(self) -> frozenset[str]:
        """Storages that are written in place."""
        return frozenset(chain.from_iterable(self._overwritten))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, positions of the ops that must come before it.

        The writer of what it reads; and, for storages that are mutated in place, the mutation
        and everything that touches the storage keep their order. So do the starts of collectives
        that are not data parallelism's: whoever made them chose their sequence.
        """
        before = self._after_mutations()
        arrival: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            for name in (*op.reads, *op.writes):
                if name in self.writer:
                    before[i][self.writer[name]] = None
                if name in arrival:
                    before[i][arrival[name]] = None
            if op.kind == "wait":
                arrival.update(dict.fromkeys(op.reads, i))
            before[i].pop(i, None)
        for j, i in pairwise(i for i, op in self.starts() if op.sends == "other"):
            before[i][j] = None
        return tuple(map(tuple, before))

    def _after_mutations(self) -> list[dict[int, None]]:
        """For each op, those that must come before it because a storage is written in place."""
        before: list[dict[int, None]] = [{} for _ in self.ops]
        if not self.in_place:
            return before
        mutated = [set(self.mutated(i)) for i in range(len(self.ops))]
        mutation: dict[str, int] = {}
        since: dict[str, list[int]] = {s: [] for s in self.in_place}
        own = [self.storages((*op.reads, *op.writes)) & self.in_place for op in self.ops]
        for i in range(len(self.ops)):
            for storage in sorted(own[i].union(*(own[j] for j in self.start_of.get(i, ())))):
                if storage in mutation:
                    before[i][mutation[storage]] = None
                if storage in mutated[i]:
                    before[i].update(dict.fromkeys(since[storage]))
                    mutation[storage], since[storage] = i, []
                else:
                    since[storage].append(i)
        return before

    def reorder(self, order: Sequence[str]) -> Program:
        """The same program with its ops in another order.

        Raises:
            ProgramError: not a permutation, or an op comes before what it needs.
        """
        if len(order) != len(self.ops) or set(order) != set(self.index):
            counts = Counter((*self.index, *order))
            odd = [n for n in counts if (counts[n], n in self.index) != (2, True)]
            raise ProgramError(f"the new order must name every op once; it does not for {odd[:5]}")
        after = [self.index[name] for name in order]
        place = by_key(after)
        for i, before in enumerate(self.predecessors):
            for j in (j for j in before if place[j] > place[i]):
                one, other = self.ops[i].name, self.ops[j].name
                raise ProgramError(f"{one} is placed before {other}, which it needs")
        return self.permuted(after)

    def permuted(self, after: Sequence[int]) -> Program:
        """The same program with its ops in an order of positions that is known to be legal."""
        program = self.with_ops(map(self.ops.__getitem__, after))
        program.__dict__["start_of"] = moved(self.start_of, by_key(after))
        return program

    def sending(self, change: Callable[[Collective], Collective]) -> Program:
        """The same program with ``change`` applied to the collective of each start."""
        ops = (
            op if op.collective is None else replace(op, collective=change(op.collective))
            for op in self.ops
        )
        return replace(self, ops=tuple(ops))

    def with_ops(self, ops: Iterable[Op]) -> Program:
        """The same program with other ops on its buffers; what is cached of these is kept."""
        after = replace(self, ops=tuple(ops))
        after.__dict__.update(storage=self.storage, storage_nbytes=self.storage_nbytes)
        return after

    def verify(self) -> Program:
        """Check every rule of the representation, and return the program itself.

        Raises:
            ProgramError: with the op or buffer and the rule it breaks.
        """
        _unique("op", [op.name for op in self.ops])
        _unique("input", self.inputs)
        for buffer in self.buffers.values():
            if buffer.nbytes < 0:
                raise ProgramError(f"buffer {buffer.name}: negative size {buffer.nbytes}")
            if buffer.storage not in self.buffers:
                raise ProgramError(f"buffer {buffer.name}: unknown storage {buffer.storage}")
        self._verify_ops()
        _known(self.outputs, set(self.inputs) | set(self.writer), "output")
        _known(sorted(self.resident), set(self.inputs), "resident buffer")
        return self

    def _verify_ops(self) -> None:
        available, pending = set(self.inputs), dict[str, str]()
        _known(self.inputs, self.buffers, "input")
        for op in self.ops:
            if (op.kind == "start") != (op.collective is not None):
                raise ProgramError(f"{op.name}: a start, and only a start, has a collective")
            _known(op.writes, self.buffers, f"{op.name}: buffer")
            _known(op.reads, available, f"{op.name}: buffer to read")
            if op.kind == "wait":
                self._verify_wait(op, pending)
            elif early := next((n for n in (*op.reads, *op.writes) if n in pending), None):
                raise ProgramError(f"{op.name} uses {early} before the wait for {pending[early]}")
            if op.kind == "start":
                pending.update(dict.fromkeys(op.writes, op.name))
            available.update(op.writes)
        if pending:
            name, start = next(iter(pending.items()))
            raise ProgramError(f"{start}: its buffer {name} is never waited for")

    def _verify_wait(self, op: Op, pending: dict[str, str]) -> None:
        for name in op.reads:
            if pending.pop(name, None) is None:
                raise ProgramError(f"{op.name} waits for {name}, which no collective is filling")
        if not self.storages(op.writes) <= self.storages(op.reads):
            raise ProgramError(f"{op.name}: the result of a wait shares its input's storage")


def _unique(what: str, names: Sequence[str]) -> None:
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ProgramError(f"{what} {twice[0]} appears more than once")


def _known(names: Iterable[str], known: Iterable[str], what: str) -> None:
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise ProgramError(f"{what} {missing} does not exist there")
