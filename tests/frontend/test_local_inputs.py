"""Inputs that are views of one tensor, as ``tokens[:, :-1]`` and ``tokens[:, 1:]`` are."""

from __future__ import annotations

import copy

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


class Remembers(nn.Module):
    """Truncated backpropagation through time: the state is that of the call before."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.state, self.how = nn.GRUCell(4, 4), None, how

    def forward(self, x):
        state = torch.zeros_like(x) if self.state is None else self.state
        if self.how == "no_grad":
            with torch.no_grad():
                state = state * 1
        self.state = self.cell(x, state.detach() if self.how == "detach" else state)
        return self.state


@pytest.mark.slow(quick=["detach-aot_eager", "no_grad-aot_eager"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_a_state_that_is_cut_off(solo_mesh, how, executor):
    plain = Remembers(how)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    model.compile(backend="simplefsdp", options={"executor": executor, "bucketing": "manual"})
    for step in range(3):
        x = torch.rand(2, 4, generator=torch.Generator().manual_seed(step))
        for run in (plain, model):
            run(x).square().sum().backward()
    for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)
