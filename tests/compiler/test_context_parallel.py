"""Context parallelism by the user's own collectives: each rank has a part of each sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import check_grads
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simplefsdp import simple_fsdp

DIM, HEADS, LENGTH, BATCH, WORDS = 16, 2, 8, 4, 32


class Attention(nn.Module):
    """Causal; gathers keys and values of other parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mesh: DeviceMesh | None = None

    def whole(self, part: Tensor) -> Tensor:
        if self.mesh is None:
            return part
        every = all_gather_tensor_autograd(part.contiguous(), 0, self.mesh)
        return torch.cat(every.chunk(self.mesh.size(), 0), 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.view(batch, length, HEADS, -1).transpose(1, 2) for p in parts)
        k, v = self.whole(k), self.whole(v)
        begin = 0 if self.mesh is None else self.mesh.get_local_rank() * length
        sees = torch.arange(k.shape[2])[None] <= (torch.arange(length) + begin)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), Attention()) for _ in range(layers)
        )
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def trains(executor: str, layers: int, bucketing: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    plain = Model(layers)
    model: Any = copy.deepcopy(plain)
    for module in model.modules():
        if isinstance(module, Attention):
            module.mesh = mesh["cp"]
    simple_fsdp(model, mesh._flatten("dp_cp"))
    options = {"executor": executor, "bucketing": bucketing}
    run = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        words = torch.randint(0, WORDS, (BATCH, LENGTH))
        dist.broadcast(words, 0)
        row, column = mesh.get_coordinate() or (0, 0)
        plain(words).backward()
        (model if step == 1 else run)(words.chunk(2, 0)[row].chunk(2, 1)[column]).backward()
        check_grads(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow(quick=["aot_eager-2-auto"])
@pytest.mark.parametrize(
    ("executor", "layers", "bucketing"),
    [("aot_eager", 2, "auto"), ("inductor", 2, "manual"), ("regions", 8, "auto")],
)
def test_parts_of_sequences(pools, executor, layers, bucketing):
    pools(4).run(trains, executor, layers, bucketing)
