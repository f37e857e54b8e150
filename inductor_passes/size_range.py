"""Within which sizes a plan holds that was made at one of them, from the formulas of its numbers.

A graph whose sizes are open is planned once, and what is planned runs at every size: buckets and
order stay. What it takes there follows from the formulas (:mod:`inductor_passes.ir.sizes`); nothing
is traced or planned again.
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
"""A size that none is larger than; larger ones are not looked at."""
NEAR = 1.05
_FREE = Work(kind="view", kernels=0)


class OpenSize(NamedTuple):
    """A size that a graph was traced without."""

    symbol: sympy.Symbol  # that stands for it
    name: str  # what it is to the user: ``"L['tokens'].size()[0]"``
    hint: int  # what it was when the graph was traced
    least: int  # the smallest for which the graph is run
    most: int  # the largest, at most :data:`ENDLESS`


class SizeSpan(NamedTuple):
    """Sizes, both ends included."""

    least: int
    most: int


class SizeRange(NamedTuple):
    """Where a plan holds, if one size changes and the others are what they were when traced."""

    size: OpenSize
    known: SizeSpan  # where the formulas hold: the rest of the attributes is said of no others
    room_nbytes: int  # what the plan may take
    fits: SizeSpan | None  # where it takes no more; None if it takes more at the size's hint
    peak_nbytes: int  # most live bytes at the largest size that fits; at the hint if that does not
    factor: float = NEAR  # how many times its lower bound the plan may take to be near it
    # Where it fits and takes no longer; None if that was not asked for.
    near: SizeSpan | None = None


@dataclass(frozen=True)
class OpenPlan:
    """A plan whose sizes are open; of what all ranks share, as the planner sees it."""

    before: SizedProgram  # the program, nothing merged
    after: SizedProgram  # merged, and in its order
    work: Mapping[str, Work]  # of its compute ops by name
    cost: ClusterCost  # of the machine
    sizes: tuple[OpenSize, ...]  # that are open
    # What was found by comparing sizes, and holds where the formulas do.
    holds: frozenset[sympy.Basic]

    def peak_nbytes(self, **sizes: int) -> int:
        """Most live bytes at some sizes by their symbols, the others at their hints."""
        with _torch.plain_tensors():
            return int(self._peaks.many([self._cell(sizes)]).item())

    def times_bound(self, **sizes: int) -> float:
        """How many times its lower bound the plan takes at some sizes."""
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
        """Whether the formulas hold at some sizes."""
        cell = self._cell(sizes)
        values = {size.symbol: cell[str(size.symbol)] for size in self.sizes}
        return all(condition.xreplace(values) == sympy.true for condition in self.holds)

    @property
    def open(self) -> tuple[OpenSize, ...]:
        """Of the sizes those that memory depends on."""
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
    """What was planned of a graph, with its sizes open.

    Args:
        rehearsal: of the graph.
        settings: of the passes.
        cluster: what it runs on.
        sizes: all that its formulas are of.
    """
    with noted() as notes:
        program, cost = fused_program(rehearsal.reading), cost_of(rehearsal.reading, cluster)
        program, shared = rank_invariant(program, cost)
    # That two sizes differ, they do everywhere but at a few sizes, where little changes.
    holds = {note for note in notes if not isinstance(note, sympy.Ne)}
    work = {n: w if shared.op_us.get(n) else _FREE for n, w in cost.work.items()}
    ordered = arranged(program, in_program(program, rehearsal.planned), settings)
    symbols = Symbols({str(size.symbol): (size.symbol,) for size in sizes})
    before, after = SizedProgram(program, symbols), SizedProgram(ordered, symbols)
    return OpenPlan(before, after, work, cost, tuple(sizes), frozenset(holds))


def range_of(plan: OpenPlan, size: OpenSize, room_nbytes: int, *, timed: bool) -> SizeRange:
    """Within which values of one size a plan holds.

    The range that fits is exact. It is near its bound where its predicted step takes at most 5 %
    more of its lower bound than at the hint, and at most 5 % more than the bound where it beats
    that there. Sizes are looked at from the hint outwards, each twice as large or half as large,
    and then between the last good one and the first bad one. (Live bytes grow with a size; of
    time, what lies between two good ones is not looked at.)

    Args:
        plan: it.
        size: one of the plan's.
        room_nbytes: what the plan may take.
        timed: look for where it is near its bound.
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
    """The last size on the way from ``hint``, for which something holds, to ``end``, up to which it
    does; to within one part of so many, on the side where it holds."""
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
