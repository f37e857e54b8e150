"""Sizes that a graph was traced without: numbers that know their formula.

A graph that is traced with symbolic sizes is read with what its symbols stood for then, so that
every pass computes with plain numbers. A :class:`Size` is such a number, and keeps the formula that
led to it: what is added and multiplied from Sizes is one again. So a program, and what the passes
make of it, can be had again for other sizes, without a new trace (:mod:`inductor_passes.ir.cells`).

A pass that compares two Sizes goes on by what they are here. That may come out otherwise elsewhere,
so it is noted (:func:`noted`), to be checked where the formulas are used.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy

_ENDLESS = 1 << 62  # what is compared with it is not limited
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

    What other operators than ``+``, ``-``, ``*`` and ``//`` make is a plain number, what it is
    here, and nothing notes that: good for choosing a plan, which is valid elsewhere, too.
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
        return int, (int(self),)  # its symbols mean nothing to another process


def formula_of(value: float) -> sympy.Expr:
    """What a number comes from; of one that is no Size, itself, and so of a formula."""
    if isinstance(value, Size):
        return value.formula
    return value if isinstance(value, sympy.Basic) else _plain(value)


@functools.lru_cache(1 << 16, typed=True)
def _plain(value: Any) -> sympy.Expr:
    # Of a bool sympy would make a statement, which cannot be added or multiplied.
    return sympy.sympify(int(value) if isinstance(value, bool) else value)


def least(*values: int) -> int:
    """The smallest of some numbers, whichever it is elsewhere: nothing is noted."""
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
    """The whole quotient of two formulas. sympy's own floor would be taken of a product with a
    fraction, which rounds: ``floor(49 * (1 / 49))`` is 0."""

    @classmethod
    def eval(cls, one: sympy.Expr, other: sympy.Expr) -> sympy.Expr | None:
        """The number, of numbers."""
        return one // other if one.is_Integer and other.is_Integer else None


_HOLDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "eq": (sympy.Eq, sympy.Ne),
    "lt": (sympy.Lt, sympy.Ge),
    "gt": (sympy.Gt, sympy.Le),
}


def _compared(name: str, one: Size, other: Any) -> Any:
    plain = int(other) if isinstance(other, Size) else other  # else it would compare itself with us
    found = getattr(operator, name)(int(one), plain)
    if _notes and isinstance(other, int) and 0 < abs(other) < _ENDLESS:
        note = _holding(name, bool(found), one.formula, formula_of(other))
        if note is not sympy.true:
            _notes[-1].add(note)
    return found


@functools.lru_cache(1 << 16)
def _holding(name: str, found: bool, one: sympy.Expr, other: sympy.Expr) -> sympy.Basic:
    """What holds of two formulas that compare so; true if it always does."""
    if one == other or not is_open(one / other):  # sizes are positive
        return sympy.true
    return _HOLDS[name][not found](one, other)


def fixed(value: int) -> int:
    """A plain number; of a Size what it is here, and that is noted."""
    _ = value == int(value)
    return int(value)


@contextmanager
def noted() -> Iterator[set[sympy.Basic]]:
    """What was found by comparing Sizes inside, and may not hold for other sizes."""
    _notes.append(set())
    try:
        yield _notes[-1]
    finally:
        _notes.pop()
