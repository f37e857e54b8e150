"""A whole training step in two programs: its forward, and its backward with the update.

What is good for the halves is a good place to begin with the whole: a search that begins there has
only the border left to mend, where the first gathers of backward hide behind the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from inductor_passes.ir.buckets import new_label
from inductor_passes.ir.program import Bucket, Op, Program

PlanHalf = Callable[[Program], Sequence[Bucket]]


def border(program: Program) -> int | None:
    """Where backward begins: at the first reduce, or at the first gather of a parameter that was
    gathered before, whichever comes first. None if no parameter is gathered twice, or something is
    in transfer there."""
    seen: set[str] = set()
    begins: list[int] = []
    twice = False
    for i, op in program.starts():
        fqns = set(program.sent[op.name].fqns)
        again = op.sends == "gather" and not seen.isdisjoint(fqns)
        begins += [i] if again or op.sends in ("reduce", "all_reduce") else []
        seen |= fqns if op.sends == "gather" else set()
        twice |= again
    if not twice:
        return None
    waits = (program.waits_of[i] for i, _ in program.starts() if i < begins[0])
    return begins[0] if all(found and found[-1] < begins[0] for found in waits) else None


def halves(program: Program, at: int) -> tuple[Program, Program]:
    """The ops before a position, and those from there on, as programs.

    Nothing may be in transfer there, as in a program that is not planned yet.
    """
    first, second = program.ops[:at], program.ops[at:]
    made = {name for op in first for name in op.writes}
    used = {name for op in second for name in (*op.reads, *op.writes)} | {*program.outputs}
    handed_on = tuple(sorted(made & used))
    given = (name for name in program.inputs if name in used)
    return (
        _part(program, first, program.inputs, handed_on),
        _part(program, second, tuple(dict.fromkeys((*given, *handed_on))), program.outputs),
    )


def _part(
    program: Program, ops: tuple[Op, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Program:
    return replace(
        program,
        ops=ops,
        inputs=inputs,
        outputs=outputs,
        resident=program.resident & set(inputs),
    )


def by_halves(program: Program, plan: PlanHalf) -> list[Bucket]:
    """The buckets of ``program`` whose halves were planned one by one; none if it has no halves."""
    at = border(program)
    parts = () if at is None else halves(program, at)
    if not parts or any(border(half) is not None for half in parts):
        return []
    found: list[Bucket] = []
    for half in parts:
        taken = {bucket.label for bucket in found}
        found += [replace(b, label=new_label(b.label, taken)) for b in plan(half)]
    return found
