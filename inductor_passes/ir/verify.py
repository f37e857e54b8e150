"""What a pass must leave as it was, whatever it merged and moved."""

from __future__ import annotations

from collections import Counter

from inductor_passes.ir.program import Program, ProgramError


def verify_unchanged(before: Program, after: Program) -> None:
    """Check that ``after`` communicates and returns what ``before`` did.

    Data dependencies, one wait per start and unique names are rules of every program, checked
    where it is read. Here: bytes and parameters per kind, group and reduce op, the sequence of
    the collectives that are not ours, inputs, in whatever order (a graph's constants have the
    place of their first use), and the number of outputs.

    Raises:
        ProgramError: with the first thing that differs.
    """
    for what, of in (
        ("bytes per kind, group and reduce op", _nbytes),
        ("parameters per kind and group", _parameters),
        ("sequence of other collectives", _others),
        ("inputs", lambda program: Counter[object](program.inputs)),
        ("number of outputs", lambda program: len(program.outputs)),
    ):
        was, now = of(before), of(after)
        if was != now:
            raise ProgramError(f"{what}: was {_differing(was, now)}, became {_differing(now, was)}")


def _differing(one: object, other: object) -> object:
    if isinstance(one, Counter) and isinstance(other, Counter):
        differ = {key: n for key, n in one.items() if n != other[key]}
        return dict(list(differ.items())[:5])
    return one


def _nbytes(program: Program) -> Counter[object]:
    total: Counter[object] = Counter()
    for c in program.sent.values():
        total[c.kind, c.group, c.ranks, c.reduce_op] += c.nbytes
    return total


def _parameters(program: Program) -> Counter[object]:
    return Counter((c.kind, c.group, fqn) for c in program.sent.values() for fqn in c.fqns)


def _others(program: Program) -> list[str]:
    return [name for name, c in program.sent.items() if c.kind == "other"]
