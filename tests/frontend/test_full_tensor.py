"""``param.full_tensor()`` in a loss outside of forward, as TRL's fused heads for FSDP2 do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from simplefsdp import clip_grad_norm_, simple_fsdp

Loss = Callable[[nn.Module, Tensor], Tensor]
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Computes all but the loss's part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))  # as CLIP's, learned in the loss

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def loss_of(model: Model, x: Tensor) -> Tensor:
    head, scale = full(model.head.weight), full(model.scale)
    return F.linear(model(x), head).mul(scale.exp()).square().mean() + head.norm()


def loss_of_computed(model: Model, x: Tensor) -> Tensor:
    """Reads what was computed from parameters, as a whole or reduced, and from two of them."""
    head, norm = full(model.head.weight.t() * model.scale), full(model.head.weight.norm())
    scale = full(model.scale.exp()) + full(model.head.weight.sum(0) * model.scale).sum()
    return (model(x) @ head).mul(scale).square().mean().div(norm) + norm + full(model.scale.exp())


def share() -> Tensor:
    return X.chunk(dist.get_world_size())[dist.get_rank()]


def plain_gradients(loss: Loss = loss_of) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    plain = Model()
    wanted = copy.deepcopy(plain)
    loss(wanted, X).backward()
    return plain, {fqn: p.grad for fqn, p in wanted.named_parameters() if p.grad is not None}


def check(model: Model, wanted: dict[str, Tensor]) -> None:
    for fqn, param in model.named_parameters():
        torch.testing.assert_close(
            param.grad.full_tensor(), wanted[fqn], msg=lambda text, fqn=fqn: f"{fqn}: {text}"
        )


def of_all_ranks(mode: str, compiled: str, loss: Loss = loss_of) -> None:
    model, wanted = plain_gradients(loss)
    ranks = dist.get_world_size()
    simple_fsdp(
        model,
        init_device_mesh("cpu", (2, ranks // 2) if mode == "hybrid_shard" else (ranks,)),
        mode=mode,
    )
    torch._dynamo.reset()
    if "model" in compiled:
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    loss = torch.compile(loss, backend="aot_eager") if "loss" in compiled else loss
    loss(model, share()).backward()
    check(model, wanted)
    clip_grad_norm_(model, float("inf"))
    check(model, wanted)
    copies = [torch.empty_like(model.scale.to_local()) for _ in range(ranks)]
    dist.all_gather(copies, model.scale.grad.to_local())
    assert all(torch.equal(copies[0], other) for other in copies)


@pytest.mark.parametrize("compiled", ["nothing", "model", "loss"])
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_the_gradient_is_that_of_all_ranks(pools, mode, compiled):
    pools(2).run(of_all_ranks, mode, compiled)


@pytest.mark.parametrize("compiled", ["nothing", "loss"])
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_so_is_that_of_what_is_computed_from_parameters(pools, mode, compiled):
    pools(2).run(of_all_ranks, mode, compiled, loss_of_computed)


def gathered(head: Tensor) -> Tensor:
    """A loss of this rank's rows of what all ranks have computed."""
    rows = len(share())
    return head.full_tensor().narrow(0, rows * dist.get_rank(), rows).square().sum()


def of_activations(how: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = simple_fsdp(copy.deepcopy(plain), mesh)
    torch._dynamo.reset()

    def loss_of(x: Tensor) -> Tensor:
        return loss(DTensor.from_local(x, mesh, [Shard(0)]) * 2.0)

    loss = torch.compile(gathered, backend="aot_eager") if how == "in parts" else gathered
    whole = torch.compile(loss_of, backend="aot_eager") if how == "whole" else loss_of
    whole(model(share())).backward()
    plain(share()).mul(2.0).square().sum().backward()  # this rank's: an average is of both
    for name in ("body.weight", "body.bias"):
        grad = plain.get_parameter(name).grad
        dist.all_reduce(grad)
        mean = grad / dist.get_world_size()
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), mean)
    own = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
    torch._dynamo.reset()

    def first_rows(param: DTensor) -> Tensor:
        return (param * 3.0).full_tensor()[: 2 + dist.get_rank()].sum()

    torch.compile(first_rows, backend="aot_eager")(own).backward()
    assert own.grad.to_local().sum() == (18 if dist.get_rank() == 0 else 9)


def of_few_rows() -> None:
    model = nn.Linear(3, 1)
    wanted = copy.deepcopy(model)
    simple_fsdp(model, init_device_mesh("cpu", (2,)))
    for m in (wanted, model):
        sum(full(p.square().sum()) for p in m.parameters()).backward()
    norm = torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), norm)
    torch.optim.AdamW(model.parameters()).step()
    for name, param in wanted.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


def test_fewer_rows_than_ranks(pools):
    pools(2).run(of_few_rows)


@pytest.mark.parametrize("how", ["eager", "in parts", "whole"])
def test_the_gradient_of_an_activation_is_torchs(pools, how):
    pools(2).run(of_activations, how)


def test_a_parameter_and_an_activation_are_read_apart(solo_mesh):
    model = simple_fsdp(Model(), solo_mesh)
    both = DTensor.from_local(model(X), solo_mesh, [Shard(0)]) * model.scale
    with pytest.raises(ValueError, match="scale: full_tensor"):
        both.full_tensor()


@pytest.mark.parametrize("loss", [loss_of, loss_of_computed])
def test_it_is_with_hybrid_sharding(pools, loss):
    pools(4).run(of_all_ranks, "hybrid_shard", "model", loss)


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


def test_what_is_compiled_as_a_whole_says_so(solo_mesh):
    model = simple_fsdp(Model(), solo_mesh)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="its gradient is reduced over ranks"):
        torch.compile(loss_of, backend="eager", fullgraph=True)(model, X)


def penalised(model: Model, x: Tensor) -> Tensor:
    """The same on all ranks, which torch takes it to be."""
    terms = [p.norm() + p.mean() + p.square().sum() for p in model.body.parameters()]
    fulls = [t.full_tensor() if isinstance(t, DTensor) else t for t in terms]
    return model(x).square().mean() + sum(fulls)


def of_penalties(compiled: bool) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)))
    torch._dynamo.reset()
    loss = torch.compile(penalised, backend="aot_eager") if compiled else penalised
    penalised(plain, X).backward()
    loss(model, share()).backward()
    for fqn, param in plain.body.named_parameters():
        grad = model.body.get_parameter(fqn).grad
        assert grad.placements == (Shard(0),)
        torch.testing.assert_close(grad.full_tensor(), param.grad, msg=fqn)


@pytest.mark.parametrize("compiled", [False, True])
def test_penalties_are_as_torch_has_them(pools, compiled):
    pools(2).run(of_penalties, compiled)


def accumulated() -> None:
    model, wanted = plain_gradients()
    simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    first, second = share().chunk(2)
    model.set_requires_gradient_sync(False)
    loss_of(model, first).div(2).backward()
    assert model.head.weight.grad is None  # kept, until it is sent with that of the last one
    model.set_requires_gradient_sync(True)
    loss_of(model, second).div(2).backward()
    check(model, wanted)


def test_it_waits_for_the_last_micro_batch(pools):
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
