"""What would train nothing, or unsynchronised, is told by name."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simplefsdp import simple_fsdp, unsharded
from simplefsdp.frontend import after_wrap


def test_an_optimizer_made_before_the_wrap_is_refused_at_its_step(fake_mesh):
    model = nn.Sequential(nn.Linear(4, 4))
    early = torch.optim.AdamW(model.parameters())
    simple_fsdp(model, fake_mesh(2))
    late = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    late.step()
    with pytest.raises(ValueError, match=r"AdamW: holds 0\.weight as it was before simple_fsdp"):
        early.step()


def test_a_parameter_that_is_used_as_it_was_before_the_wrap(fake_mesh):
    """A layer of Keras holds its parameter in an object that is no module."""
    layer = nn.Linear(4, 4)
    layer.hidden = SimpleNamespace(weight=layer.weight)
    layer.forward = lambda x: x @ layer.hidden.weight
    model = simple_fsdp(nn.Sequential(layer), fake_mesh(2))
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(ValueError, match=r"0\.weight: backward reached.*before simple_fsdp"):
        loss.backward()


def test_ddp_of_a_wrapped_model_is_refused_by_name(fake_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), fake_mesh(2))
    with pytest.raises(ValueError, match=r"DistributedDataParallel\(Sequential\): simple_fsdp has"):
        nn.parallel.DistributedDataParallel(model)
    # TRL sets what DDP asks for.
    model._ddp_params_and_buffers_to_ignore = ["0.bias"]
    assert model._ddp_params_and_buffers_to_ignore == ["0.bias"]


def test_jit_trace_says_what_to_do(fake_mesh):
    model, x = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), fake_mesh(2)), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"torch\.jit\.trace.*unsharded\(model, writeback=False"):
        torch.jit.trace(model, x)
    with unsharded(model, writeback=False):
        assert torch.jit.trace(model, x)(x).shape == (2, 4)


def test_jit_trace_on_one_rank(solo_mesh):
    model, x = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), solo_mesh), torch.ones(2, 4)
    assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), model(x))


def halved(model):
    return {fqn: value.detach() * 0.5 for fqn, value in model.state_dict().items()}


def test_an_optimizer_whose_parameters_were_replaced_is_refused_at_its_step(fake_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fake_mesh(2))
    optimizer = torch.optim.AdamW(model.parameters())
    before, tied = model[0].weight, model[1].weight
    model[1].weight = before  # the optimizer has it
    optimizer.step()
    model[1].weight = tied
    model.load_state_dict(halved(model), assign=True)
    with pytest.raises(
        ValueError, match=r"AdamW: holds [01]\.weight as it was before .*assign=True"
    ):
        optimizer.step()
    torch.optim.AdamW(model.parameters()).step()
    (model[0].weight, model[0].bias), (model[1].weight, model[1].bias) = (
        optimizer.param_groups[0]["params"][:2],
        optimizer.param_groups[0]["params"][2:],
    )
    optimizer.step()  # they are back


def test_a_shard_that_goes_while_an_optimizer_is_looked_at(fake_mesh, monkeypatch):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    old = list(model.parameters())
    model.load_state_dict(halved(model), assign=True)
    optimizer = torch.optim.SGD(model.parameters())

    def listed(notes):
        taken = list(notes)
        old.clear()
        gc.collect()
        return taken

    monkeypatch.setattr(after_wrap, "list", listed, raising=False)
    optimizer.step()
    assert not old


@pytest.mark.parametrize("trainable", [True, False])
def test_a_parameter_that_came_after_the_wrap(fake_mesh, trainable):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), fake_mesh(2))
    model.append(nn.Linear(4, 4).requires_grad_(trainable))
    if not trainable:  # every rank has the same one
        model(torch.ones(2, 4))
        return
    with pytest.raises(ValueError, match=r"1\.weight: is not sharded: it came after simple_fsdp"):
        model(torch.ones(2, 4))


def test_weights_of_the_users_stand_in_for_a_while(fake_mesh):
    """Those of ``functional_call`` did not come to stay."""
    model, x = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), fake_mesh(2)), torch.ones(2, 4)
    weight = torch.rand(4, 4, requires_grad=True)
    torch.func.functional_call(model, {"0.weight": weight}, (x,)).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 2.0))
    assert model.get_parameter("0.weight").grad is None


def test_a_dispatch_mode_is_named_once(fake_mesh, caplog):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    after_wrap._warn_of_mode.cache_clear()
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        compiled(torch.ones(2, 4))
        assert not caplog.records
        with FlopCounterMode(display=False):
            compiled(torch.ones(2, 4))
            compiled(torch.ones(2, 4))
    (record,) = caplog.records
    assert "inside FlopCounterMode the model runs eagerly" in record.getMessage()


class Float8Weight(torch.Tensor):
    """As torchao's: says how FSDP2 is to gather it."""

    def fsdp_pre_all_gather(self, mesh):
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args):
        raise NotImplementedError


def test_an_all_gather_extension_is_named(fake_mesh):
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Float8Weight))
    with pytest.raises(ValueError, match=r"weight: is a Float8Weight, .* fsdp_pre_all_gather and"):
        simple_fsdp(layer, fake_mesh(2))
