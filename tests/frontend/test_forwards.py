"""Forwards set on a wrapped model, as by libraries that fuse the last layer and the loss."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from parity import global_loss, local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp, unsharded
from simplefsdp.frontend.reading import ReadOnlyParameter

EAGER = {"executor": "aot_eager", "bucketing": "none"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def fused(self: Model, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
    weight = self.head.weight
    if isinstance(weight, DTensor):  # as TRL does for FSDP2: each rank's gradient is its own then
        weight = weight.full_tensor()
    return self.body(x) @ weight.t() * (2 if twice else 1)


def of_function(model: Model) -> object:
    return lambda x, twice=False: fused(model, x, twice)


def of_partial(model: Model) -> object:
    return functools.partial(fused, model)


def of_method(model: Model) -> object:
    return types.MethodType(fused, model)


def around(model: Model) -> object:
    before = model.forward

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * before(x)

    return twice


WAYS = {"method": of_method, "function": of_function, "partial": of_partial}


def gradients_on_ranks(kind: str, compiled: bool, when: str) -> None:
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(4, 4)
    wanted = plain(x).square().mean()
    wanted.backward()
    model = copy.deepcopy(plain)
    if when == "before":
        model.forward = WAYS[kind](model)
    simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="simplefsdp", options=EAGER)
    if when == "after":
        model.forward = WAYS[kind](model)
    model.zero_grad()
    loss = model(local(x)).square().mean()
    loss.backward()
    assert global_loss(loss) == pytest.approx(wanted.item(), rel=1e-5)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


@pytest.mark.parametrize("kind", WAYS)
def test_gradients_are_of_all_ranks(pools, kind):
    for when in ("before", "after"):
        for compiled in (False, True):
            pools(2).run(gradients_on_ranks, kind, compiled, when)


def test_it_casts_as_the_models_own(solo_mesh):
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = simple_fsdp(Model(), solo_mesh, mp_policy=policy)
    seen = []
    model.forward = lambda x: seen.append(x.dtype) or fused(model, x)
    assert model(torch.randn(2, 4)).dtype is torch.float32 and seen == [torch.bfloat16]


def test_it_tells_its_arguments(solo_mesh):
    """By which trainers choose the columns of a dataset."""
    for kind, of in WAYS.items():
        model = simple_fsdp(Model(), solo_mesh)
        model.forward = of(model)
        assert [*inspect.signature(model.forward).parameters] == ["x", "twice"], kind


def test_one_around_another_and_back_again(solo_mesh):
    model, x = simple_fsdp(Model(), solo_mesh), torch.randn(2, 4)
    once, own = model(x), model.forward
    model.forward = around(model)
    model.forward = around(model)
    torch.testing.assert_close(model(x), 4 * once)
    fields = set(model.__dict__)
    for _ in range(3):
        outer = model.forward
        model.forward = own
        torch.testing.assert_close(model(x), once)
        model.forward = outer
    torch.testing.assert_close(model(x), 4 * once)
    assert set(model.__dict__) == fields
    del model.forward
    torch.testing.assert_close(model(x), once)


def test_one_that_is_set_where_parameters_are_full(solo_mesh):
    model, x = simple_fsdp(Model(), solo_mesh), torch.randn(2, 4)
    seen = []
    with unsharded(model):
        model.forward = lambda x: seen.append(type(model.head.weight)) or fused(model, x)
        model(x)
    model(x)
    assert seen == [nn.Parameter, ReadOnlyParameter]


def test_a_module_as_forward_is_a_submodule(solo_mesh):
    model = simple_fsdp(Model(), solo_mesh)
    model.forward = nn.Linear(4, 4)
    assert "forward.weight" in model.state_dict()


def test_functions_are_not_held(solo_mesh):
    """A closure holds what it captured; some set one for each step."""
    model = simple_fsdp(Model(), solo_mesh)
    model.forward = of_function(model)
    held = weakref.ref(model.forward.__func__)
    model.forward = of_function(model)
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("kind", ["method", "partial"])
def test_a_copy_has_its_own(solo_mesh, kind):
    model, x = simple_fsdp(Model(), solo_mesh), torch.randn(2, 4)
    model.forward = WAYS[kind](model)
    twin, before = copy.deepcopy(model), model(x)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not twin(x).any()
    torch.testing.assert_close(model(x), before)


def test_what_comes_after_the_wrap_is_refused_there_too(solo_mesh):
    model = simple_fsdp(Model(), solo_mesh)
    model.forward = types.MethodType(fused, model)
    model.body.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"body\.extra: is not sharded: it came after simple_fsdp"):
        model(torch.randn(2, 4))
