"""A program for sizes other than those of its trace; one combination of sizes is a cell.

The numbers of a program (:class:`~inductor_passes.ir.sizes.Size`) are computed anew from their
formulas; its ops and their order stay. Whether a trace with the other sizes would give the same ops
is checked, not assumed. For the program of one cell (:class:`SizedProgram`) the check is exact, so
that it is what a fresh trace gives. Where many cells are priced at once (:class:`Formulas`), the
check leaves out numbers that are equal by chance, which change little.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from inductor_passes.ir.program import Program
from inductor_passes.ir.sizes import formula_of

# How to compute each function in formulas, by name; some are torch's, of
# torch.utils._sympy.functions.
_OF_NUMBERS = {
    "FloorDiv": operator.floordiv,
    "Quotient": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "PythonMod": operator.mod,
    "Mod": operator.mod,
}
_OF_TENSORS = _OF_NUMBERS | {
    "Min": lambda *values: reduce(torch.minimum, map(torch.as_tensor, values)),
    "Max": lambda *values: reduce(torch.maximum, map(torch.as_tensor, values)),
    "ceiling": torch.ceil,
    "floor": torch.floor,
}


class CellError(ValueError):
    """A trace with the requested sizes would give another graph."""


@dataclass(frozen=True)
class Symbols:
    """What was left open when a graph was traced."""

    # The symbols, by what users call them: ``"batch"``. One size may have several.
    by_name: Mapping[str, tuple[sympy.Symbol, ...]]
    # Conditions on the symbols under which a trace gives the same graph.
    holds: frozenset[sympy.Basic] = frozenset()
    # Conditions that two numbers differ, which fail only by chance. Where the numbers are equal, a
    # compiler may share a constant or a kernel of which it otherwise has two.
    apart: frozenset[sympy.Basic] = frozenset()

    def check(self, sizes: Mapping[str, int], *, exactly: bool = True) -> None:
        """Check that the graph is the same for ``sizes``.

        Args:
            sizes: by all names, 1 or more.
            exactly: also check that no numbers are equal by chance (:attr:`apart`).

        Raises:
            CellError: the graph is not the same; names the condition that does not hold.
        """
        values = {s: sizes[name] for name, symbols in self.by_name.items() for s in symbols}
        for condition in (*self.holds, *(self.apart if exactly else ())):
            if condition.xreplace(values) != sympy.true:
                names = {s: sympy.Symbol(n) for n, symbols in self.by_name.items() for s in symbols}
                told = ", ".join(f"{name} {sizes[name]}" for name in self.by_name)
                raise CellError(
                    f"{told}: the graph was traced where {condition.xreplace(names)}; trace it "
                    "anew for these sizes"
                )

    def of(self, sizes: Mapping[str, Any]) -> list[Any]:
        """The value of each symbol, in the order of :attr:`all`."""
        return [sizes[name] for name, symbols in self.by_name.items() for _ in symbols]

    @property
    def all(self) -> list[sympy.Symbol]:
        """The symbols of all names."""
        return [symbol for symbols in self.by_name.values() for symbol in symbols]


class Formulas:
    """Numbers that can be computed for other sizes.

    Args:
        numbers: Sizes or their formulas; or plain numbers, which are the same at all sizes.
        symbols: the symbols of these formulas.
    """

    def __init__(self, numbers: Sequence[Any], symbols: Symbols) -> None:
        formulas = [formula_of(number) for number in numbers]
        distinct = {formula: i for i, formula in enumerate(dict.fromkeys(formulas))}
        self._index = [distinct[formula] for formula in formulas]
        self._formulas, self._symbols = list(distinct), symbols

    def at(self, sizes: Mapping[str, int]) -> list[int]:
        """The numbers for some sizes."""
        found = [round(number) for number in self._function(*self._symbols.of(sizes))]
        return [found[i] for i in self._index]

    def many(self, cells: Sequence[Mapping[str, int]]) -> Tensor:
        """The numbers for many sizes, ``[numbers, cells]``, float64: exact up to 2 ** 53."""
        columns = torch.tensor([self._symbols.of(cell) for cell in cells], dtype=torch.float64).T
        found = torch.empty(len(self._formulas), len(cells), dtype=torch.float64)
        for row, number in zip(found, self._of_tensors(*columns), strict=True):
            row[:] = number
        return found[self._index]

    @cached_property
    def _of_tensors(self) -> Callable[..., list[Any]]:
        return sympy.lambdify(self._symbols.all, self._formulas, modules=[_OF_TENSORS])  # type: ignore[no-any-return]

    @cached_property
    def _function(self) -> Callable[..., list[int]]:
        return sympy.lambdify(self._symbols.all, self._formulas, modules=[_OF_NUMBERS, "math"])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SizedProgram:
    """A program whose sizes were left open."""

    program: Program  # the program as it was traced; its numbers are Sizes
    symbols: Symbols  # the symbols in their formulas

    def at(self, **sizes: int) -> Program:
        """The program for some sizes, as if it had been traced with them.

        Raises:
            CellError: as for :meth:`Symbols.check`.
        """
        self.symbols.check(sizes)
        return _with_numbers(self.program, self._formulas.at(sizes))

    @cached_property
    def _formulas(self) -> Formulas:
        return Formulas(_numbers_of(self.program), self.symbols)


def with_plain_sizes(program: Program) -> Program:
    """The program with plain numbers, those of its trace. Passes then make no formulas, and take a
    third of the time or less."""
    return _with_numbers(program, map(int, _numbers_of(program)))


def _numbers_of(program: Program) -> list[int]:
    sent = (n for c in program.sent.values() for n in (c.nbytes, c.ranks))
    return [*(buffer.nbytes for buffer in program.buffers.values()), *sent]


def _with_numbers(program: Program, numbers: Iterable[int]) -> Program:
    """The program with ``numbers`` in place of those that :func:`_numbers_of` lists."""
    each = iter(numbers)
    buffers = {name: replace(buffer, nbytes=next(each)) for name, buffer in program.buffers.items()}
    with_buffers = replace(program, buffers=buffers)
    return with_buffers.sending(lambda c: replace(c, nbytes=next(each), ranks=next(each)))
