"""A step that is traced once, its sizes left open, is what a fresh trace is at any of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.cells import CellError, Formulas, SizedProgram, Symbols
from inductor_passes.ir.program import Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.cluster import ClusterCost
from inductor_passes.machine.presets import preset
from inductor_passes.machine.simulate import memory, simulate
from inductor_passes.planner.plan import scheduled
from simplefsdp import simple_fsdp
from simplefsdp.launcher.ranks import fake_ranks
from simplefsdp.models.layout import make_mesh, plan_layout
from simplefsdp.models.options import ModelOptions, ParallelOptions
from simplefsdp.simulation.extrapolate_depth import trace_deep
from simplefsdp.simulation.trace import TracedStep, trace
from simplefsdp.sweep.cells import Cell, cell_steps
from simplefsdp.sweep.models import SweptModel, _are_alike, swept_llama, swept_target
from simplefsdp.sweep.plans import plans_of
from simplefsdp.sweep.traced import OpenGraph, OpenStep, open_step
from simplefsdp.sweep.traces import CellSweep

H100 = preset("h100")


def llama(recomputed: str = "none", layers: int = 1, **parallel) -> CellSweep:
    spread = ParallelOptions(mixed_precision="bf16", **parallel)
    return CellSweep(swept_llama(ModelOptions("debug", recomputed), spread, layers), spread, H100)


def fresh(sweep: CellSweep, cell: Cell) -> OpenStep:
    """The step as it is traced with the cell's own sizes."""
    with fake_ranks(cell.ranks):
        layout = plan_layout(sweep.parallel, cell.ranks, H100.ranks_per_node)
        mesh = make_mesh(layout, sweep.parallel, "cpu")

        def traced(depth: int) -> tuple[TracedStep, nn.Module]:
            model = sweep.model.build(depth, mesh)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")
                inputs, by_name = sweep.model.inputs(cell.batch, cell.seq)
                step = trace(model, *inputs, keywords=by_name, averages=H100.averages)
                return step, model

        step, _ = trace_deep(traced, sweep.model.layers, sweep.model.depth)
        return open_step(step, {}, {}, 1)


def told(program: Program) -> list[object]:
    """What a program does, in order, without names, which differ, without symbols' own ops, and
    without views of all of a tensor."""

    def sizes(names: tuple[str, ...]) -> list[int]:
        return [n for name in names if (n := program.buffers[name].nbytes)]

    return [
        (
            op.kind,
            sizes(op.reads),
            sizes(op.writes),
            op.collective and replace(op.collective, group=""),
        )
        for op in program.ops
        if op.kind != "view" or sizes(op.writes) not in ([], sizes(op.reads))
    ]


def works(graph: OpenGraph, step: OpenStep, cell: Cell) -> list[object]:
    numbers = [n for work in graph.work.values() for n in (work.flops, work.nbytes)]
    if step.symbols.by_name.keys() >= {"seq"}:
        numbers = Formulas(numbers, step.symbols).at(cell._asdict())
    found = iter(numbers)
    return [replace(w, flops=next(found), nbytes=next(found)) for w in graph.work.values()]


def compare(sweep: CellSweep, base: Cell, *cells: Cell) -> OpenStep:
    step = sweep._trace(base)
    for cell in cells:
        expected = fresh(sweep, cell)
        for ours, theirs in zip(step.graphs, expected.graphs, strict=True):
            for mine, its in ((ours.read, theirs.read), (ours.program, theirs.program)):
                at = SizedProgram(mine, step.symbols).at(**cell._asdict())
                assert told(at) == told(its)
                assert len(at.resident) == len(its.resident)
            assert works(ours, step, cell) == works(theirs, expected, cell)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_llama(recomputed):
    step = compare(llama(recomputed), Cell(3, 56, 4), Cell(1, 64, 2), Cell(4, 100, 8))
    assert step.parameters_nbytes.formula.free_symbols == {*step.symbols.by_name["ranks"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "cell"), [(Cell(3, 56, 3), Cell(2, 100, 6)), (Cell(3, 56, 96), Cell(1, 48, 192))]
)
def test_rows_that_do_not_divide(base, cell):
    compare(llama(), base, cell)


@pytest.mark.slow
def test_copies_of_shards():
    compare(llama(mode="hybrid_shard", shard_size=2), Cell(3, 56, 4), Cell(2, 64, 8))


@pytest.mark.slow
def test_no_shards():
    compare(llama(mode="replicate"), Cell(3, 56, 4), Cell(2, 64, 8))


@pytest.mark.slow
def test_tensor_parallel():
    compare(llama(tp=2), Cell(3, 56, 8), Cell(5, 64, 16))


@pytest.mark.slow
def test_parameters_that_are_kept():
    compare(llama(reshard_after_forward=False), Cell(3, 56, 4), Cell(2, 64, 2))


@pytest.mark.slow
def test_layers_that_are_not_traced():
    compare(llama(layers=9), Cell(3, 56, 4), Cell(2, 64, 2))


class _Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(16, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(pictures))))
        return self.head(x.mean((2, 3))).square().mean()


def swept(build, inputs) -> CellSweep:
    def wrapped(depth: int, mesh) -> nn.Module:
        with torch.device("meta"):
            model = build()
        return simple_fsdp(model, mesh)

    positional = SweptModel("model", wrapped, lambda *sizes: (inputs(*sizes), {}), "layers", 1)
    return CellSweep(positional, ParallelOptions(), H100)


@pytest.mark.slow
def test_convolutions():
    sweep = swept(_Pictures, lambda batch, seq: (torch.zeros(batch, 3, seq, seq),))
    compare(sweep, Cell(3, 30, 2), Cell(4, 32, 2), Cell(2, 18, 2))


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.15",
    reason="one op's result is counted where sizes are open, and not else",
)
def test_experts_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.MixtralForCausalLM(config)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits.square().mean()

    sweep = swept(Loss, lambda batch, seq: (torch.zeros(batch, seq, dtype=torch.long),))
    compare(sweep, Cell(3, 20, 2), Cell(2, 24, 4), Cell(3, 16, 4))


@pytest.mark.slow
def test_time_and_memory_are_those_of_each_plan_by_itself():
    sweep = llama("selective")
    cells = [Cell(1, 64, 2), Cell(16, 2048, 64)]
    many = sweep.steps(cells)
    for cell, found in zip(cells, many, strict=True):
        step, candidates = sweep.traced[0]
        nodes = {group: sweep._nodes_of(cell.ranks)[dim] for group, dim in step.dim_of.items()}
        total = exposed = peak = 0.0
        for graph, plans in zip(step.graphs, candidates, strict=True):
            work = dict(zip(graph.work, works(graph, step, cell), strict=True))
            tried = []
            for plan in plans:
                program = SizedProgram(plan.program, step.symbols).at(**cell._asdict())
                timeline = simulate(program, ClusterCost(H100, nodes, work))
                taken = memory(program)
                nbytes = taken.peak_nbytes - taken.resident_nbytes
                tried.append((timeline.total_us, timeline.stalled_us, nbytes))
            # The fastest of those that take no more memory than the first, that by module.
            us, stalled_us, nbytes = min(one for one in tried if one[2] <= tried[0][2])
            total, exposed, peak = total + us, exposed + stalled_us, max(peak, nbytes)
        (shards,) = Formulas([step.parameters_nbytes], step.symbols).at(cell._asdict())
        assert found.exposed_us == pytest.approx(exposed)
        assert found.step_us > total
        assert found.peak_nbytes == peak + 3 * shards


@pytest.mark.slow
def test_the_plan_by_module_is_that_of_the_planner():
    sweep = llama()
    sweep.steps([Cell(2, 64, 4)])
    step, plans = sweep.traced[0]
    for graph, candidates in zip(step.graphs, plans, strict=True):
        buckets = plan_buckets(graph.program, assign_by_module(list(step.fqns)))
        assert candidates[0].program.ops == scheduled(graph.program, buckets).ops
        assert len(candidates) > 1
        assert len(plans_of(step, graph, "manual")) == 1
        assert plans_of(step, graph, "none")[0].program.ops == graph.program.ops


@pytest.mark.slow
def test_a_trace_answers_for_all_cells_that_it_holds_for():
    sweep = llama()
    sweep.steps([Cell(b, s, r) for b in (1, 2, 8) for s in (64, 128) for r in (2, 4, 8, 64)])
    assert len(sweep.traced) == 1
    sweep.steps([Cell(1, 64, 3), Cell(1, 64, 6)])  # rows that do not divide by 3
    assert len(sweep.traced) == 2


@pytest.mark.slow
def test_more_memory_is_taken_by_a_larger_batch_and_less_by_more_ranks():
    sweep = llama()
    cells = [Cell(1, 64, 2), Cell(2, 64, 2), Cell(1, 64, 4)]
    peaks = {step.cell: step.peak_nbytes for step in sweep.steps(cells)}
    assert peaks[Cell(2, 64, 2)] > peaks[Cell(1, 64, 2)] > peaks[Cell(1, 64, 4)]


def test_code_that_decides_by_a_size_is_told():
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * int(x.shape[0])).sum() * [*range(9)][x.shape[0]]

    sweep = swept(Decides, lambda batch, seq: (torch.zeros(batch, seq, 4),))
    with pytest.raises(CellError, match="batch: the model's code decides by it"):
        sweep._trace(Cell(3, 20, 2))
    with pytest.raises(CellError, match=r"decides by it.*`simplefsdp inspect` of a --model with"):
        sweep.steps([Cell(3, 20, 2)])


def test_one_batch_that_becomes_a_number_keeps_no_other_from_being_traced(monkeypatch):
    sweep = linear()
    trace_of = sweep._trace

    def traced(cell: Cell) -> OpenStep:
        if cell.batch == 3:
            raise CellError("batch: the model's code decides by it")
        return trace_of(cell)

    monkeypatch.setattr(sweep, "_trace", traced)
    (found,) = sweep.steps([Cell(4, 1, 2)])
    assert found.cell == Cell(4, 1, 2) and len(sweep.traced) == 1


# The second gather of the module needs what the first brought.
DEPENDING = """
input x: 64
resident p: 16
start g(p) -> full_p: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 fqns=fc.weight
wait w(full_p) -> weight: 64 @full_p
compute half(weight) -> q: 8
start h(q) -> full_q: 32 | gather group=dp ranks=4 nbytes=32 dtype=f32 fqns=fc.bias
wait u(full_q) -> bias: 32 @full_q
compute mm(x, weight, bias) -> y: 64
output y
"""


@pytest.mark.parametrize("bucketing", ["manual", "auto"])
def test_where_no_plan_by_module_can_be_had_the_program_itself_is_first(bucketing):
    program = parse(DEPENDING)
    graph = OpenGraph("forward", program, program, {})
    names = {name: (sympy.Symbol(name, positive=True, integer=True),) for name in Cell._fields}
    fqns = ("fc.weight", "fc.bias")
    step = OpenStep((graph,), Symbols(names), fqns, 16, {"dp": "dp"})
    candidates = plans_of(step, graph, bucketing)
    assert candidates[0].program == program
    assert bucketing == "auto" or len(candidates) == 1
    (found,) = cell_steps(step, [candidates], [Cell(1, 64, 4)], H100, lambda ranks: {"dp": 1})
    assert found.wire_us > 0 and found.fits


def linear() -> CellSweep:
    def build(mesh) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return _Mean(simple_fsdp(model, mesh))

    spread = ParallelOptions(mixed_precision="none")
    return CellSweep(
        swept_target("linear", build, lambda: ((torch.ones(2, 64),), {})), spread, H100
    )


class _Mean(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).mean()


@pytest.mark.slow
def test_one_rank_does_not_answer_for_several():
    """It sends nothing; so in whichever order they are asked for, they are traced apart."""
    alone, several = Cell(4, 1, 1), Cell(4, 1, 8)
    apart = [linear().steps([cell])[0] for cell in (alone, several)]
    assert apart[0].wire_us == 0 < apart[1].wire_us
    for cells in ((alone, several), (several, alone)):
        sweep = linear()
        found = dict(zip(cells, sweep.steps(cells), strict=True))
        assert [found[alone], found[several]] == apart
        assert len(sweep.traced) == 2


def test_layers_of_transformers_that_differ_late_are_all_traced():
    def config(**changes):
        return Qwen2MoeConfig(
            num_hidden_layers=9,
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=2,
            vocab_size=64,
            **changes,
        )

    with torch.device("meta"):
        even, odd = (
            AutoModelForCausalLM.from_config(config(**changes))
            for changes in ({}, {"mlp_only_layers": [8]})
        )
    assert _are_alike(even, None, 9) and _are_alike(odd, None, 8)
    assert not _are_alike(odd, None, 9)
    assert not _are_alike(even, ["full"] * 8 + ["sliding"], 9)
