"""Units of computes: which ops they are of, and that collectives stay out of them."""

from __future__ import annotations

import pytest
from programs import layers

from inductor_passes.adapters.units import Part, Piece, in_units, parts_of, pieces_of
from inductor_passes.ir.text import parse, to_text
from inductor_passes.transform.order import OverlapPolicy, overlap

FORWARD = """
resident p0: 16
resident p1: 16
input x: 64
compute cast0(p0) -> c0: 8
start g0(c0) -> b0: 64 | gather ranks=4 nbytes=64 fqns=layers.0.w
wait w0(b0) -> full0: 64 @b0
compute up0(x, full0) -> h0: 64
compute down0(h0) -> y0: 64
start g1(p1) -> b1: 64 | gather ranks=4 nbytes=64 fqns=layers.1.w
wait w1(b1) -> full1: 64 @b1
compute up1(y0, full1) -> h1: 64
compute odd(h1) -> i1: 64
compute down1(i1) -> y1: 64
output y1
"""

BACKWARD = """
resident p: 16
input dy: 64
compute first(dy) -> d1: 64
compute wgrad(d1) -> dw: 64
start r(dw) -> s: 16 | reduce ranks=4 nbytes=64 fqns=layers.1.w
wait rw(s) -> grad: 16 @s
compute divide(grad) -> scaled: 16
compute second(d1) -> d0: 64
compute other(d0) -> out: 64
output scaled
output out
"""


def part_of(op: str) -> Part | None:
    return Part(f"layers.{op[-1]}", "") if op[-1].isdigit() else None


def with_units(program, of, heavy=()):
    return in_units(program, pieces_of(program, of, heavy))


def units(text: str, of=part_of, heavy=()) -> dict[str, int]:
    program = with_units(parse(text), of, heavy)
    return {op.name: op.unit for op in program.ops if op.kind == "compute"}


def in_layer(*ops: str):
    return lambda op: Part("layers.1" if op in ops else "layers.0", "")


def test_a_unit_for_each_layer_and_none_for_what_prepares_a_gather():
    assert units(FORWARD) == {"cast0": 0, "up0": 1, "down0": 1, "up1": 2, "odd": 2, "down1": 2}


def test_what_follows_a_reduce_is_in_no_unit():
    found = units(BACKWARD, in_layer("first", "wgrad"))
    assert found == {"first": 1, "wgrad": 1, "divide": 0, "second": 2, "other": 2}


def test_collectives_go_between_units():
    """The second gather would start, and the reduce, between the computes of one layer."""
    program = with_units(parse(FORWARD), part_of)
    order = overlap(program, OverlapPolicy(1))
    assert " ".join(order) == "cast0 g0 w0 up0 down0 g1 w1 up1 odd down1"
    program = with_units(parse(BACKWARD), in_layer())
    order = overlap(program, OverlapPolicy())
    assert " ".join(order) == "first wgrad second other r rw divide"
    program = parse(BACKWARD)
    order = overlap(program, OverlapPolicy())
    assert " ".join(order) == "first wgrad r second other rw divide"


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("limits", [(1, 1), (2, 2), (3, 1)])
def test_no_collective_is_between_two_of_one_unit(part, limits):
    program = with_units(parse(layers(6, part)), part_of)
    order = overlap(program, OverlapPolicy(*limits))
    program.reorder(order).verify()
    ops = [program.ops[program.index[name]] for name in order]
    sequence = [op.unit or op.kind for op in ops if op.unit or op.kind in ("start", "wait")]
    runs = [x for i, x in enumerate(sequence) if not i or x != sequence[i - 1]]
    found = [x for x in runs if isinstance(x, int)]
    assert len(found) == len(set(found)) == 6


def test_a_program_with_units_is_printed_and_parsed():
    program = with_units(parse(FORWARD), part_of)
    assert "compute up1(y0, full1) -> h1: 64 | unit=2" in to_text(program)
    assert parse(to_text(program)) == program


CHILDREN = """
input x: 8
compute embed(x) -> e: 8
compute norm(e) -> n: 8
compute attention(n) -> a: 8
compute add(a, e) -> s: 8
compute norm2(s) -> n2: 8
compute mlp(n2) -> m: 8
compute scale(m) -> c: 8
compute add2(c, s) -> y: 8
compute head(y) -> z: 8
output z
"""


def test_a_layer_is_cut_behind_what_multiplies_matrices():
    child = {"norm": "n1", "attention": "attn", "add": "", "norm2": "n2", "mlp": "mlp"}
    child |= {"scale": "scale", "add2": ""}

    def of(op: str) -> Part:
        return Part("layers.0", child[op]) if op in child else Part("", op)

    outside = {"embed": 0, "head": 0}
    layer = dict.fromkeys(child, 1)
    assert units(CHILDREN, of) == outside | layer
    cut = dict.fromkeys(("add", "norm2", "mlp", "scale", "add2"), 2)
    assert units(CHILDREN, of, ("embed", "attention", "mlp", "head")) == outside | layer | cut


def test_a_sum_goes_with_the_loop_that_reads_it():
    """Also to the next layer, or out of layers; not if something of it is sent."""
    text = CHILDREN.replace("compute head(y) -> z: 8", "compute mean(y) -> z: 8")
    child = dict.fromkeys(("norm", "attention", "add"), "one") | dict.fromkeys(
        ("norm2", "mlp", "scale", "add2"), "two"
    )

    def of(op: str) -> Part:
        layer = {"one": "layers.0", "two": "layers.1"}.get(child.get(op, ""), "")
        return Part(layer, child.get(op, op))

    found = units(text, of, ("attention", "mlp"))
    first, second = ("norm", "attention"), ("add", "norm2", "mlp")
    last = dict.fromkeys(("embed", "scale", "add2", "mean"), 0)
    assert found == last | dict.fromkeys(first, 1) | dict.fromkeys(second, 2)
    sent = "start r(s) -> t: 2 | reduce ranks=4 nbytes=8 fqns=w\nwait rw(t) -> g: 2 @t\noutput g"
    assert units(text + sent, of, ("attention", "mlp"))["add"] == 1


def test_a_half_may_be_cut_before_each_op_that_multiplies_matrices():
    """And it knows of each piece which it is: halves that are alike are cut alike."""
    names = ["norm", "attention", "add", "norm2", "mlp", "scale", "add2"]
    child = dict.fromkeys(names, "one")

    def of(op: str) -> Part:
        return Part("layers.0", child[op]) if op in child else Part("", op)

    heavy = ("attention", "norm2", "scale", "head")
    found = units(CHILDREN, of, heavy)
    assert [found[name] for name in names] == [1, 1, 1, 2, 2, 3, 3]
    pieces = pieces_of(parse(CHILDREN), of, heavy)
    assert [pieces[name] for name in names] == [Piece(1, at) for at in (0, 0, 0, 1, 1, 2, 2)]


def test_paths_of_modules():
    part = parts_of(["layers.3", "decoder.layers.3", "layers.31"])
    assert part("self.layers.3.mlp.up") == Part("layers.3", "mlp")
    assert part("self.model.layers.31") == Part("layers.31", "")
    assert part("self.decoder.layers.3.mlp") == Part("decoder.layers.3", "mlp")
    assert part("self.decoder.norm").module == ""
