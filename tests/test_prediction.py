"""A step on paper: what it takes on a rank, in every mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes import fx
from inductor_passes.buckets import assign_by_module
from inductor_passes.presets import preset
from inductor_passes.rehearsal import Settings, room_nbytes
from simplefsdp import simple_fsdp
from simplefsdp.backend import fqn_of
from simplefsdp.prediction import StepPrediction, predict_step
from simplefsdp.trace import trace

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
    assert step.step_us == pytest.approx(
        step.optimizer_us + sum(g.timeline.compute_us for g in step.graphs) + step.exposed_us
    )
    assert step.lower_bound_us <= step.step_us


@pytest.mark.parametrize(("reduce_dtype", "cast_nbytes"), [(torch.float32, 0), (None, 2)])
def test_room_beside_shards(fake_mesh, reduce_dtype, cast_nbytes):
    """Of all parameters: shards and two moments in fp32; of gradients, what a cast adds."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    simple_fsdp(model, fake_mesh(4), mp_policy=policy)
    step, h100 = trace(model, torch.ones(ROWS, WIDTH)), preset("h100")
    elements = 2 * (WIDTH * WIDTH + WIDTH) // 4
    for graph, nbytes in ((step.forward.graph, 12), (step.backward.graph, 12 + cast_nbytes)):
        room = room_nbytes(fx.read(graph, fqn_of).program, h100)
        assert room == int(0.9 * h100.memory_gb * 1e9) - nbytes * elements


def test_many_models_are_traced_in_one_process(fake_mesh):
    mesh = fake_mesh(4)
    assert len({predicted(mesh, "fully_shard").step_us for _ in range(10)}) == 1


def test_what_is_left_open_cannot_be_traced(fake_mesh):
    with pytest.raises(ValueError, match=r"0.weight: wrapped with reshard_after_forward='auto'"):
        predicted(fake_mesh(4), "fully_shard", "auto")
