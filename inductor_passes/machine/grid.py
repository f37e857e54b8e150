"""Time and memory of a program in many cells (combinations of sizes) at once.

The model is that of :mod:`inductor_passes.machine.simulate`, whose recurrences run once, over
tensors with a number per cell. The cluster computes each distinct price once per cell; a deep model
has few distinct prices.
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
    work: Mapping[str, Work]  # of compute ops by name; any other op reads and writes its buffers
    symbols: Symbols  # the sizes that were left open


class Taken(NamedTuple):
    """Time and memory of a program: tensors with a number per cell, float64."""

    total_us: Tensor  # the whole time
    exposed_us: Tensor  # the part of it in which the compute lane stands still
    compute_us: Tensor  # sum over compute ops, if nothing were in transfer
    wire_us: Tensor  # sum over collectives
    peak_nbytes: Tensor  # most live bytes, without inputs that the caller keeps


def taken(
    opened: OpenProgram,
    cells: Sequence[Sizes],
    costs: Sequence[ClusterCost],
) -> Taken:
    """Time and memory of a program in each cell.

    Args:
        opened: the program.
        cells: sizes by the names of its symbols. They are not checked, see
            :meth:`~inductor_passes.ir.cells.Symbols.check`.
        costs: a cost model of the machine per cell. Their ``work`` is not used, and their
            ``compute_beside`` must be the same.

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
    """The program with each stretch of compute as one op, and the time of each op by position. The
    program takes as long: where one compute ends does not change what transfers cost them."""
    ops: list[Op] = []
    priced: dict[int, dict[int, int]] = {}  # by op that takes time: how often it takes each price
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

    How many storages of each size are alive together is counted once for all cells.

    Args:
        opened: the program.
    """

    def __init__(self, opened: OpenProgram) -> None:
        program, alive = opened.program, lifetimes(opened.program)
        kind_of: dict[sympy.Expr, int] = {}
        changes: list[tuple[int, int, int]] = []  # position of an op, which size, how many more
        for storage, (first, last) in alive.items():
            kind = kind_of.setdefault(formula_of(program.storage_nbytes[storage]), len(kind_of))
            changes += [(first, kind, 1), (last + 1, kind, -1)]
        self._nbytes = Formulas(list(kind_of), opened.symbols)
        self._counts = torch.zeros(1, len(kind_of), dtype=torch.float64)
        if alive:
            when, which, by_how_many = torch.tensor(changes).unbind(1)
            counts = torch.zeros(len(program.ops) + 2, len(kind_of), dtype=torch.float64)
            counts.index_put_((when, which), by_how_many.double(), accumulate=True)
            # A peak is where something is freed next. Layers that are alike repeat many counts.
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
    """Times ``[distinct prices, cells]``, and the index of its price for each op, by position."""
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
        price = functools.cache(functools.partial(_price, what))  # equal in many cells
        us.append([price(cost, *n) for cost, *n in zip(costs, *columns, strict=True)])
    return torch.tensor(us, dtype=torch.float64).reshape(-1, len(cells)), price_of


def _asked(opened: OpenProgram, op: Op) -> tuple[Work | Collective, tuple[float, ...]]:
    """What is to be priced for an op, and the numbers of it that depend on sizes."""
    if op.collective is not None:
        return op.collective, (op.collective.nbytes, op.collective.ranks)
    work = opened.work.get(op.name) or Work(nbytes=opened.program.touched_nbytes(op))
    return work, (work.flops, work.nbytes)


def _alike(what: Work | Collective) -> tuple[object, ...]:
    """Everything that the price of ``what`` depends on, except the numbers."""
    if isinstance(what, Work):
        return what.kind, what.dtype, what.kernels
    return what.kind, what.group, what.dtype, what.members


def _price(what: Work | Collective, cost: ClusterCost, one: float, other: float) -> float:
    if isinstance(what, Work):
        return cost.cluster.compute_us(Work(one, other, what.kind, what.dtype, what.kernels))
    return cost.collective_us(replace(what, nbytes=int(one), ranks=int(other)))
