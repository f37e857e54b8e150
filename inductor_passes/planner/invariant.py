"""What all ranks see of a program: plans are made from this, so that they come out alike.

Shards differ in size between ranks, and so may the ops around them (pads, slices, casts). Here ops
take no time if they only prepare shards for a gather, or only follow the wait for a reduce. (What
follows an all-reduce handles full gradients; it takes no time either, as it moves with the wait.)
Shards of parameters take no bytes, as they are there throughout. Tensors made of them for gathers
to send, and shards of gradients, count as the bytes that are gathered or reduced, divided by the
number of ranks. What remains is full tensors, whose sizes all ranks share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from inductor_passes.ir.lineage import reduced_nbytes
from inductor_passes.ir.program import Collective, Op, Program
from inductor_passes.machine.cost import CostModel, check_compute_beside
from inductor_passes.planner.update import UPDATE, with_one_update


@dataclass(frozen=True)
class FixedCost:
    """Fixed times of compute ops, which no merge changes; collectives by another cost model."""

    op_us: Mapping[str, float]  # of each compute op
    wire: CostModel  # prices the collectives

    @property
    def compute_beside(self) -> float:
        return self.wire.compute_beside

    def compute_us(self, program: Program, op: Op) -> float:
        return self.op_us[op.name]

    def collective_us(self, collective: Collective) -> float:
        return checked_us(collective, self.wire.collective_us(collective))


def checked_us(what: str | Collective, value: object) -> float:
    """``value``, if it is a time.

    Args:
        what: the op, by name, or the collective that takes this time.
        value: as a cost model gave it.

    Raises:
        ValueError: it is None, NaN, infinite, negative or no number.
    """
    if isinstance(value, (int, float)) and isfinite(value) and value >= 0:
        return float(value)
    if isinstance(what, Collective):
        fqns = ", ".join(what.fqns)
        what = f"{what.kind} of {what.nbytes} bytes {what.dtype} on {what.ranks} ranks ({fqns})"
    raise ValueError(
        f"cost model: expected microseconds, a finite number of at least 0, for {what}; got "
        f"{value!r}; mend the cost model or its cluster file"
    )


def rank_invariant(program: Program, cost: CostModel) -> tuple[Program, FixedCost]:
    """The program with the same sizes of shards on all ranks, and its cost without ops on shards.

    Compute times are rounded to three significant digits. (Times of collectives are not: they are
    functions of sizes that all ranks share, and rounding could make a merged one dearer than its
    parts.)

    Raises:
        ValueError: the cost model has no time for an op, or no fraction in ``compute_beside``.
    """
    check_compute_beside(cost)
    program = with_one_update(program)
    local, shard_nbytes = _local(program)
    free = local | following(program, ("all_reduce",))
    op_us = {}
    for i, op in enumerate(program.ops):
        if op.kind == "compute":
            known = op.name != UPDATE and i not in free
            us = checked_us(op.name, cost.compute_us(program, op)) if known else 0.0
            op_us[op.name] = float(f"{us:.3g}")
    buffers = {
        name: replace(buffer, nbytes=shard_nbytes.get(buffer.storage, buffer.nbytes))
        for name, buffer in program.buffers.items()
    }
    return replace(program, buffers=buffers), FixedCost(op_us, cost)


def common_ops(program: Program, cost: CostModel) -> list[int]:
    """Positions of the ops that all ranks have, if ``cost`` is as :func:`rank_invariant` gives it:
    collectives, and computes that take time. Ranks differ in the pads and views of their shards.
    """
    return [
        i
        for i, op in enumerate(program.ops)
        if op.collective is not None or (op.kind == "compute" and cost.compute_us(program, op) > 0)
    ]


def _local(program: Program) -> tuple[set[int], dict[str, int]]:
    """Positions of the ops that handle only shards, and bytes to count for storages of shards."""
    preparing = prepared(program)
    reduced = reduced_nbytes(program)
    shards = program.storages(program.resident)
    local: set[int] = set()
    for i, op in enumerate(program.ops):
        reads, made = program.storages(op.reads), program.first_written(i)
        if op.sends == "reduce" or (reads & reduced.keys() and op.sends in ("", "all_reduce")):
            local.add(i)
        elif not op.sends and (i in preparing or (reads and reads <= shards)):
            shards |= made
            local.add(i)
    sent = _sent_nbytes(program, preparing)
    return local, dict.fromkeys(shards | _shard_inputs(program, local), 0) | sent | reduced


def _sent_nbytes(program: Program, preparing: set[int]) -> dict[str, int]:
    """Bytes on every rank, by storage, of casts that gathers send.

    A rank with a smaller shard also makes a padded copy of it to send. Other ranks do not, so the
    copy is counted on no rank.
    """
    itemsize = {s: program.buffers[s].itemsize for s in program.buffers}
    shard_itemsize = {s: itemsize[s] for s in program.storages(program.inputs)}
    for i in sorted(preparing):
        sources = program.storages(program.ops[i].reads) & shard_itemsize.keys()
        was = max((shard_itemsize[s] for s in sources), default=0)
        for storage in program.first_written(i):
            shard_itemsize.setdefault(storage, was)
    return {
        storage: -(-c.nbytes // c.ranks)
        for name, c in program.sent.items()
        if c.kind == "gather"
        for storage in program.storages(program.ops[program.index[name]].reads)
        if shard_itemsize.get(storage, itemsize[storage]) != itemsize[storage]
    }


def following(program: Program, kinds: Collection[str]) -> set[int]:
    """Positions of the computes, views and waits that depend on collectives of these ``kinds``."""
    left: set[str] = set()
    found: set[int] = set()
    for i, op in enumerate(program.ops):
        if not op.sends and not left.isdisjoint(program.storages(op.reads)):
            found.add(i)
        if i in found or op.sends in kinds:
            left |= program.storages(op.writes)
    return found


def prepared(program: Program) -> set[int]:
    """Positions of the computes and views that depend only on inputs, and whose results only
    gathers need."""
    from_inputs = program.storages(program.inputs)
    of_inputs: set[int] = set()
    for i, op in enumerate(program.ops):
        mutates = any(program.writer.get(name) != i for name in op.writes)
        known = program.storages(op.reads) <= from_inputs
        if op.kind in ("compute", "view") and known and not mutates:
            of_inputs.add(i)
            from_inputs |= program.storages(op.writes)
    found: set[int] = set()
    elsewhere = set(program.outputs)
    read: set[str] = set()
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        useful = read.issuperset(op.writes) and elsewhere.isdisjoint(op.writes)
        gathers = op.sends == "gather"
        if i in of_inputs and op.writes and useful:
            found.add(i)
        elif not gathers:
            elsewhere.update(op.reads)
        read.update(op.reads)
    return found


def _shard_inputs(program: Program, local: set[int]) -> set[str]:
    """Storages of the inputs that only local ops and gathers read, or that nobody reads."""
    alone = program.storages(program.inputs) - program.storages(program.outputs)
    for i, op in enumerate(program.ops):
        if op.sends != "gather" and i not in local:
            alone -= program.storages((*op.reads, *op.writes))
    return alone
