"""A step on paper: what it takes on a rank, in every mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.ir.buckets import assign_by_module
from inductor_passes.machine.presets import preset
from inductor_passes.machine.simulate import memory
from inductor_passes.passes import rehearse
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.rehearsal import Auto, Settings, room_nbytes
from simplefsdp import simple_fsdp
from simplefsdp.provenance import carried_fqn as fqn_of
from simplefsdp.simulation.prediction import StepPrediction, predict_step
from simplefsdp.simulation.trace import trace

WIDTH, ROWS = 256, 8


def predicted(mesh, mode: str, reshard: bool | str = True) -> StepPrediction:
    with FakeTensorMode():
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Tanh())
        simple_fsdp(model, mesh, mode=mode, reshard_after_forward=reshard)
        step = trace(model, torch.ones(ROWS, WIDTH))
    nbytes = sum(p.to_local().numel() * 4 for p in model.parameters())
    return predict_step(step, Settings(assign_by_module(step.fqns)), preset("h100"), nbytes)


def test_parameters_count_once(fake_mesh):
    """Whole on every rank, they are there between steps, and no activations."""
    weight, activation = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    use = predicted(fake_mesh(4), "replicate").peak_by_use()
    assert use["parameter shards"] == 4 * weight and use["optimizer state"] == 8 * weight
    assert use["activations"] <= 8 * activation < weight
    assert use["gathered parameters"] == 0


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_the_parts_add_up(fake_mesh, mode):
    step = predicted(fake_mesh(4), mode)
    assert step.peak_nbytes == sum(step.peak_by_use().values())
    computed_us = sum(g.timeline.compute_us + g.timeline.slowed_us for g in step.graphs)
    assert step.step_us == pytest.approx(step.optimizer_us + computed_us + step.exposed_us)
    assert step.lower_bound_us <= step.step_us


def test_room_beside_shards(fake_mesh):
    """Of all parameters: shards and two moments in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    simple_fsdp(model, fake_mesh(4), mp_policy=policy)
    step, h100 = trace(model, torch.ones(ROWS, WIDTH)), preset("h100")
    elements = 2 * (WIDTH * WIDTH + WIDTH) // 4
    for graph in (step.forward.graph, step.backward.graph):
        room = room_nbytes(fx.read(graph, fqn_of).program, h100)
        assert room == int(0.9 * h100.memory_gb * 1e9) - 12 * elements


@pytest.mark.slow
def test_many_models_are_traced_in_one_process(fake_mesh):
    mesh = fake_mesh(4)
    assert len({predicted(mesh, "fully_shard").step_us for _ in range(10)}) == 1


def test_what_is_left_open_cannot_be_traced(fake_mesh):
    with pytest.raises(ValueError, match=r"0.weight: wrapped with reshard_after_forward='auto'"):
        predicted(fake_mesh(4), "fully_shard", "auto")


class Uneven(nn.Module):
    """Shards of other sizes on each rank, some that backward is given and has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.narrow = nn.Linear(9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.narrow(x)


@pytest.mark.slow(quick=["dtypes0"])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.bfloat16, None), (None, None)]
)
def test_all_ranks_plan_from_the_same(fake_mesh, dtypes):
    policy = MixedPrecisionPolicy(*dtypes)
    found = []
    for rank in (0, 3):
        torch._dynamo.reset()
        model = simple_fsdp(Uneven(), fake_mesh(4, rank=rank), mp_policy=policy)
        step = trace(model, torch.ones(2, 9))
        dist.destroy_process_group()
        for graph in (step.forward.graph, step.backward.graph):
            reading = fx.read(graph, fqn_of)
            cost = cost_of(reading, preset("h100"))
            program, fixed = rank_invariant(fused_program(reading), cost)
            # A rank whose shards are smaller pads them and cuts them again, which counts nothing.
            counts = [
                (op.sends, fixed.op_us.get(op.name), nbytes)
                for op, nbytes in zip(program.ops, memory(program).live_nbytes, strict=True)
                if op.sends or fixed.op_us.get(op.name)
            ]
            found.append((counts, memory(program).peak_nbytes))
    assert found[:2] == found[2:]


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(None, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_planned_memory_is_what_is_predicted_of_even_shards(fake_mesh, param_dtype, reduce_dtype):
    """Shards are cast before they are gathered, or gradients after they are reduced."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    simple_fsdp(model, fake_mesh(4), mp_policy=policy)
    step = trace(model, torch.ones(1, 64))
    settings = Settings(assign_by_module(step.fqns), auto=Auto(preset("h100"), 10**9))
    found = predict_step(step, settings, preset("h100"), 0)
    for gm, graph in zip((step.forward, step.backward), found.graphs, strict=True):
        plan = rehearse(gm, settings, fqn_of).plan
        assert plan is not None and plan.peak_nbytes == graph.beside_shards_nbytes
