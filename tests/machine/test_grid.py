"""Many cells at once are what each of them is by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
from programs import random_program

from inductor_passes.ir.cells import Formulas, SizedProgram, Symbols, with_plain_sizes
from inductor_passes.ir.program import Program
from inductor_passes.ir.sizes import Size
from inductor_passes.machine.cluster import ClusterCost, Work
from inductor_passes.machine.grid import OpenProgram, taken
from inductor_passes.machine.presets import preset
from inductor_passes.machine.simulate import memory, simulate

SEQ = sympy.Symbol("seq", positive=True, integer=True)
SYMBOLS = Symbols({"seq": (SEQ,)})
CELLS = [{"seq": n} for n in (3, 50, 1000, 1_000_000)]


def opened(seed: int) -> OpenProgram:
    """A random program of which every third number grows with the sequence."""
    program = random_program(seed, 40)
    hint = Size(3, SEQ)
    buffers = {
        name: replace(b, nbytes=b.nbytes * hint if at % 3 == 0 else b.nbytes * 3)
        for at, (name, b) in enumerate(program.buffers.items())
    }
    computes = [op.name for op in program.ops if op.kind == "compute"]
    work = {
        name: Work(hint * hint * 10**7 * at, hint * 10**5, "matmul", "bfloat16")
        for at, name in enumerate(computes)
        if at % 4
    }
    return OpenProgram(replace(program, buffers=buffers), work, SYMBOLS)


def alone(found: OpenProgram, cell: dict[str, int]) -> tuple[Program, ClusterCost]:
    """The program in one cell, and what it costs there."""
    numbers = [n for work in found.work.values() for n in (work.flops, work.nbytes)]
    at = iter(Formulas(numbers, SYMBOLS).at(cell))
    work = {k: replace(w, flops=next(at), nbytes=next(at)) for k, w in found.work.items()}
    program = SizedProgram(found.program, SYMBOLS).at(**cell)
    return program, ClusterCost(preset("h100"), {}, work)


@pytest.mark.parametrize("seed", range(12))
def test_time_and_memory(seed):
    found = opened(seed)
    many = taken(found, CELLS, [ClusterCost(preset("h100"))] * len(CELLS))
    for at, cell in enumerate(CELLS):
        program, cost = alone(found, cell)
        timeline, peak = simulate(program, cost), memory(program)
        assert many.total_us[at] == pytest.approx(timeline.total_us)
        assert many.exposed_us[at] == pytest.approx(timeline.stalled_us)
        assert many.compute_us[at] == pytest.approx(timeline.compute_us)
        assert many.wire_us[at] == pytest.approx(timeline.wire_us)
        assert many.peak_nbytes[at] == peak.peak_nbytes - peak.resident_nbytes
    assert len(set(many.total_us.tolist())) == len(CELLS)  # they differ


def test_a_program_without_ops_takes_no_time():
    nothing = OpenProgram(Program((), {}), {}, SYMBOLS)
    assert taken(nothing, CELLS, [ClusterCost(preset("h100"))] * 4).total_us.tolist() == [0.0] * 4


def test_plain_sizes_are_those_of_the_trace_and_have_no_formula():
    found = opened(0).program
    plain = with_plain_sizes(found)
    assert plain == SizedProgram(found, SYMBOLS).at(seq=3)
    assert any(type(b.nbytes) is Size for b in found.buffers.values())
    assert all(type(b.nbytes) is int for b in plain.buffers.values())
    sent = [op.collective for _, op in plain.starts()]
    assert sent and all(type(n) is int for c in sent for n in (c.nbytes, c.ranks))
