"""The optimizer's update as one op, in a program of a whole training step.

What follows the reduces in such a program works on shards: it takes no time that ranks share, and
communicates nothing for data parallelism. For a plan it is like one op at the end that reads all
gradients::

    reduce ─ wait ─ divide ─ norm ┐                  reduce ─ wait ┐
    reduce ─ wait ─ divide ─ norm ┴ clip ─ writes    reduce ─ wait ┴ update

Only memory differs: if nothing is clipped, a gradient may be freed before all of them are there.
"""

from __future__ import annotations

from dataclasses import replace

from inductor_passes.ir.program import Buffer, Op, Program

UPDATE = "update of the parameters"


def with_one_update(program: Program) -> Program:
    """``program``; if it writes to buffers that the caller keeps, with one op for the update."""
    kept = program.storages(program.resident)
    if not any(not kept.isdisjoint(program.mutated(i)) for i in range(len(program.ops))):
        return program
    gone = _after_reduces(program)
    made = {name for i in gone for name in program.ops[i].writes}
    reads = {n for i in gone for n in program.ops[i].reads if n not in made}
    used = {n for i, op in enumerate(program.ops) if i not in gone for n in op.reads}
    outputs = tuple(name for name in program.outputs if name not in made)
    ops = [op for i, op in enumerate(program.ops) if i not in gone]
    update = Op(UPDATE, "compute", tuple(sorted(reads)), (UPDATE,))
    known = {*program.inputs, *outputs, *used, *reads, *(n for op in ops for n in op.writes)}
    storages = program.storages(known)
    buffers = {n: b for n, b in program.buffers.items() if n in known or n in storages}
    return replace(
        program,
        ops=(*ops, update),
        buffers=buffers | {UPDATE: Buffer(UPDATE, 0)},
        outputs=(*outputs, UPDATE),
    )


def _after_reduces(program: Program) -> set[int]:
    """Positions of the ops that follow reduces or write to what the caller keeps, and that no
    data-parallel collective needs."""
    kept = program.storages(program.resident)
    needed: set[int] = set()
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        if i in needed or op.sends in ("gather", "reduce", "all_reduce"):
            needed.update(program.predecessors[i])
    sent = {i for i, op in program.starts() if op.sends in ("reduce", "all_reduce")}
    waits = {wait for i in sent for wait in program.waits_of[i]}
    after: set[int] = set()
    for i, op in enumerate(program.ops):
        follows = any(j in after or j in waits for j in program.predecessors[i])
        writes = not kept.isdisjoint(program.mutated(i))
        if (follows or writes) and not op.sends.endswith(("gather", "reduce")):
            after.add(i)
    return after - needed - waits
