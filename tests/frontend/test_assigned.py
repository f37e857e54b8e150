"""``param.data = values``, which a DTensor loses: it is told, and nothing else is taken for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.utils import vector_to_parameters

import simplefsdp
from simplefsdp import simple_fsdp

RUNS = {"eager": None, "compiled": {"executor": "aot_eager"}}


def wrapped(mesh, how: str) -> nn.Module:
    torch._dynamo.reset()
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh)
    if (options := RUNS[how]) is not None:
        model.compile(backend="simplefsdp", options=options)
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()


@pytest.mark.parametrize("how", RUNS)
def test_weights_that_an_optimizer_puts_back_by_data(solo_mesh, how):
    """As the SAM that most copy does, between its two steps."""
    model = wrapped(solo_mesh, how)
    step(model)
    old = {param: param.data.clone() for param in model.parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(param.grad)
    step(model)
    for param in model.parameters():
        param.data = old[param]
    with pytest.raises(ValueError, match=r"0\.weight: .* assigned to its \.data.*copy_\(values\)"):
        step(model)


@pytest.mark.parametrize("how", RUNS)
def test_what_is_assigned_before_the_first_forward(solo_mesh, how):
    model = wrapped(solo_mesh, how)
    model[1].bias.data = torch.zeros_like(model[1].bias)
    with pytest.raises(ValueError, match=r"1\.bias: something was assigned"):
        step(model)


def unshard(model: nn.Module) -> None:
    with simplefsdp.unsharded(model):
        pass


READERS = {
    "state_dict": nn.Module.state_dict,
    "get_model_state_dict": get_model_state_dict,
    "full_state_dict": simplefsdp.full_state_dict,
    "unsharded": unshard,
    "step": lambda model: torch.optim.SGD(model.parameters()).step(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_it_is_told_before_the_values_are_used(solo_mesh, read):
    """As where averaged weights are put into the model, and saved."""
    model = wrapped(solo_mesh, "eager")
    read(model)
    vector_to_parameters(torch.zeros(30), model.parameters())
    with pytest.raises(ValueError, match=r"0\.weight: something was assigned"):
        read(model)


def test_parameters_can_be_loaded_where_only_weights_may_be(solo_mesh, tmp_path):
    model = wrapped(solo_mesh, "eager")
    step(model)
    torch.save(list(model.parameters()), tmp_path / "parameters.pt")
    assert len(torch.load(tmp_path / "parameters.pt", weights_only=True)) == 4


@pytest.mark.parametrize("how", RUNS)
def test_other_ways_to_change_parameters(solo_mesh, how):
    model = wrapped(solo_mesh, how)
    step(model)
    state = copy.deepcopy(model.state_dict())
    for param in model.parameters():
        param.data = param.data
        param.data.mul_(2)
    step(model)
    copied = copy.deepcopy(model)
    step(copied)
    model.load_state_dict(state)
    step(model)
    model.load_state_dict(state, assign=True)
    step(model)
    if how == "eager":  # compiled models refuse to be cast, by torch
        step(model.to(torch.float64).to(torch.float32))
    with simplefsdp.unsharded(model):
        model[0].weight.data = torch.zeros(4, 4)
    step(model)
    assert not model[0].weight.to_local().any()


def test_values_for_a_model_on_meta(solo_mesh):
    with torch.device("meta"):
        model = wrapped(solo_mesh, "compiled")
    simplefsdp.init_weights(model, seed=0)
    step(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    step(model)
