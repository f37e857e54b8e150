"""For which sizes a plan that was made at one size holds.

A graph with open (symbolic) sizes is planned once, and runs with the same buckets and order at
every size. The time and memory that it takes at another size follow from the formulas of its
numbers (:mod:`inductor_passes.ir.sizes`); nothing is traced or planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import sympy

from inductor_passes.adapters import _torch
from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.ir.cells import Formulas, SizedProgram, Symbols
from inductor_passes.ir.sizes import formula_of, noted
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cluster import Cluster, ClusterCost, Work
from inductor_passes.machine.grid import OpenProgram, Peaks
from inductor_passes.machine.simulate import simulate
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.rehearsal import Rehearsal, Settings, arranged
from inductor_passes.transform.portable import in_program

ENDLESS = 1 << 24
"""Upper end of the sizes that are looked at."""
NEAR = 1.05
_FREE = Work(kind="view", kernels=0)


class OpenSize(NamedTuple):
    """A size that was left open when a graph was traced."""

    symbol: sympy.Symbol  # stands for the size in formulas
    name: str  # what it is to the user: ``"L['tokens'].size()[0]"``
    hint: int  # what it was when the graph was traced
    least: int  # the smallest for which the graph is run
    most: int  # the largest, at most :data:`ENDLESS`


class SizeSpan(NamedTuple):
    """Sizes, both ends included."""

    least: int
    most: int


class SizeRange(NamedTuple):
    """Where a plan holds if one size changes and the others stay what they were when traced."""

    size: OpenSize
    known: SizeSpan  # where the formulas hold; the other attributes are about these sizes only
    room_nbytes: int  # live bytes that the plan may take
    fits: SizeSpan | None  # where it takes at most these; None if it takes more at the size's hint
    peak_nbytes: int  # most live bytes at the largest size that fits; if none does, at the hint
    factor: float = NEAR  # a plan is near its lower bound if it takes at most so many times that
    # Where the plan fits and is near its lower bound; None if that was not asked for.
    near: SizeSpan | None = None


@dataclass(frozen=True)
class OpenPlan:
    """A plan with open sizes. Like the planner, it sees only what all ranks share."""

    before: SizedProgram  # the program, nothing merged
    after: SizedProgram  # the program merged, and in the planned order
    work: Mapping[str, Work]  # of its compute ops by name
    cost: ClusterCost  # of the machine
    sizes: tuple[OpenSize, ...]  # all that are open
    # Conditions that comparisons of sizes found true; the formulas hold where all of these do.
    holds: frozenset[sympy.Basic]

    def peak_nbytes(self, **sizes: int) -> int:
        """Most live bytes at ``sizes``, given by symbol; sizes not given are at their hints."""
        with _torch.plain_tensors():
            return int(self._peaks.many([self._cell(sizes)]).item())

    def times_bound(self, **sizes: int) -> float:
        """Predicted time of the plan at ``sizes``, divided by its lower bound there."""
        cell = self._cell(sizes)
        numbers = iter(self._work.at(cell))
        work = {
            name: replace(work, flops=next(numbers), nbytes=next(numbers))
            for name, work in self.work.items()
        }
        cost = replace(self.cost, work=work)
        bound_us = lower_bound_us(self.before.at(**cell), cost)
        return simulate(self.after.at(**cell), cost).total_us / max(bound_us, 1e-9)

    def is_known(self, **sizes: int) -> bool:
        """Whether the formulas hold at ``sizes``."""
        cell = self._cell(sizes)
        values = {size.symbol: cell[str(size.symbol)] for size in self.sizes}
        return all(condition.xreplace(values) == sympy.true for condition in self.holds)

    @property
    def open(self) -> tuple[OpenSize, ...]:
        """The open sizes that some buffer's bytes depend on."""
        numbers = [buffer.nbytes for buffer in self.before.program.buffers.values()]
        there = {symbol for number in numbers for symbol in formula_of(number).free_symbols}
        return tuple(size for size in self.sizes if size.symbol in there)

    def _cell(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {str(size.symbol): size.hint for size in self.sizes} | dict(sizes)

    @cached_property
    def _peaks(self) -> Peaks:
        return Peaks(OpenProgram(self.after.program, self.work, self.after.symbols))

    @cached_property
    def _work(self) -> Formulas:
        numbers = [n for work in self.work.values() for n in (work.flops, work.nbytes)]
        return Formulas(numbers, self.before.symbols)


def open_plan(
    rehearsal: Rehearsal,
    settings: Settings | None,
    cluster: Cluster,
    sizes: Sequence[OpenSize],
) -> OpenPlan:
    """The plan of a graph, with its sizes open.

    Args:
        rehearsal: of the graph.
        settings: of the passes.
        cluster: the machine that the graph runs on.
        sizes: all open sizes that the graph's formulas contain.
    """
    with noted() as notes:
        program, cost = fused_program(rehearsal.reading), cost_of(rehearsal.reading, cluster)
        program, shared = rank_invariant(program, cost)
    # A note that two numbers differ is left out: it fails at a few sizes only, where little
    # changes.
    holds = {note for note in notes if not isinstance(note, sympy.Ne)}
    work = {n: w if shared.op_us.get(n) else _FREE for n, w in cost.work.items()}
    ordered = arranged(program, in_program(program, rehearsal.planned), settings)
    symbols = Symbols({str(size.symbol): (size.symbol,) for size in sizes})
    before, after = SizedProgram(program, symbols), SizedProgram(ordered, symbols)
    return OpenPlan(before, after, work, cost, tuple(sizes), frozenset(holds))


def range_of(plan: OpenPlan, size: OpenSize, room_nbytes: int, *, timed: bool) -> SizeRange:
    """Within which values of one size a plan holds.

    A plan is near its bound where the ratio of its predicted time to its lower bound is at most
    5 % above the ratio at the hint (or above 1, if the ratio at the hint is below that).

    Sizes are tried from the hint outwards, each twice or half the one before, and then between the
    last good and the first bad one. So the range that fits is exact, since live bytes grow with a
    size; the range that is near its bound is not: sizes between two good ones are not tried.

    Args:
        plan: the plan.
        size: one of the plan's open sizes.
        room_nbytes: live bytes that the plan may take.
        timed: also find where the plan is near its bound.
    """
    name, hint = str(size.symbol), size.hint

    def around(holds: Callable[[int], bool], within: SizeSpan, part: int = ENDLESS) -> SizeSpan:
        return SizeSpan(*(edge(holds, hint, end, part) for end in within))

    known = around(lambda n: plan.is_known(**{name: n}), SizeSpan(size.least, size.most))
    peak_nbytes = plan.peak_nbytes(**{name: hint})
    if peak_nbytes > room_nbytes:
        return SizeRange(size, known, room_nbytes, None, peak_nbytes)
    fits = around(lambda n: plan.peak_nbytes(**{name: n}) <= room_nbytes, known)
    found = SizeRange(size, known, room_nbytes, fits, plan.peak_nbytes(**{name: fits.most}))
    if not timed:
        return found
    factor = NEAR * max(1.0, plan.times_bound(**{name: hint}))
    near = around(lambda n: plan.times_bound(**{name: n}) <= factor, fits, 16)
    return found._replace(factor=factor, near=near)


def edge(holds: Callable[[int], bool], hint: int, end: int, part: int = ENDLESS) -> int:
    """The last size up to which ``holds`` stays true on the way from ``hint``, where it is true, to
    ``end``. The result may fall short of that size by one ``part``-th of it."""
    good = hint
    while good != end:
        further = min(end, max(2 * good, 1)) if good < end else max(end, good // 2)
        if not holds(further):
            return _between(holds, good, further, part)
        good = further
    return end


def _between(holds: Callable[[int], bool], good: int, bad: int, part: int) -> int:
    while abs(bad - good) > max(1, min(good, bad) // part):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
