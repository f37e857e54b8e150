"""Sizes that were left open when a graph was traced: numbers that know their formula.

When a graph with symbolic sizes is read, each symbol is replaced by the value it had in the trace,
so that every pass computes with plain numbers. A :class:`Size` is such a number that also keeps the
formula it came from; sums and products of Sizes are Sizes, too. So a program, and what the passes
make of it, can be computed for other sizes without a new trace (:mod:`inductor_passes.ir.cells`).

A pass that compares two Sizes acts on their values here. At other sizes the comparison may come
out differently, so its result is noted (:func:`noted`), to be checked where formulas are used.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy

_ENDLESS = 1 << 62  # stands for "no limit": a comparison with it is not noted
_notes: list[set[sympy.Basic]] = []


def _operator(name: str) -> Any:
    def calculate(self: Size, other: Any) -> Any:
        return _made(name, self, other)

    return calculate


def _comparison(name: str, *, negated: bool = False) -> Any:
    def compare(self: Size, other: Any) -> Any:
        found = _compared(name, self, other)
        return not found if negated else found

    return compare


class Size(int):
    """A whole number and the formula that it comes from.

    Operators other than ``+``, ``-``, ``*`` and ``//`` of a Size give plain numbers, true for the
    sizes here only, and nothing notes that: good enough to choose a plan, which any size can run.
    """

    formula: sympy.Expr  # a sympy expression of the symbols that were left open

    def __new__(cls, value: int, formula: sympy.Expr) -> Size:
        made = super().__new__(cls, value)
        made.formula = formula
        return made

    __add__ = __radd__ = _operator("__add__")
    __mul__ = __rmul__ = _operator("__mul__")
    __sub__, __rsub__ = _operator("__sub__"), _operator("__rsub__")
    __floordiv__ = _operator("__floordiv__")
    __eq__, __ne__ = _comparison("eq"), _comparison("eq", negated=True)
    __lt__, __ge__ = _comparison("lt"), _comparison("lt", negated=True)
    __gt__, __le__ = _comparison("gt"), _comparison("gt", negated=True)

    def __neg__(self) -> Size:
        return Size(-int(self), -self.formula)

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[object, ...]:
        return int, (int(self),)  # the symbols of the formula mean nothing to another process


def formula_of(value: float) -> sympy.Expr:
    """The formula of a Size; any other number, or a formula, is its own formula."""
    if isinstance(value, Size):
        return value.formula
    return value if isinstance(value, sympy.Basic) else _plain(value)


@functools.lru_cache(1 << 16, typed=True)
def _plain(value: Any) -> sympy.Expr:
    # sympy would turn a bool into a logical constant, which cannot be added or multiplied.
    return sympy.sympify(int(value) if isinstance(value, bool) else value)


def least(*values: int) -> int:
    """The smallest of some numbers. Its formula is a ``Min``, so it holds at sizes where another of
    them is the smallest, and nothing is noted."""
    found = min(map(int, values))
    formulas = {formula_of(v) for v in values if int(v) < _ENDLESS}
    return Size(found, _least(frozenset(formulas))) if any(map(is_open, formulas)) else found


@functools.cache
def _least(formulas: frozenset[sympy.Expr]) -> sympy.Expr:
    return sympy.Min(*formulas)


@functools.lru_cache(1 << 16)
def is_open(formula: sympy.Expr) -> bool:
    """Whether a formula has symbols."""
    return bool(formula.free_symbols)


def _made(name: str, one: Size, other: object) -> Any:
    if not isinstance(other, int):
        return NotImplemented
    value = getattr(int, name)(int(one), int(other))
    formula = _calculated(name, one.formula, formula_of(other))
    return Size(value, formula) if is_open(formula) else value


@functools.lru_cache(1 << 16)
def _calculated(name: str, one: sympy.Expr, other: sympy.Expr) -> sympy.Expr:
    if name == "__floordiv__":
        return _divided(one, other)
    return sympy.expand(getattr(one, name)(other))


def _divided(one: sympy.Expr, other: sympy.Expr) -> sympy.Expr:
    whole = sympy.expand(one / other)
    exact = all(c.is_integer for c in whole.as_coefficients_dict().values())
    return whole if exact else Quotient(one, other)


class Quotient(sympy.Function):  # type: ignore[misc]
    """The integer quotient of two formulas. sympy would write it as the floor of a product with a
    fraction, which floats round: ``floor(49 * (1 / 49))`` is 0."""

    @classmethod
    def eval(cls, one: sympy.Expr, other: sympy.Expr) -> sympy.Expr | None:
        """The quotient as a number, if both are numbers."""
        return one // other if one.is_Integer and other.is_Integer else None


_HOLDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "eq": (sympy.Eq, sympy.Ne),
    "lt": (sympy.Lt, sympy.Ge),
    "gt": (sympy.Gt, sympy.Le),
}


def _compared(name: str, one: Size, other: Any) -> Any:
    # Python would ask a Size on the right to compare first, which would call this function again.
    plain = int(other) if isinstance(other, Size) else other
    found = getattr(operator, name)(int(one), plain)
    if _notes and isinstance(other, int) and 0 < abs(other) < _ENDLESS:
        note = _holding(name, bool(found), one.formula, formula_of(other))
        if note is not sympy.true:
            _notes[-1].add(note)
    return found


@functools.lru_cache(1 << 16)
def _holding(name: str, found: bool, one: sympy.Expr, other: sympy.Expr) -> sympy.Basic:
    """The condition on two formulas that a comparison found; true if it holds at all sizes."""
    if one == other or not is_open(one / other):  # sizes are positive
        return sympy.true
    return _HOLDS[name][not found](one, other)


def fixed(value: int) -> int:
    """``value`` as a plain number; for a Size, the fact that it has this value is noted."""
    _ = value == int(value)
    return int(value)


@contextmanager
def noted() -> Iterator[set[sympy.Basic]]:
    """Gives the set of conditions that comparisons of Sizes inside the block find true; they may
    not hold for other sizes."""
    _notes.append(set())
    try:
        yield _notes[-1]
    finally:
        _notes.pop()
