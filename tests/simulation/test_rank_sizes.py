"""Shards and collectives as formulas of the number of ranks, on the small representation."""

from __future__ import annotations

import pytest
import sympy

from inductor_passes.ir.cells import CellError, SizedProgram, Symbols
from inductor_passes.ir.text import parse
from simplefsdp.simulation.rank_sizes import with_ranks

RANKS = sympy.Symbol("ranks", positive=True, integer=True)


def step(rows: int, ranks: int) -> str:
    """Gather, use and reduce a parameter ``[rows, 1]``, 4 bytes per row, 2 on the wire."""
    each = -(-rows // ranks)
    full = each * ranks
    uneven = full != rows
    pad = f"compute pad(c) -> send: {2 * each}\n" if uneven else ""
    cut = f"view cut(w) -> weight: {2 * rows} @full\n" if uneven else ""
    pad_grad = f"compute fill(grad) -> padded: {4 * full}\n" if uneven else ""
    return f"""
input x: 40
resident p: {4 * each}
compute cast(p) -> c: {2 * each}
{pad}start g({"send" if uneven else "c"}) -> full: {2 * full} | gather group=dp ranks={ranks} nbytes={2 * full} dtype=bf16 fqns=w
wait wg(full) -> w: {2 * full} @full
{cut}compute mm(x, {"weight" if uneven else "w"}) -> grad: {4 * rows}
{pad_grad}start r({"padded" if uneven else "grad"}) -> part: {4 * each} | reduce group=dp ranks={ranks} nbytes={4 * full} dtype=f32 op=sum fqns=w
wait wr(part) -> got: {4 * each} @part
compute div(got) -> mean: {4 * each}
compute other(x) -> y: 40
output mean
output y
"""  # noqa: E501


def opened(rows: int, ranks: int, moved: frozenset[str] = frozenset()) -> SizedProgram:
    program, holds = with_ranks(parse(step(rows, ranks)), {"dp": RANKS}, {"w": rows}, moved)
    return SizedProgram(program, Symbols({"ranks": (RANKS,)}, frozenset(holds)))


@pytest.mark.parametrize(
    ("rows", "here", "there"), [(24, 4, 12), (24, 2, 24), (23, 4, 5), (25, 3, 8)]
)
def test_another_number_of_ranks(rows, here, there):
    found = opened(rows, here)
    assert found.at(ranks=there) == parse(step(rows, there))
    assert found.at(ranks=here) == parse(step(rows, here))


@pytest.mark.parametrize(("rows", "here", "there"), [(24, 4, 5), (23, 4, 23)])
def test_padding_that_comes_or_goes_is_another_graph(rows, here, there):
    with pytest.raises(CellError, match="trace it anew"):
        opened(rows, here).at(ranks=there)


def test_one_row_that_need_not_be_brought_to_the_front_is_another_graph():
    moved = frozenset({"w"})
    assert opened(24, 4, moved).at(ranks=12) == parse(step(24, 12))
    for here, there in ((12, 24), (24, 12)):
        with pytest.raises(CellError, match="trace it anew"):
            opened(24, here, moved).at(ranks=there)


def test_what_is_beside_a_shard_keeps_its_size():
    scaled = step(24, 4).replace("cast(p)", "cast(p, scale)")
    scaled = scaled.replace("input x: 40", "input x: 40\ninput scale: 4/4")
    program, holds = with_ranks(parse(scaled), {"dp": RANKS}, {"w": 24})
    sized = SizedProgram(program, Symbols({"ranks": (RANKS,)}, frozenset(holds)))
    found = sized.at(ranks=12)
    assert found.buffers["scale"].nbytes == 4
    assert found.buffers["p"].nbytes == 8


def test_copies_are_reduced_at_the_size_of_shards():
    text = """
resident p: {shard}
start g(p) -> full: 48 | gather group=shard ranks={n} nbytes=48 dtype=f32 fqns=w
wait wg(full) -> w: 48 @full
compute mm(w) -> grad: 48
start r(grad) -> part: {shard} | reduce group=shard ranks={n} nbytes=48 dtype=f32 op=sum fqns=w
wait wr(part) -> got: {shard} @part
start a(got) -> sum: {shard} | all_reduce group=copies ranks=2 nbytes={shard} dtype=f32 op=sum fqns=w
wait wa(sum) -> mean: {shard} @sum
output mean
"""  # noqa: E501
    traced = parse(text.format(shard=24, n=2))
    program, holds = with_ranks(traced, {"shard": RANKS / 2}, {"w": 12})
    found = SizedProgram(program, Symbols({"ranks": (RANKS,)}, frozenset(holds)))
    # The group of copies is not told to grow, but what it sends shrinks.
    assert found.at(ranks=8).buffers == parse(text.format(shard=12, n=4)).buffers
    assert [op.collective.ranks for _, op in found.at(ranks=8).starts()] == [4, 4, 2]
