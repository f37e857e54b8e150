"""Graphs whose sizes are open: where a plan holds, and what is said outside of there."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import get_args

import pytest
import sympy
import torch
from layers import Layers
from torch import nn

import simplefsdp
from inductor_passes.adapters.layouts import BucketLayout
from inductor_passes.ir.cells import SizedProgram, Symbols
from inductor_passes.ir.program import Program
from inductor_passes.ir.sizes import Size
from inductor_passes.ir.text import parse
from inductor_passes.machine.cluster import ClusterCost, Work
from inductor_passes.machine.presets import preset
from inductor_passes.size_range import (
    ENDLESS,
    OpenPlan,
    OpenSize,
    SizeSpan,
    edge,
    open_plan,
    range_of,
)
from simplefsdp import simple_fsdp
from simplefsdp.compiler import size_limits
from simplefsdp.compiler.observers import observing
from simplefsdp.compiler.size_limits import SizeLimits, describe_range
from simplefsdp.simulation.prediction import predict_rehearsed

ROWS, OTHER = sympy.symbols("rows other", positive=True, integer=True)
H100 = preset("h100")
KB = 1000
FLOPS = 10**10
TEXT = """
input x: 8000
resident w: 6250
start full(w) -> gathered: 50000 | gather group=dp ranks=8 nbytes=50000 dtype=float32 fqns=w
compute y(x) -> y: 8000
wait w_full(gathered) -> whole: 50000 @gathered
compute z(y, whole) -> z: 8000
output z
"""
OPTIONS = {"executor": "aot_eager", "cluster": "h100", "memory_budget_gb": 200e-6}


def sized(program: Program, **formulas: sympy.Expr) -> Program:
    """``program``, whose numbers of these buffers are Sizes."""
    buffers = {
        name: replace(buffer, nbytes=Size(buffer.nbytes, formulas[name]))
        if name in formulas
        else buffer
        for name, buffer in program.buffers.items()
    }
    return replace(program, buffers=buffers)


def open_plan_of(*holds: sympy.Basic) -> tuple[OpenPlan, OpenSize]:
    """A gather beside a compute whose time and memory are of 8 rows, or another number."""
    program = sized(parse(TEXT), x=KB * ROWS, y=KB * ROWS, z=KB * ROWS)
    opened = SizedProgram(program, Symbols({"rows": (ROWS,)}))
    work = {"y": Work(Size(8 * FLOPS, FLOPS * ROWS), Size(8 * KB, KB * ROWS), "matmul", "bfloat16")}
    size = OpenSize(ROWS, "L['x'].size()[0]", 8, 2, ENDLESS)
    return OpenPlan(opened, opened, work, ClusterCost(H100), (size,), frozenset(holds)), size


def test_the_last_size_that_fits():
    plan, size = open_plan_of()
    room = 100 * KB + 99
    found = range_of(plan, size, room, timed=False)
    # During the last compute x has been freed; y, z and what was gathered are alive.
    assert found.fits == SizeSpan(2, (room - 50 * KB) // (2 * KB)) == SizeSpan(2, 25)
    assert found.peak_nbytes == plan.peak_nbytes(rows=25) == 100 * KB <= room
    assert plan.peak_nbytes(rows=26) > room
    assert found.near is None and found.known == SizeSpan(2, ENDLESS)


def test_what_does_not_fit_where_it_was_planned():
    plan, size = open_plan_of()
    found = range_of(plan, size, 60 * KB, timed=True)
    assert found.fits is None and found.near is None and found.peak_nbytes == 66 * KB
    assert describe_range(found) == (
        "L['x'].size()[0] is open (8 here): it takes 6.6e-05 GB, where 6e-05 GB are allowed"
    )


def late_plan() -> tuple[OpenPlan, OpenSize]:
    """A wait before the compute costs much of few rows, and little of many."""
    plan, size = open_plan_of()
    late = plan.after.program.reorder(["full", "w_full", "y", "z"])
    return replace(plan, after=replace(plan.after, program=late)), size


def test_near_the_bound_with_many_rows():
    plan, size = late_plan()
    found = range_of(plan, size, 1 << 62, timed=True)
    times = plan.times_bound()
    assert times > 1.05 and found.factor == pytest.approx(1.05 * times)
    assert found.near is not None and found.near.most == ENDLESS
    assert all(plan.times_bound(rows=n) <= found.factor for n in (found.near.least, 8, 4096))
    assert plan.times_bound(rows=2) > found.factor and 2 < found.near.least < 8


def test_the_range_ends_where_the_formulas_do():
    plan, size = open_plan_of(sympy.Lt(ROWS, 20), sympy.Gt(3 * ROWS, 9))
    found = range_of(plan, size, 10**9, timed=False)
    assert found.known == found.fits == SizeSpan(4, 19)
    assert describe_range(found) == (
        "L['x'].size()[0] is open (8 here): fits 1 GB from 4 to 19 (8.8e-05 GB at 19); nothing is "
        "predicted of it but from 4 to 19"
    )


@pytest.mark.parametrize(("rank", "level"), [(0, logging.INFO), (1, logging.DEBUG)])
def test_a_call_far_from_its_bound_is_told_by_rank_0(rank, level, caplog, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    plan, size = late_plan()
    found = range_of(plan, size, 10**12, timed=True)
    planned = size_limits._Planned("forward", plan, (found,), 10**12, is_users=False)
    with caplog.at_level(logging.DEBUG, "simplefsdp"):
        planned.tell({"rows": 2})
    (told,) = caplog.records
    assert "times its lower bound" in told.getMessage() and told.levelno == level


LASTS = {1: (1, 3, 7, 8), 7: (1, 7, 8), 8: (8,), 9: (8, 9, 99), 100: (8, 9, 15, 16, 17, 99, 100)}


@pytest.mark.parametrize(("end", "last"), [(end, n) for end, lasts in LASTS.items() for n in lasts])
def test_edge(end, last):
    """Something holds at 8, and from there to the last one on the way to the end."""
    asked = []

    def holds(n: int) -> bool:
        asked.append(n)
        return n <= last if end > 8 else n >= last

    assert edge(holds, 8, end) == (min(last, end) if end > 8 else max(last, end))
    assert len(asked) <= 12 and all(min(8, end) <= n <= max(8, end) for n in asked)


def test_flat_buckets_travel_as_one(fake_mesh):
    """In what is told of open sizes, and in what is predicted of what was compiled."""
    (seen, _) = steps(compiled(simple_fsdp(Layers(), fake_mesh(8))), 6)
    for layout in get_args(BucketLayout):
        settings = replace(seen.settings, layout=layout)
        opened = open_plan(seen.rehearsal, settings, H100, ()).after.program
        predicted = predict_rehearsed("forward", seen.rehearsal, settings, H100, 0.0).after
        for program in (opened, predicted):
            members = max(op.collective.members for _, op in program.starts())
            assert (members == 1) == (layout == "flat")


def test_a_report_tells_the_ranges(fake_mesh, tmp_path):
    run = compiled(simple_fsdp(Layers(), fake_mesh(8)))
    with simplefsdp.inspect() as report:
        run(batch(6, None, 0)).square().mean().backward()
    graphs = report.to_json()["plans"][0]["graphs"]
    for graph, found in zip(graphs, report.graphs.values(), strict=True):
        (said,) = graph["ranges"]
        assert said == describe_range(*found.ranges) and said.count(" is open (6 here): fits ") == 1
        assert said in str(report)
    pytest.importorskip("plotly")
    report.save(tmp_path / "report.html")
    assert all(graph["ranges"][0] in (tmp_path / "report.html").read_text() for graph in graphs)


def steps(run, *rows: int, seq: int | None = None):
    """What each graph is that steps of so many rows compile."""
    found = []
    with observing(found.append):
        for n in rows:
            run(batch(n, seq)).square().mean().backward()
    return found


def batch(rows: int, seq: int | None = None, *dynamic: int) -> torch.Tensor:
    x = torch.randn(rows, 64) if seq is None else torch.randn(rows, seq, 64)
    for dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    return x


def compiled(model, **keywords):
    return torch.compile(model, backend="simplefsdp", fullgraph=True, options=OPTIONS, **keywords)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_range_is_what_fresh_traces_find(fake_mesh, caplog):
    """At its end the same plan fits, one further it does not; and calls are warned from there."""
    model = simple_fsdp(Layers(), fake_mesh(8))
    run = compiled(model)
    found = []
    with caplog.at_level(logging.INFO, "simplefsdp"), observing(found.append):
        run(batch(6, None, 0)).square().mean().backward()
    ends = {seen.part: seen.ranges[0].fits.most for seen in found}
    assert ends["backward"] < ends["forward"]
    for seen in found:
        assert seen.ranges[0].size.name in caplog.text and seen.ranges[0].size.hint == 6
    caplog.clear()
    most = ends["backward"]
    assert steps(run, 2, most) == [] and warnings(caplog) == []
    assert steps(run, most + 1, most + 2, most) == []
    (told,) = warnings(caplog)
    assert told.startswith("backward graph: compiled at ") and f" = 6, now {most + 1}: " in told
    assert "where memory_budget_gb=0.0002, and may run out of memory" in told
    static = compiled(model, dynamic=False)
    for n in sorted({n for end in ends.values() for n in (end, end + 1)}):
        for seen in steps(static, n):
            plan, within = seen.rehearsal.plan, ends[seen.part]
            assert seen.ranges == () and (plan.peak_nbytes <= 200 * KB) == (n <= within)
            if n == within:
                (peak,) = (s.ranges[0].peak_nbytes for s in found if s.part == seen.part)
                assert plan.peak_nbytes == peak


def test_a_static_graph_is_told_of_when_it_is_compiled(fake_mesh, caplog):
    run = compiled(simple_fsdp(Layers(), fake_mesh(8)), dynamic=False)
    steps(run, 6, 20)
    assert warnings(caplog) == []
    steps(run, 300)
    told = warnings(caplog)
    assert [text.split(":")[0] for text in told] == ["forward graph", "backward graph"]
    steps(run, 300)
    assert warnings(caplog) == told


def test_sizes_that_are_large_together(fake_mesh, caplog):
    """Each is within its range, of which the other is as it was."""
    run = compiled(simple_fsdp(Layers(), fake_mesh(8)))
    found = []
    with observing(found.append):
        run(batch(4, 6, 0, 1)).square().mean().backward()
    of_rows, of_seq = min(found, key=lambda seen: seen.ranges[0].fits.most).ranges
    rows, seq = of_rows.fits.most, of_seq.fits.most
    steps(run, rows, seq=6)
    steps(run, 4, seq=seq)
    assert warnings(caplog) == []
    steps(run, rows, seq=seq)
    assert f"now {rows}, " in warnings(caplog)[0] and f"now {seq}: " in warnings(caplog)[0]


def test_a_second_batch_makes_a_graph_dynamic(fake_mesh, caplog):
    """Its plan was made for the first batch; the range is of it, and it is told of at once."""
    run = compiled(simple_fsdp(Layers(), fake_mesh(8)))
    (first, *_), (second, *_) = steps(run, 6), steps(run, 300)
    assert first.ranges == () and second.ranges[0].fits is None
    assert second.rehearsal.planned == first.rehearsal.planned
    told = warnings(caplog)
    assert [text.split(":")[0] for text in told] == ["forward graph", "backward graph"]
    assert all("= 300, now 300: " in text for text in told)


def ranges(mesh, **options):
    run = torch.compile(
        simple_fsdp(Layers(), mesh),
        backend="simplefsdp",
        fullgraph=True,
        options={"executor": "aot_eager", **options},
    )
    found = []
    with observing(found.append):
        run(batch(6, None, 0)).square().mean().backward()
    return [seen.ranges for seen in found]


def test_without_a_budget_a_device_s_memory_is_told(fake_mesh):
    for (one,) in ranges(fake_mesh(8), cluster="h100"):
        assert one.fits is not None and 70e9 < one.room_nbytes < 72e9


@pytest.mark.parametrize("bucketing", ["auto", "manual"])
def test_without_a_budget_nobody_knows_a_host_s_memory(bucketing, fake_mesh):
    assert ranges(fake_mesh(8), bucketing=bucketing) == [(), ()]


def test_where_the_graph_takes_more_already_the_room_was_taken_too_small(fake_mesh, monkeypatch):
    """As with adapters: room is left for an optimizer's state of all parameters."""
    monkeypatch.setattr(size_limits, "room_nbytes", lambda program, cluster: -1)
    assert ranges(fake_mesh(8), cluster="h100") == [(), ()]


def scaled(x, n):
    return torch.tanh(x) * n


def test_a_number_that_is_no_size_may_change(solo_mesh, caplog):
    """A step counter, say; its bounds are infinite."""
    model, made = simple_fsdp(Layers(), solo_mesh), []
    run = torch.compile(
        lambda x, n: scaled(model(x), n), backend="simplefsdp", fullgraph=True, options=OPTIONS
    )
    with observing(made.append):
        for n in (3, 5, 8, -2, 0):
            x = batch(6)
            assert torch.equal(run(x, n), scaled(model(x), n))
    assert made and warnings(caplog) == []


def test_what_fails_before_a_call_is_told_once_and_ends_nothing(fake_mesh, caplog, monkeypatch):
    run = compiled(simple_fsdp(Layers(), fake_mesh(8)))
    run(batch(6, None, 0)).square().mean().backward()

    def fails(*args, **sizes):
        raise ZeroDivisionError

    monkeypatch.setattr(size_limits._Planned, "tell", fails)
    assert steps(run, 7, 8) == []
    assert [text.split(":")[0] for text in warnings(caplog)] == [
        "sizes of calls are not compared with the plan"
    ]


def test_a_static_graph_is_called_as_it_is(fake_mesh):
    gm = torch.fx.symbolic_trace(nn.Tanh())
    assert SizeLimits(gm).watching(gm) is gm


def test_a_nested_tensor_has_a_number_that_is_no_size(solo_mesh):
    """It stands for the lengths of the parts, and has no bounds."""
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    model.compile(backend="simplefsdp", options=OPTIONS)
    for rows in (3, 4):
        parts = [torch.rand(rows, 8), torch.rand(5, 8)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        losses = [run(x).values().square().sum() for run in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(model[0].weight.grad.to_local(), plain[0].weight.grad)
