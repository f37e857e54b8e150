"""The program that a search tries its plans on: glued, compact, and all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inductor_passes.ir.program import Program
from inductor_passes.machine.cost import CostModel
from inductor_passes.planner.invariant import FixedCost
from inductor_passes.planner.search.compact import compact
from inductor_passes.planner.search.glue import glued
from inductor_passes.planner.search.schedules import Schedules
from inductor_passes.planner.segments import Lines, bare, lines_of

# Collectives are glued together up to this part of the bytes that their kind sends: 1 / UNITS.
UNITS = 48


class Small(NamedTuple):
    """A program with the same plans as a whole one, and as few ops as possible."""

    program: Program  # made by :func:`~inductor_passes.planner.search.compact.compact`
    cost: FixedCost  # of its ops
    # For each collective of the whole program, the name under which the small one launches it; see
    # :func:`~inductor_passes.planner.search.glue.glued`.
    first_of: Mapping[str, str]
    lines: Lines  # of its collectives
    schedules: Schedules  # of it


def small_program(
    program: Program,
    late: Program,
    cost: CostModel,
    fqns: Sequence[str],
    budget_nbytes: float,
    known: Small | None = None,
) -> Small:
    """The small program of ``program`` within a budget.

    Args:
        program: with nothing merged.
        late: the same program, :func:`~inductor_passes.planner.segments.bare`.
        cost: of its ops.
        fqns: of the parameters, in the order in which members travel.
        budget_nbytes: of live bytes.
        known: the small program within another budget; it is returned if it is the same.
    """
    merged, first_of = glued(program, late, fqns, UNITS, budget_nbytes)
    if known is not None and known.first_of == first_of:
        return known
    made, cost_of_made = compact(merged, cost)
    return Small(made, cost_of_made, first_of, lines_of(bare(made)), Schedules(made))
