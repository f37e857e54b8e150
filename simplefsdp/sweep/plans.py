"""The candidate plans of a sweep, made once for all cells; each cell gets the best of them.

Candidates are regular plans (:mod:`inductor_passes.planner.regular`), from which the automatic
planner's search starts. The search itself is left out, as it would take seconds per cell.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.ir.buckets import assign_by_module
from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.machine.grid import OpenProgram
from inductor_passes.planner.plan import scheduled
from inductor_passes.planner.regular import few_shapes, regular
from inductor_passes.planner.segments import bare, lines_of, named_buckets
from inductor_passes.transform.windows import buckets_by_module
from simplefsdp.choices import Bucketing
from simplefsdp.sweep.traced import OpenGraph, OpenStep

SWEEP_PLANS: tuple[Bucketing, ...] = ("auto", "manual", "none")


def plans_of(step: OpenStep, graph: OpenGraph, bucketing: Bucketing) -> list[OpenProgram]:
    """The candidate plans of a graph. The first is the reference for the others: it has one bucket
    per module; or each collective by itself, if collectives of a module depend on each other so
    that they cannot share a bucket. Only ``"auto"`` has further candidates.
    """
    program = graph.program
    if bucketing == "none":
        return [OpenProgram(program, graph.work, step.symbols)]
    by_module = buckets_by_module(program, assign_by_module(list(step.fqns)))
    shapes: list[Sequence[Bucket]] = [by_module]
    if bucketing == "auto":
        lines = lines_of(bare(program))
        shapes += [
            named_buckets(regular(shape, lines), lines, step.fqns)
            for shape in few_shapes(len({bucket.label for bucket in by_module}))
        ]
    found = [_scheduled(program, buckets) for buckets in shapes]
    found[0] = found[0] or program
    return [OpenProgram(p, graph.work, step.symbols) for p in found if p is not None]


def _scheduled(program: Program, buckets: Sequence[Bucket]) -> Program | None:
    try:
        return scheduled(program, buckets)
    except ProgramError:  # members of a bucket depend on each other
        return None
