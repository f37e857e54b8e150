"""A plain loss plus a penalty that is computed from parameters outside of forward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import simple_fsdp

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
PENALTIES = {
    "squares": lambda m: sum(p.square().sum() for p in m.parameters()),
    "times a number": lambda m: 1e-2 * sum((p**2).sum() for p in m.parameters()) / 3,
    "norms": lambda m: sum(p.norm() for p in m.parameters()),
    "of one weight": lambda m: m[0].weight.abs().mean() + 1,
    "of a product": lambda m: (m[0].weight * m[1].weight.t()).sum() * 2,
    "of what it was": lambda m: sum(map(moved, m.parameters(), m.was)),
}


def moved(param: Tensor, before: Tensor) -> Tensor:
    return (param - before).square().sum()


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))


def check(mode: str, compiled: bool) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2) if mode == "hybrid_shard" else (ranks,))
    share = X.chunk(ranks)[dist.get_rank()]
    for name, penalty in list(PENALTIES.items())[: 2 if compiled else None]:
        plain = model_of()
        model = simple_fsdp(copy.deepcopy(plain), mesh, mode=mode)
        torch._dynamo.reset()
        if compiled:
            model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
        for some, x in ((plain, X), (model, share)):
            some.was = [p.detach() * 0.5 for p in some.parameters()]
            (some(x).square().mean() + penalty(some)).backward()
            (penalty(some) - some(x).mean() / 2).backward()
            (some(x).mean() + penalty(some) + some(x).square().mean() * 0.1).backward()
        for fqn, param in plain.named_parameters():
            grad = model.get_parameter(fqn).grad.full_tensor()
            torch.testing.assert_close(grad, param.grad, msg=f"{name} {fqn}")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_gradients_are_the_plain_models(pools, mode, compiled):
    pools(2).run(check, mode, compiled)


def test_they_are_with_hybrid_sharding(pools):
    pools(4).run(check, "hybrid_shard", False)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda model, own: model[0].bias.sum() * own,
        lambda model, own: (model[0].weight.square() / own).sum(),
        lambda model, own: model[0].weight.sum().pow(own),
    ],
)
def test_a_number_of_this_rank_in_it_raises(solo_mesh, mixed):
    model = simple_fsdp(model_of(), solo_mesh)
    loss, own = model(X).square().mean(), X.mean().abs()
    with pytest.raises(ValueError, match="the parameter's gradient would be this rank's alone"):
        loss + mixed(model, own)
    with torch.no_grad():
        loss + mixed(model, own)


def numbers_differ() -> None:
    model = simple_fsdp(model_of())
    share = X.chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(share).square().mean()
    for own in (loss.item(), dist.get_rank()):
        for penalty in (model[0].bias.sum() * own, model[0].weight.abs().pow(1 + own).sum()):
            with pytest.raises(ValueError, match="the parameter's gradient would be this rank's"):
                loss + penalty
    (loss + model[0].bias.sum() * dist.get_world_size()).backward()


def test_a_number_that_differs_between_ranks_raises(pools):
    pools(2).run(numbers_differ)
