"""Experts spread over ranks, with tokens sent to them, inside a model that all ranks share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from beside import DIM, check_grads, mine, numbers
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import silu

from simplefsdp import clip_grad_norm_, simple_fsdp

EXPERTS, TOKENS = 4, 32


class Experts(nn.Module):
    """Token i goes to expert i % EXPERTS, wherever that one is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(numbers(EXPERTS, DIM, 7, seed=1) / 3)
        self.down = nn.Parameter(numbers(EXPERTS, 7, DIM, seed=2) / 3)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x):
        each = len(x) // EXPERTS
        x = x.view(each, EXPERTS, DIM).transpose(0, 1)  # by experts
        x = x if self.group is None else self.sent(x, each)
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        x = torch.bmm(silu(torch.bmm(x, up)), down)
        x = x if self.group is None else self.sent_back(x, each)
        return x.transpose(0, 1).reshape(-1, DIM)

    def sent(self, x, each):
        ranks = dist.get_world_size(self.group)
        x = self.exchanged(x).view(ranks, EXPERTS // ranks, each, DIM)
        return x.transpose(0, 1).reshape(-1, ranks * each, DIM)

    def sent_back(self, x, each):
        ranks = dist.get_world_size(self.group)
        x = x.view(-1, ranks, each, DIM).transpose(0, 1)
        return self.exchanged(x).view(EXPERTS, each, DIM)

    def exchanged(self, x):
        flat = x.reshape(-1, DIM)
        ranks = dist.get_world_size(self.group)
        splits = [len(flat) // ranks] * ranks
        return all_to_all_single_autograd(flat.contiguous(), splits, splits, self.group)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), Experts()

    def forward(self, x):
        return x + self.experts(torch.tanh(self.gate(self.norm(x))))


def trains_as_one_process(executor):
    torch.manual_seed(1)
    torch._dynamo.reset()
    plain = nn.Sequential(Layer(), Layer())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model = copy.deepcopy(plain)
    for layer in model:
        experts = layer.experts
        experts.group = mesh["experts"].get_group()
        for name, param in list(experts.named_parameters()):
            spread = distribute_tensor(param.detach(), mesh["experts"], [Shard(0)])
            setattr(experts, name, nn.Parameter(spread))
        simple_fsdp(experts, mesh["copies"])
        experts.set_gradient_divide_factor(dist.get_world_size())  # of whose tokens it has some
    simple_fsdp(model, mesh["copies", "experts"]._flatten("data"))
    if executor != "eager":
        model.compile(backend="simplefsdp", options={"executor": executor}, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (plain, model)]
    for step in range(2):
        x = numbers(TOKENS, DIM, seed=step)
        (model(mine(x)) - mine(x)).square().mean().backward()
        (plain(x) - x).square().mean().backward()
        check_grads(plain, model)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "executor", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_gradients_and_norm_are_those_of_one_process(pools, executor):
    pools(4).run(trains_as_one_process, executor)
