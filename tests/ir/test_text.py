"""The text of programs: it says everything, and what it cannot read it names."""

from __future__ import annotations

import pytest
from programs import layers, random_program, renamed

from inductor_passes.ir.program import Buffer, Collective, Op, Program, ProgramError
from inductor_passes.ir.text import parse, to_text

EXAMPLE = """\
input x: 64
resident p: 16
start g(p) -> full: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 fqns=fc.weight
wait w(full) -> weight: 64 @full
compute mm(x, weight) -> y: 64
output y
"""


def test_reads_what_it_says():
    program = parse(EXAMPLE)
    gather = Collective("gather", "dp", 4, 64, "f32", fqns=("fc.weight",))
    assert program == Program(
        ops=(
            Op("g", "start", ("p",), ("full",), gather),
            Op("w", "wait", ("full",), ("weight",)),
            Op("mm", "compute", ("x", "weight"), ("y",)),
        ),
        buffers={
            "x": Buffer("x", 64),
            "p": Buffer("p", 16),
            "full": Buffer("full", 64),
            "weight": Buffer("weight", 64, "full"),
            "y": Buffer("y", 64),
        },
        inputs=("x", "p"),
        resident=frozenset({"p"}),
        outputs=("y",),
    )
    assert to_text(program) == EXAMPLE


def test_every_field_of_a_collective():
    text = (
        "input a: 8\ninput b: 8\n"
        "start r(a, b) -> c: 2, d: 2 | reduce group=dp ranks=4 nbytes=16 dtype=f32 op=avg "
        "bucket=layers.0 fqns=layers.0.w, layers.0.b\n"
        "wait w(c, d)\n"
    )
    collective = parse(text).ops[0].collective
    fqns = ("layers.0.w", "layers.0.b")
    assert collective == Collective("reduce", "dp", 4, 16, "f32", "avg", fqns, "layers.0")
    assert to_text(parse(text)) == text


def test_comments_blank_lines_and_indentation_say_nothing():
    text = "# a program\n\n" + "".join(f"   {line}   # so\n\n" for line in EXAMPLE.splitlines())
    assert parse(text) == parse(EXAMPLE)


def test_nothing_is_a_program():
    assert parse("") == Program((), {})
    assert to_text(Program((), {})).strip() == ""


def test_writing_a_buffer_again_mutates_it():
    program = parse("input x: 4\nview v(x) -> y: 4 @x\ncompute add(y) -> y\ncompute f(x) -> z: 4")
    assert [list(program.mutated(i)) for i in range(3)] == [[], ["x"], []]
    assert to_text(program).splitlines()[2] == "compute add(y) -> y"


def test_a_view_of_a_view_shares_the_storage_of_the_first():
    text = EXAMPLE.replace(
        "compute mm(x, weight)", "view v(weight) -> t: 64 @weight\ncompute mm(x, t)"
    )
    assert parse(text).buffers["t"].storage == "full"


@pytest.mark.parametrize("n", [3, 10, 30])
def test_round_trip_of_random_programs(n):
    for seed in range(167):
        program = random_program(seed, n)
        assert parse(to_text(program)) == program, seed


def test_round_trip_of_the_bytes_of_an_element():
    text = "input x: 8/4\ncompute f(x) -> y: 4/2\nview v(y) -> z: 4/2 @y\noutput z\n"
    assert [b.itemsize for b in parse(text).buffers.values()] == [4, 2, 2]
    assert to_text(parse(text)).strip() == text.strip()


def test_round_trip_of_layers():
    for part in ("forward", "backward"):
        program = parse(layers(3, part))
        assert parse(to_text(program)) == program


ODD = [
    "",
    " ",
    "two words",
    'a "quoted" name',
    "back\\slash",
    'ends in \\"',
    "->",
    "a->b",
    "a:",
    ":",
    "a: 64",
    "@x",
    "a, b",
    "f(x)",
    "k=v",
    "|",
    "# no comment",
    "new\nline",
    "tab\t",
    "line\u2028separator",
    "größe",
    "层.0",
    "🙂",
    "{}[]",
    "'",
    "-",
    "+",
    "*",
    "/",
    "64",
    "-64",
    "output",
    "compute",
    "fqns",
    "bucket",
    "layers.*.weight",
    "a::b",
]


@pytest.mark.parametrize("odd", ODD[1:])  # a buffer needs a name
def test_round_trip_of_odd_names(odd):
    names = {"g": odd, "p": odd, "dp": odd}
    program = parse(EXAMPLE)
    again = renamed(program, lambda name: names.get(name, name))
    assert parse(to_text(again)) == again
    names = {"full": odd, "mm": odd, "w": f"{odd} "}
    again = renamed(program, lambda name: names.get(name, name))
    assert parse(to_text(again)) == again


@pytest.mark.parametrize("odd", ODD)
def test_round_trip_of_odd_fields(odd):
    op = Op("g", "start", ("x",), ("y",), Collective("other", odd, 2, 8, odd, odd, (odd, "z"), odd))
    wait = Op("w", "wait", ("y",), ())
    program = Program((op, wait), {"x": Buffer("x", 8), "y": Buffer("y", 8)}, ("x",)).verify()
    assert parse(to_text(program)) == program


def test_round_trip_of_all_odd_names_at_once():
    program = random_program(5, 40)
    suffix = dict(zip([b.name for b in program.buffers.values()], ODD * 9, strict=False))
    again = renamed(program, lambda name: name + suffix.get(name, " "))
    assert parse(to_text(again)) == again


UNREADABLE = {
    "input x": "needs its bytes",
    "input x: many": "many",
    "input x:": "ends too early",
    "input x: 64 @": "ends too early",
    "input": "ends too early",
    "input p: 16": "size already",
    "frobnicate f(p)": "expected one of input, resident, output, compute, view, start, wait",
    "compute f p": r"expected '\('",
    "compute f(p": r"expected '\)'",
    "compute f(p) -> q": "needs its bytes",
    "compute f(p) -> q: 4 r: 4": "unexpected 'r : 4' at the end",
    "compute f(p) & q: 4": "cannot read",
    'compute "f(p)': "cannot read",
    'compute "\\x"(p)': "escape",
    "start g(p) -> q: 4 | scatter group=dp ranks=4 nbytes=4 dtype=f32": "expected one of gather",
    "start g(p) -> q: 4 | gather group=dp ranks=four nbytes=4 dtype=f32": "four",
    "start g(p) -> q: 4 | gather group=dp nbytes=4 dtype=f32": "ranks",
    "start g(p) -> q: 4 | gather group=dp ranks=4 dtype=f32": "nbytes",
    "start g(p) -> q: 4 | gather group=dp ranks=4 nbytes=4 colour=red": "unknown field 'colour'",
    "start g(p) -> q: 4 | gather group dp": "expected '='",
    "start g(p) -> q: 4 |": "ends too early",
}


@pytest.mark.parametrize("line", UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_line(line):
    with pytest.raises(ProgramError, match=UNREADABLE[line]) as error:
        parse(f"# one\nresident p: 16\n\n  {line}  \noutput p\n")
    assert str(error.value).startswith(f"line 4: {line!r}: ")


def test_rules_hold_for_text_too():
    with pytest.raises(ProgramError, match="mm: buffer to read weight does not exist"):
        parse(EXAMPLE.replace("wait w(full) -> weight: 64 @full\n", ""))


def test_the_window_of_a_bucket_is_printed_if_it_has_one():
    line = "start g(p) -> f: 8 | gather group=dp ranks=4 nbytes=8 dtype=f32 bucket=b window=3\n"
    text = f"resident p: 8\n{line}wait w(f) -> a: 8 @f\noutput a\n"
    program = parse(text)
    assert program.ops[0].collective.window == 3
    assert to_text(program) == text
    assert "window" not in to_text(parse(text.replace(" window=3", "")))
