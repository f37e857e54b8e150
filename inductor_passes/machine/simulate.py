"""Run a program on paper: one compute lane, one communication lane per group; and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inductor_passes.ir.program import Program
from inductor_passes.machine.cost import CostModel

USES = ("activations", "gathered parameters", "full gradients", "gradient shards")


class Span(NamedTuple):
    """When an op ran. A collective's span is that of its transfer on the lane."""

    op: str  # its name
    lane: str  # ``"compute"`` or the group of the collective
    begin_us: float  # from the start of the program
    end_us: float  # likewise


@dataclass(frozen=True)
class Timeline:
    """Times of a simulated run."""

    spans: tuple[Span, ...]  # of compute ops and collectives, in program order
    exposed_us: dict[str, float]  # per start op, how long the compute lane stood still in its waits
    # End of the last op on the compute lane: the sum of compute, slowed and exposed times.
    total_us: float
    compute_us: float  # sum over compute ops, if nothing were in transfer
    wire_us: float  # sum over collectives
    slowed_us: float = 0.0  # how much longer compute ops took because of transfers beside them

    @property
    def stalled_us(self) -> float:
        """Sum of the exposed times."""
        return sum(self.exposed_us.values())


def slowed_us(
    us: Any,
    in_transfer_us: Any,
    compute_beside: float,
    later: Callable[..., Any] = max,
    sooner: Callable[..., Any] = min,
) -> Any:
    """How much longer a compute op of ``us`` takes because something is in transfer at its start.

    For the first ``in_transfer_us`` (below 0 counts as 0), compute has only the fraction
    ``compute_beside`` of its speed.
    """
    beside = sooner(later(us * 0.0, in_transfer_us), us / compute_beside)
    return beside * (1 - compute_beside)


def run(
    program: Program,
    us: Callable[[int], Any],
    compute_beside: float,
    now: Any = 0.0,
    later: Callable[..., Any] = max,
    sooner: Callable[..., Any] = min,
) -> Iterator[tuple[int, int, Any, Any]]:
    """Execute ``program`` in its order: launches cost nothing, lanes run one transfer at a time.

    Times are numbers; or tensors with a number for each of many machines or sizes, if ``now`` and
    the results of ``us`` are tensors, and ``later`` and ``sooner`` take tensors.

    Args:
        program: the program.
        us: the time of a compute op by itself, or of a transfer, by the op's position.
        compute_beside: see :class:`~inductor_passes.machine.cost.CostModel`.
        now: the time at the start.
        later: the maximum of two times.
        sooner: the minimum of two times.

    Yields:
        Two positions, a begin and an end. For a compute, and for a transfer on its lane, both
        positions are the op's. For a time in which the compute lane stands still (it may be empty),
        they are those of the wait and of the start that is waited for.
    """
    lane_free: dict[str, Any] = {}
    done: dict[int, Any] = {}
    zero = in_transfer_until = now
    for i, op in enumerate(program.ops):
        if op.kind == "compute":
            alone = us(i)
            end = now + alone
            if lane_free:
                in_transfer = in_transfer_until - now
                end = end + slowed_us(alone, in_transfer, compute_beside, later, sooner)
            yield i, i, now, end
            now = end
        elif op.collective is not None:
            begin = later(now, lane_free.get(op.collective.group, zero))
            done[i] = lane_free[op.collective.group] = begin + us(i)
            in_transfer_until = later(in_transfer_until, done[i])
            yield i, i, begin, done[i]
        elif op.kind == "wait":
            for start in program.start_of[i]:
                end = later(now, done[start])
                yield i, start, now, end
                now = end


def total_us(program: Program, cost: CostModel) -> float:
    """The total time that :func:`simulate` would give ``program``, without the rest."""
    us, total = alone_us(program, cost).__getitem__, 0.0
    for i, _, _, end in run(program, us, cost.compute_beside):
        if program.ops[i].collective is None:
            total = end
    return total


def alone_us(program: Program, cost: CostModel) -> list[float]:
    """Time of each op by itself; views and waits take none."""
    return [
        cost.collective_us(op.collective)
        if op.collective is not None
        else cost.compute_us(program, op)
        if op.kind == "compute"
        else 0.0
        for op in program.ops
    ]


def simulate(program: Program, cost: CostModel) -> Timeline:
    """The times of a :func:`run` of ``program`` by a cost model."""
    ops, took = program.ops, alone_us(program, cost)
    total = compute = wire = slowed = 0.0
    exposed: dict[str, float] = {op.name: 0.0 for _, op in program.starts()}
    spans: list[Span] = []
    for i, start, begin, end in run(program, took.__getitem__, cost.compute_beside):
        op = ops[i]
        if op.kind == "wait":
            exposed[ops[start].name] += end - begin
            total = end
        elif op.collective is not None:
            spans.append(Span(op.name, op.collective.group, begin, end))
            wire += end - begin
        else:
            spans.append(Span(op.name, "compute", begin, end))
            compute, slowed, total = compute + took[i], slowed + end - (begin + took[i]), end
    return Timeline(tuple(spans), exposed, total, compute, wire, slowed)


@dataclass(frozen=True)
class Memory:
    """Live bytes during each op, and what is resident throughout."""

    live_nbytes: tuple[int, ...]  # per op, with inputs that may be freed, without resident inputs
    resident_nbytes: int  # bytes of inputs that the caller keeps
    peak_nbytes: int  # largest of ``live_nbytes``, plus the resident bytes
    peak_op: str  # name of the op at the peak; empty for a program without ops


def touched(program: Program) -> list[list[str]]:
    """The storages that each op needs alive, without repetition.

    A collective needs its inputs and outputs until its last wait; so that wait touches them, too.
    """
    last = {start: waits[-1] for start, waits in program.waits_of.items() if waits}
    found = []
    for i, op in enumerate(program.ops):
        names = [*op.reads, *op.writes]
        for start in (s for s in program.start_of.get(i, ()) if last[s] == i):
            names += [*program.ops[start].reads, *program.ops[start].writes]
        found.append(list(dict.fromkeys([program.storage[name] for name in names])))
    return found


def lifetimes(program: Program) -> dict[str, tuple[int, int]]:
    """Positions of the first and the last op during which each storage is alive. A storage is freed
    after the last op that touches it. Inputs that the caller keeps are left out.

    The output of a gather lives from its start to the last use of any view of it; the input of a
    collective lives until the wait; an input that nothing touches is never freed.
    """
    resident, end = program.storages(program.resident), max(0, len(program.ops) - 1)
    storage = program.storage
    first = dict.fromkeys(program.storages(program.inputs), 0)
    last = dict.fromkeys(first, end)
    for i, op in enumerate(program.ops):
        for name in (*op.reads, *op.writes):
            first.setdefault(storage[name], i)
            last[storage[name]] = i
    for start, waits in program.waits_of.items():
        for name in (*program.ops[start].reads, *program.ops[start].writes) if waits else ():
            last[storage[name]] = max(last[storage[name]], waits[-1])
    last.update(dict.fromkeys(program.storages(program.outputs) & last.keys(), end))
    return {name: (first[name], last[name]) for name in first.keys() - resident}


def memory(program: Program) -> Memory:
    """Live bytes over ``program``, see :func:`lifetimes`."""
    size = program.storage_nbytes
    changes = [0] * (max(1, len(program.ops)) + 1)
    for storage, (first, last) in lifetimes(program).items():
        changes[first] += size[storage]
        changes[last + 1] -= size[storage]
    live = list(itertools.accumulate(changes[:-1]))
    at_rest = sum(size[storage] for storage in program.storages(program.resident))
    peak = max(range(len(live)), key=live.__getitem__)
    if not program.ops:
        return Memory((), at_rest, at_rest + live[peak], "")
    return Memory(tuple(live), at_rest, at_rest + live[peak], program.ops[peak].name)


def live_at_peak(program: Program) -> dict[str, int]:
    """Bytes of each storage that is alive at the peak, without resident inputs."""
    at = program.index.get(memory(program).peak_op, 0)
    alive = lifetimes(program).items()
    size = program.storage_nbytes
    return {s: size[s] for s, (first, last) in sorted(alive) if first <= at <= last}


_GATHERED = "gathered parameters"
# Of what is made of nothing else: a cast of a shard, a part of what was gathered.
_MADE_OF_ITS_LIKE = {"gradient shards", _GATHERED}


def live_by_use(program: Program) -> dict[str, int]:
    """Bytes of :func:`live_at_peak` by use, of :data:`USES`; "activations" are all others."""
    # Inputs that are written to and returned: gradients that accumulate over backwards.
    written = {name for op in program.ops for name in op.writes} & set(program.inputs)
    use = dict.fromkeys(program.storages(written & set(program.outputs)), "full gradients")
    given = program.storages(set(program.inputs) - program.resident)
    for op in program.ops:
        reads, writes = map(program.storages, (op.reads, op.writes))
        if op.sends == "gather":
            # And the parts that forward has left for a gather of backward.
            use.update(dict.fromkeys([*writes, *(s for s in reads if s in given)], _GATHERED))
        elif op.sends in ("reduce", "all_reduce"):
            for storage in reads:  # not if it is the result of an earlier reduce
                use.setdefault(storage, "full gradients")
            use.update(dict.fromkeys(writes, "gradient shards"))
        elif len(of := {use.get(s, "") for s in reads}) == 1 and of <= _MADE_OF_ITS_LIKE:
            use.update(dict.fromkeys(writes, of.pop()))
    return sum_by_use(live_at_peak(program), use)


def sum_by_use(live: Mapping[str, int], use: Mapping[str, str]) -> dict[str, int]:
    """Bytes by use, from the bytes of each storage and the use of each."""
    found = dict.fromkeys(USES, 0)
    for storage, nbytes in live.items():
        found[use.get(storage, "activations")] += nbytes
    return found
