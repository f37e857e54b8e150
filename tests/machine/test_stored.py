"""What is stored once loops are repeated, share kernels and write over what they read."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from programs import random_program

from inductor_passes.ir.program import Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.fusion import Loop
from inductor_passes.machine.simulate import memory
from inductor_passes.machine.stored import RepeatLimits, as_stored

ADD = Loop(8, 8, elementwise=True)
COPY = Loop(8, 8)
EXP = Loop(8, 8, elementwise=True, heavy=True)
SUM = Loop(8, 1, "inner")
CAT = Loop(8, 8, stored=True)


def stored(lines: str, spent: Collection[str] = (), **loops: Loop) -> Program:
    lowered = as_stored(parse(lines), loops, spent)
    return lowered.verify()


def nbytes(program: Program, name: str) -> int:
    return program.buffers[name].nbytes


TWICE = """
    input x: 64
    input w: 64
    compute a(x) -> a: 64
    {between}
    compute mm(x, w) -> m: 64
    compute b(a, m) -> b: 64
    compute mm2(b, m) -> n: 64
    compute c(a, n) -> c: 64
    compute mm3(c, n) -> y: 64
    output y
"""


def test_a_cheap_loop_is_repeated_and_what_it_reads_is_kept():
    program = stored(TWICE.format(between=""), ["x"], a=ADD, b=ADD, c=ADD)
    assert nbytes(program, "a") == 0
    reads = {op.name: op.reads for op in program.ops}
    assert "x" in reads["b"] and "x" in reads["c"]
    assert nbytes(program, "b") == nbytes(program, "c") == 64


@pytest.mark.parametrize(
    ("between", "loop"),
    [("compute mm0(a, w) -> o: 64", ADD), ("", EXP), ("", Loop(64, 8, "inner")), ("", CAT)],
    ids=["a kernel reads it", "it takes long", "it reduces", "it is stored"],
)
def test_other_loops_are_stored(between: str, loop: Loop):
    program = stored(TWICE.format(between=between), a=loop, b=ADD, c=ADD)
    assert nbytes(program, "a") == 64
    assert "x" not in {op.name: op.reads for op in program.ops}["c"]


def test_it_is_repeated_through_views_and_through_what_is_repeated_itself():
    program = stored(
        """
        input x: 64
        compute a(x) -> a: 64
        view v(a) -> v: 64 @a
        compute b(v) -> b: 64
        compute mm(x) -> m: 64
        compute c(b, m) -> c: 64
        compute d(b, m) -> d: 64
        compute mm2(c, d) -> y: 64
        output y
        """,
        a=ADD,
        b=ADD,
        c=COPY,
        d=COPY,
    )
    assert nbytes(program, "a") == nbytes(program, "v") == nbytes(program, "b") == 0
    assert {op.name: op.reads for op in program.ops}["d"] == ("b", "m", "x")


@pytest.mark.parametrize(("loop", "left"), [(EXP, 0), (CAT, 64)])
def test_what_stays_within_a_kernel_is_stored_only_if_it_has_to_be(loop: Loop, left: int):
    program = stored(
        "input x: 64\ncompute a(x) -> a: 64\ncompute b(a) -> b: 64\noutput b", a=loop, b=ADD
    )
    assert nbytes(program, "a") == left


@pytest.mark.parametrize(("limit", "left"), [("reads", 64), ("ops", 64), (None, 0)])
def test_up_to_limits(limit: str | None, left: int):
    lines = """
        input x: 64
        input y: 64
        compute a(x, y) -> a: 64
        compute b(a) -> b: 64
        compute mm(b) -> m: 64
        compute c(a, m) -> c: 64
        compute mm2(c) -> z: 64
        output z
    """
    limits = RepeatLimits(**{limit: 1}) if limit else RepeatLimits()
    program = as_stored(parse(lines), {"a": ADD, "b": COPY, "c": COPY}, (), limits)
    assert nbytes(program, "a") == left


def test_a_long_chain_is_stored_where_it_reads_too_much():
    lines = "input x0: 64\ncompute a0(x0) -> a0: 64\n"
    lines += "".join(
        f"input x{i}: 64\ncompute a{i}(a{i - 1}, x{i}) -> a{i}: 64\n" for i in range(1, 12)
    )
    inputs = [line for line in lines.splitlines() if line.startswith("input")]
    rest = [line for line in lines.splitlines() if not line.startswith("input")]
    program = stored(
        "\n".join([*inputs, *rest, "compute mm(a11) -> y: 64", "output y"]),
        **{f"a{i}": ADD for i in range(12)},
    )
    reads = {op.name: set(op.reads) for op in program.ops}
    assert {"x0", "x7"} <= reads["a8"], "it repeats what one buffer less would still be"
    assert "x0" not in reads["a11"]


OVER = """
    input x: 64
    {first}
    compute f(m) -> y: {size}
    {later}
    compute mm2(y) -> z: 64
    output z
"""
MADE = "compute mm(x) -> m: 64"


def over(
    first: str = MADE, later: str = "", size: str = "64", loop: Loop = ADD, spent: str = ""
) -> bool:
    lines = OVER.format(first=first, later=later, size=size)
    program = stored(lines, spent.split(), f=loop)
    return program.buffers["y"].storage != "y"


def test_what_is_read_for_the_last_time_is_written_over():
    assert over()
    assert over(first=MADE + "\nview v(m) -> v: 64 @m\ncompute mm1(v) -> o: 64")
    program = stored(OVER.format(first=MADE, later="", size="64"), f=ADD)
    assert memory(program).live_nbytes == (128, 64, 128)


def test_what_is_not_written_over():
    assert not over(later="compute mm1(m) -> o: 64")  # it is read again
    assert not over(size="32")
    assert not over(size="64/2")
    assert not over(loop=COPY)
    sent = "start g(x) -> full: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32"
    assert not over(first=sent + "\nwait w(full) -> m: 64 @full")


def test_an_input_is_written_over_if_nobody_else_needs_it():
    first = "compute mm(x) -> o: 64\nview m(x) -> m: 64 @x"
    assert not over(first)
    assert over(first, spent="x")


def test_one_buffer_is_written_over_once():
    program = stored(
        """
        input x: 64
        compute mm(x) -> m: 64
        compute a(m) -> a: 64
        compute b(m) -> b: 64
        compute mm2(a, b) -> y: 64
        output y
        """,
        a=ADD,
        b=ADD,
    )
    assert [program.buffers[name].storage for name in "ab"] == ["m", "b"]
    assert memory(program).live_nbytes == (128, 64, 128, 192)


def test_a_buffer_is_written_over_again_and_again():
    program = stored(
        """
        input x: 64
        compute mm(x) -> m: 64
        compute a(m) -> a: 64
        compute s(a) -> s: 8
        compute b(a, s) -> b: 64
        compute mm2(b) -> y: 64
        output y
        """,
        a=EXP,
        s=SUM,
        b=EXP,
    )
    assert program.buffers["a"].nbytes == 0, "one kernel computes it and what it is read for"
    assert program.buffers["b"].storage == "m"


@pytest.mark.parametrize("seed", range(20))
def test_of_any_program_as_many_bytes_are_left_or_fewer(seed: int):
    program = random_program(seed, 12)
    assert as_stored(program, {}) == program
    loops = {op.name: ADD for op in program.ops[::2] if op.kind == "compute"}
    lowered = as_stored(program, loops).verify()
    assert [op.name for op in lowered.ops] == [op.name for op in program.ops]
    assert sum(lowered.storage_nbytes.values()) <= sum(program.storage_nbytes.values())
