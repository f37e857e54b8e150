"""Numbers that know their formula, and what was assumed of them."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace

import pytest
import sympy

from inductor_passes.ir.cells import CellError, Formulas, SizedProgram, Symbols
from inductor_passes.ir.sizes import Quotient, Size, fixed, formula_of, least, noted
from inductor_passes.ir.text import parse

S, B = sympy.symbols("s b", positive=True, integer=True)
SYMBOLS = Symbols({"seq": (S,), "batch": (B,)})


def seq(value: int = 10) -> Size:
    return Size(value, S)


@pytest.mark.parametrize(
    ("made", "value", "formula"),
    [
        (lambda s: s + 3, 13, S + 3),
        (lambda s: 3 + s, 13, S + 3),
        (lambda s: s * 4 * s, 400, 4 * S**2),
        (lambda s: s * 4 // 2, 20, 2 * S),
        (lambda s: (s + 1) // 4, 2, Quotient(S + 1, sympy.Integer(4))),
        (lambda s: 30 - s, 20, 30 - S),
        (lambda s: s - 1, 9, S - 1),
        (lambda s: -s, -10, -S),
        (lambda s: sum([s, 2, s]), 22, 2 * S + 2),
        (lambda s: math.prod([2, s, 3]), 60, 6 * S),
        (lambda s: max(s, 2), 10, S),
        (lambda s: s * True + (s > 3), 11, S + 1),
        (lambda s: least(s * 4, 100, 1 << 62), 40, sympy.Min(4 * S, 100)),
    ],
)
def test_what_is_made_of_a_size_is_one(made, value, formula):
    found = made(seq())
    assert (int(found), formula_of(found)) == (value, formula)
    assert isinstance(found, Size)


def test_what_does_not_depend_on_a_size_is_a_plain_number():
    assert type(seq() - seq()) is int
    assert type(seq() * False) is int
    assert type(least(3, 4)) is int
    assert pickle.loads(pickle.dumps(seq())) == 10
    assert type(pickle.loads(pickle.dumps(seq()))) is int
    assert {seq(): 1}[10] == 1


def test_comparisons_that_may_come_out_otherwise_are_noted():
    with noted() as notes:
        assert seq() < 11
        assert seq() == 10
        assert seq() != Size(12, B)
        assert max(seq(), Size(12, B)) == Size(12, B)
    assert notes == {S < 11, sympy.Eq(S, 10), sympy.Ne(S, B), B > S}


def test_a_size_that_is_taken_for_its_number_is_noted():
    with noted() as notes:
        assert type(fixed(seq())) is int
        assert fixed(3) == 3
    assert notes == {sympy.Eq(S, 10)}


def test_comparisons_that_always_come_out_so_are_not():
    with noted() as notes:
        assert seq() < 4 * seq()
        assert seq() == seq()
        assert seq() > 0
        assert seq() < 1 << 63
        least(seq(), 4)
    assert not notes


def test_formulas_are_computed_for_one_cell_and_for_many():
    numbers = [seq() * 2, 7, least(seq(), 12), Size(2, sympy.ceiling(S / 5)), Size(20, S * B)]
    found = Formulas(numbers, SYMBOLS)
    cells = [{"seq": 10, "batch": 2}, {"seq": 13, "batch": 5}]
    assert [found.at(cell) for cell in cells] == [[20, 7, 10, 2, 20], [26, 7, 12, 3, 65]]
    assert found.many(cells).T.tolist() == [found.at(cell) for cell in cells]


def sized(text: str, sizes: dict[str, Size], **holds) -> SizedProgram:
    """A program whose buffers of these names have these sizes."""
    program = parse(text)
    buffers = {
        name: replace(buffer, nbytes=sizes.get(name, buffer.nbytes))
        for name, buffer in program.buffers.items()
    }
    ops = tuple(
        replace(op, collective=replace(op.collective, nbytes=sizes["full"], ranks=Size(4, S)))
        if op.collective
        else op
        for op in program.ops
    )
    return SizedProgram(replace(program, buffers=buffers, ops=ops), Symbols({"seq": (S,)}, **holds))


TEXT = """
input x: {x}
resident p: 4
start g(p) -> full: {full} | gather group=dp ranks={ranks} nbytes={full} dtype=f32 fqns=w
wait wg(full) -> w: {full} @full
compute mm(x, w) -> y: 12
output y
"""


def test_a_program_for_other_sizes():
    size = Size(4, S)
    opened = sized(
        TEXT.format(x=40, full=16, ranks=4), {"x": size * 10, "full": size * 4, "w": size * 4}
    )
    assert opened.at(seq=7) == parse(TEXT.format(x=70, full=28, ranks=7))
    assert opened.at(seq=4) == opened.program


def test_sizes_that_it_does_not_hold_for_are_refused():
    opened = sized(
        TEXT.format(x=40, full=16, ranks=4), {"full": Size(16, 4 * S)}, holds=frozenset({S <= 8})
    )
    told = "seq 9: the graph was traced where seq <= 8; trace it anew"
    with pytest.raises(CellError, match=re.escape(told)):
        opened.at(seq=9)


def test_a_quotient_is_whole_for_every_size() -> None:
    x = sympy.Symbol("x", positive=True, integer=True)
    symbols = Symbols({"x": (x,)})
    quotient = Formulas([Size(98, x) // 49], symbols)
    sizes = [{"x": n} for n in (1, 48, 49, 50, 98, 147, 196, 294)]
    expected = [n["x"] // 49 for n in sizes]
    assert [quotient.at(n)[0] for n in sizes] == expected
    assert quotient.many(sizes)[0].tolist() == expected
    with noted() as notes:
        assert Size(98, x) // 49 > 1
    assert [note.xreplace({x: sympy.Integer(n)}) for note in notes for n in (97, 98)] == [
        sympy.false,
        sympy.true,
    ]
