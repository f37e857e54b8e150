"""What a program takes in many cells at once: time and memory, by the one model of each.

The recurrences of :mod:`inductor_passes.machine.simulate` run once, over tensors with a number per
cell. Each distinct price is asked of the cluster once per cell; a deep model has few of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
import torch
from torch import Tensor

from inductor_passes.ir.cells import Formulas, Symbols
from inductor_passes.ir.program import Collective, Op, Program
from inductor_passes.ir.sizes import formula_of
from inductor_passes.machine.cluster import ClusterCost, Work
from inductor_passes.machine.simulate import lifetimes, run

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class OpenProgram:
    """A program in the order in which it is to run, whose numbers are Sizes."""

    program: Program
    work: Mapping[str, Work]  # of its compute ops by name; one that is not there moves its buffers
    symbols: Symbols  # what was left open


class Taken(NamedTuple):
    """What a program takes, a number per cell, float64."""

    total_us: Tensor  # its time
    exposed_us: Tensor  # of it, in which the compute lane stands still
    compute_us: Tensor  # its compute, if nothing were in transfer
    wire_us: Tensor  # sum over its collectives
    peak_nbytes: Tensor  # most live bytes, without inputs that the caller keeps


def taken(
    opened: OpenProgram,
    cells: Sequence[Sizes],
    costs: Sequence[ClusterCost],
) -> Taken:
    """What a program takes in each cell.

    Args:
        opened: the program.
        cells: sizes by the names of its symbols. They are not checked, see
            :meth:`~inductor_passes.ir.cells.Symbols.check`.
        costs: of the machine, by cell; what its ops do is not taken from there. Compute keeps
            the same part of its speed beside transfers in all of them.

    Raises:
        UnknownLinkError: a cluster cannot price a collective.
    """
    us, price_of = _prices(opened, cells, costs)
    zero = torch.zeros(len(cells), dtype=torch.float64)
    total, exposed, compute, wire = zero, zero.clone(), zero.clone(), zero.clone()
    program, alone = _stretches(opened.program, us, price_of)
    events = run(
        program,
        lambda i: alone[i],
        costs[0].compute_beside,
        zero,
        later=torch.maximum,
        sooner=torch.minimum,
    )
    for i, start, begin, end in events:
        if program.ops[i].collective is not None:
            wire += alone[i]
            continue
        if start != i:
            exposed += end - begin
        else:
            compute += alone[i]
        total = end
    return Taken(total, exposed, compute, wire, Peaks(opened).many(cells))


def _stretches(
    program: Program, us: Tensor, price_of: Mapping[int, int]
) -> tuple[Program, dict[int, Tensor]]:
    """The program with each stretch of compute as one op, which takes as long: what computes lose
    beside transfers does not depend on where one ends. And the time of each op by its place."""
    ops: list[Op] = []
    priced: dict[int, dict[int, int]] = {}  # of each op that takes time: how often each price
    stretch: dict[int, int] | None = None
    for i, op in enumerate(program.ops):
        price = price_of.get(i)
        if op.kind in ("compute", "view"):
            if stretch is None:
                stretch = priced[len(ops)] = {}
                ops.append(Op(f"stretch {len(ops)}", "compute", (), ()))
            if price is not None:
                stretch[price] = stretch.get(price, 0) + 1
            continue
        stretch = None
        if price is not None:
            priced[len(ops)] = {price: 1}
        ops.append(op)
    counts = torch.zeros(len(priced), len(us), dtype=torch.float64)
    for row, found in zip(counts, priced.values(), strict=True):
        row[list(found)] = torch.tensor(list(found.values()), dtype=torch.float64)
    alone = dict(zip(priced, counts @ us, strict=True))
    return Program(tuple(ops), program.buffers), alone


class Peaks:
    """Most live bytes of a program, without inputs that the caller keeps, in many cells.

    Storages of one size are counted, once for all cells.

    Args:
        opened: the program.
    """

    def __init__(self, opened: OpenProgram) -> None:
        program, alive = opened.program, lifetimes(opened.program)
        kind_of: dict[sympy.Expr, int] = {}
        changes: list[tuple[int, int, int]] = []  # when, of which size, and by how many
        for storage, (first, last) in alive.items():
            kind = kind_of.setdefault(formula_of(program.storage_nbytes[storage]), len(kind_of))
            changes += [(first, kind, 1), (last + 1, kind, -1)]
        self._nbytes = Formulas(list(kind_of), opened.symbols)
        self._counts = torch.zeros(1, len(kind_of), dtype=torch.float64)
        if alive:
            when, which, by_how_many = torch.tensor(changes).unbind(1)
            counts = torch.zeros(len(program.ops) + 2, len(kind_of), dtype=torch.float64)
            counts.index_put_((when, which), by_how_many.double(), accumulate=True)
            # They are most where something is freed next; layers that are alike repeat many.
            ends = sorted({last for _, last in alive.values()})
            self._counts = counts.cumsum(0)[ends].unique(dim=0)

    def many(self, cells: Sequence[Sizes]) -> Tensor:
        """The peak in each cell, float64."""
        nbytes = self._nbytes.many(cells)
        peak = torch.zeros(len(cells), dtype=torch.float64)
        for some in self._counts.split(1024):
            peak = torch.maximum(peak, (some @ nbytes).amax(0))
        return peak


def _prices(
    opened: OpenProgram,
    cells: Sequence[Sizes],
    costs: Sequence[ClusterCost],
) -> tuple[Tensor, dict[int, int]]:
    """Times ``[distinct prices, cells]``, and which of them each op takes, by its position."""
    asked: dict[tuple[object, ...], tuple[int, Work | Collective, tuple[float, ...]]] = {}
    price_of: dict[int, int] = {}
    for i, op in enumerate(opened.program.ops):
        if op.kind in ("compute", "start"):
            what, numbers = _asked(opened, op)
            key = (_alike(what), *map(formula_of, numbers))
            price_of[i] = asked.setdefault(key, (len(asked), what, numbers))[0]
    flat = [number for _, _, numbers in asked.values() for number in numbers]
    values = iter(Formulas(flat, opened.symbols).many(cells).tolist())
    us = []
    for _, what, numbers in asked.values():
        columns = [next(values) for _ in numbers]
        price = functools.cache(functools.partial(_price, what))  # many cells ask for the same
        us.append([price(cost, *n) for cost, *n in zip(costs, *columns, strict=True)])
    return torch.tensor(us, dtype=torch.float64).reshape(-1, len(cells)), price_of


def _asked(opened: OpenProgram, op: Op) -> tuple[Work | Collective, tuple[float, ...]]:
    """What is to be priced, and its numbers."""
    if op.collective is not None:
        return op.collective, (op.collective.nbytes, op.collective.ranks)
    work = opened.work.get(op.name) or Work(nbytes=opened.program.touched_nbytes(op))
    return work, (work.flops, work.nbytes)


def _alike(what: Work | Collective) -> tuple[object, ...]:
    """All of it that a price depends on, but the numbers."""
    if isinstance(what, Work):
        return what.kind, what.dtype, what.kernels
    return what.kind, what.group, what.dtype, what.members


def _price(what: Work | Collective, cost: ClusterCost, one: float, other: float) -> float:
    if isinstance(what, Work):
        return cost.cluster.compute_us(Work(one, other, what.kind, what.dtype, what.kernels))
    return cost.collective_us(replace(what, nbytes=int(one), ranks=int(other)))
