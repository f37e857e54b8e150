"""Units: the computes of one layer in one direction, which run as one piece.

A whole-graph compiler sees what a model repeats as often as it is repeated. If launches and waits
stand only between units, layers are alike whatever the plan, and one is compiled for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache

from inductor_passes.invariant import following, prepared
from inductor_passes.program import Program


def with_units(program: Program, module_of: Callable[[str], str | None]) -> Program:
    """``program`` with its computes in units.

    What prepares a gather belongs to its launch and what follows a reduce to its wait, so these
    are in no unit.

    Args:
        program: in the order of the model.
        module_of: the repeated module that an op, given by name, belongs to; empty for one outside
            of all of them, None if nobody knows: it goes with what is before it.
    """
    moved = prepared(program) | following(program, ("reduce", "all_reduce"))
    unit, current = 0, None
    ops = list(program.ops)
    for i, op in enumerate(program.ops):
        if op.kind == "compute" and i not in moved:
            module = module_of(op.name)
            if not unit or module not in (None, current):
                unit, current = unit + 1, module
            ops[i] = replace(op, unit=unit)
    return replace(program, ops=tuple(ops))


def repeated_module(modules: Collection[str]) -> Callable[[str], str]:
    """A function that gives the one of ``modules`` that a module's path leads through.

    A path may begin outside of the wrapped model: ``model.layers.3.mlp`` is in ``layers.3``. Of
    several that fit, the longest; none: empty.
    """
    known = frozenset(modules)

    @cache
    def module(path: str) -> str:
        parts = path.split(".")
        ends = range(1, len(parts) + 1)
        found = (".".join(parts[i:j]) for j in ends for i in range(j))
        return max((name for name in found if name in known), key=len, default="")

    return module
