"""``full_tensor()`` and ``to_local()`` in a loss outside of forward, as TRL's fused heads do."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from simplefsdp import compile_step, simple_fsdp

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Computes all but the loss's part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))  # as CLIP's, learned in the loss

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def loss_of(model: Model, x: Tensor) -> Tensor:
    head, scale = (
        p.full_tensor() if isinstance(p, DTensor) else p for p in (model.head.weight, model.scale)
    )
    return F.linear(model(x), head).mul(scale.exp()).square().mean() + head.norm()


def share() -> Tensor:
    return X.chunk(dist.get_world_size())[dist.get_rank()]


def plain_gradients() -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    plain = Model()
    wanted = copy.deepcopy(plain)
    loss_of(wanted, X).backward()
    return plain, {fqn: p.grad for fqn, p in wanted.named_parameters() if p.grad is not None}


def check(model: Model, wanted: dict[str, Tensor]) -> None:
    for fqn, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), wanted[fqn], msg=fqn)


def of_all_ranks(mode: str, compiled: str) -> None:
    model, wanted = plain_gradients()
    ranks = dist.get_world_size()
    simple_fsdp(
        model,
        init_device_mesh("cpu", (2, ranks // 2) if mode == "hybrid_shard" else (ranks,)),
        mode=mode,
    )
    torch._dynamo.reset()
    if "model" in compiled:
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    loss = torch.compile(loss_of, backend="aot_eager") if "loss" in compiled else loss_of
    loss(model, share()).backward()
    check(model, wanted)
    copies = [torch.empty_like(model.scale.to_local()) for _ in range(ranks)]
    dist.all_gather(copies, model.scale.grad.to_local())
    assert all(torch.equal(copies[0], other) for other in copies)


@pytest.mark.parametrize("compiled", ["nothing", "model", "loss"])
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_the_gradient_is_that_of_all_ranks(pools, mode, compiled):
    pools(2).run(of_all_ranks, mode, compiled)


def test_it_is_with_hybrid_sharding(pools):
    pools(4).run(of_all_ranks, "hybrid_shard", "model")


class Bilinear(Model):
    """Reads its parameters as shards in forward."""

    def forward(self, x: Tensor) -> Tensor:
        fulls = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        return (self.body(x) @ fulls[1]).mul(fulls[0]).square().mean()


def in_forward(compiled: bool) -> None:
    torch.manual_seed(0)
    plain = Bilinear()
    model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)))
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    plain(X).backward()
    model(share()).backward()
    for fqn, param in plain.named_parameters():
        if param.grad is not None:
            grad = model.get_parameter(fqn).grad.full_tensor()
            torch.testing.assert_close(grad, param.grad, msg=fqn)


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_inside_forward_too(pools, compiled):
    pools(2).run(in_forward, compiled)


def exp_then_full(model: Model, x: Tensor) -> Tensor:
    scale = model.scale.exp()
    scale = scale.full_tensor() if isinstance(scale, DTensor) else scale
    return model.head(model(x)).mul(scale).square().mean()


def local_copy(model: Model, x: Tensor) -> Tensor:
    scale = model.scale.to_local() if isinstance(model.scale, DTensor) else model.scale
    return model.head(model(x)).mul(scale.exp()).square().mean()


def twice_full(model: Model, x: Tensor) -> Tensor:
    head = model.head.weight * 2
    head = head.full_tensor() if isinstance(head, DTensor) else head
    return F.linear(model(x), head).mul(0.5).square().mean()


def of_other_losses(compiled: bool) -> None:
    ranks = dist.get_world_size()
    for loss_of in (exp_then_full, local_copy, twice_full):
        for mode in ("fully_shard", "replicate"):
            torch.manual_seed(0)
            plain = Model()
            model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (ranks,)), mode=mode)
            torch._dynamo.reset()
            loss = torch.compile(loss_of, backend="aot_eager") if compiled else loss_of
            loss_of(plain, X).backward()
            loss(model, share()).backward()
            for fqn, param in plain.named_parameters():
                if param.grad is not None:
                    grad = model.get_parameter(fqn).grad.full_tensor()
                    torch.testing.assert_close(grad, param.grad, msg=f"{loss_of.__name__} {fqn}")


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_of_what_is_computed_from_a_parameter_too(pools, compiled):
    pools(2).run(of_other_losses, compiled)


def mesh_of_its_own(name: str) -> DeviceMesh:
    """One that no model of another test is on, which may live for a while."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def as_a_sum() -> None:
    model, wanted = plain_gradients()
    simple_fsdp(model, mesh_of_its_own("sum"))
    model.set_gradient_divide_factor(1.0)
    loss_of(model, share()).div(dist.get_world_size()).backward()
    check(model, wanted)


def test_it_is_divided_as_those_of_forward(pools):
    pools(2).run(as_a_sum)


def with_two_factors() -> None:
    model, _ = plain_gradients()
    simple_fsdp(model, mesh_of_its_own("two"))
    model.body.set_gradient_divide_factor(1.0)
    loss = loss_of(model, share())
    with pytest.raises(ValueError, match=r"full_tensor\(\) .* others: 1.0, none; read the param"):
        loss.backward()


def test_it_says_if_it_cannot_know_what_to_divide_by(pools):
    pools(2).run(with_two_factors)


def in_one_program() -> None:
    model, wanted = plain_gradients()
    simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    before = {fqn: p.detach().full_tensor().clone() for fqn, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    compile_step(partial(loss_of, model), optimizer, options={"executor": "aot_eager"})(share())
    for fqn, param in model.named_parameters():
        torch.testing.assert_close(before[fqn] - param.detach().full_tensor(), wanted[fqn], msg=fqn)


def test_it_is_in_a_whole_step(pools):
    pools(2).run(in_one_program)


def accumulated() -> None:
    model, wanted = plain_gradients()
    simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    first, second = share().chunk(2)
    model.set_requires_gradient_sync(False)
    loss_of(model, first).div(2).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, second).div(2).backward()
    check(model, wanted)


def test_micro_batches_add_up(pools):
    pools(2).run(accumulated)


def with_tensor_parallelism() -> None:
    model, wanted = plain_gradients()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model.head, mesh["tp"], ColwiseParallel())
    simple_fsdp(model, mesh["dp"])
    head = model.head.weight.full_tensor()
    x = X.chunk(2)[mesh.get_local_rank("dp")]
    loss = F.linear(model(x), head).mul(model.scale.full_tensor().exp()).square().mean()
    (loss + head.norm()).backward()
    check(model, wanted)


def test_it_is_gathered_over_tensor_parallel_ranks_too(pools):
    pools(4).run(with_tensor_parallelism)


def test_values_dtype_and_other_tensors_stay(solo_mesh):
    model = simple_fsdp(Model(), solo_mesh)
    weight = model.head.weight
    assert torch.equal(weight.full_tensor(), weight.detach().full_tensor())
    with torch.no_grad():
        assert not weight.full_tensor().requires_grad
    assert weight.full_tensor(grad_placements=weight.placements).requires_grad
    assert (weight * 2).full_tensor().requires_grad
