"""Inputs that are views of one tensor, as ``tokens[:, :-1]`` and ``tokens[:, 1:]`` are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from simplefsdp import simple_fsdp
from simplefsdp.compiler.observers import observing


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.out(self.embed(tokens)).mT, targets)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_sizes_of_parameters_stay_numbers(fake_mesh, rank):
    mesh = fake_mesh(3, rank=rank)  # 8 rows among 3: 3, 3 and 2
    model = simple_fsdp(_Shifted(), mesh)
    options = {"executor": "aot_eager", "bucketing": "auto", "cluster": "cpu-gloo"}
    model.compile(backend="simplefsdp", options=options)
    tokens = torch.zeros(1, 6, dtype=torch.long)
    found = []
    with observing(found.append):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert len(found) == 2
    read = [nodes for one in found for nodes in one.rehearsal.reading.nodes.values()]
    values = [node.meta.get("val") for nodes in read for node in nodes]
    sizes = [size for v in values if isinstance(v, torch.Tensor) for size in v.shape]
    assert len(sizes) > 10 and all(isinstance(size, int) for size in sizes)
