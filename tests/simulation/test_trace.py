"""Tracing a step without memory or ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_passes.adapters import fx
from simplefsdp import simple_fsdp
from simplefsdp.frontend.placement import data_parallel, shard
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama
from simplefsdp.provenance import carried_fqn as fqn_of
from simplefsdp.simulation.trace import trace


def test_a_model_that_no_machine_holds(fake_mesh):
    mesh, width = fake_mesh(512), 1 << 18  # 256 GiB a layer
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        step = trace(simple_fsdp(model, mesh), torch.ones(2, width))
    assert step.fqns == ("0.weight", "0.bias", "2.weight", "2.bias")
    sent = [
        {(c.kind, c.fqns, c.nbytes, c.ranks) for _, op in starts for c in [op.collective]}
        for graph in step[:2]
        for starts in [fx.read(graph.graph, fqn_of).program.starts()]
    ]
    assert ("gather", ("0.weight",), 4 * width * width, 512) in sent[0]
    assert ("reduce", ("0.weight",), 4 * width * width, 512) in sent[1]


def test_what_is_not_wrapped(fake_mesh):
    fake_mesh(2)
    with pytest.raises(ValueError, match="no parameter of this Linear is sharded"):
        trace(nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu", [False, True])
def test_checkpointed_attention_is_recomputed_on_a_gpu_only(fake_mesh, on_cpu):
    mesh, config = fake_mesh(8), replace(CONFIGS["debug"], n_layers=2)
    with FakeTensorMode():
        model = simple_fsdp(Llama(config, activation_checkpointing="full"), mesh)
        step = trace(model, torch.zeros(1, 16, dtype=torch.long), averages=not on_cpu)
    for graph, again in ((step.forward, True), (step.backward, not on_cpu)):
        names = [str(node.target) for node in graph.graph.nodes]
        attends = [n for n in names if "attention" in n and "backward" not in n]
        assert len(attends) == (config.n_layers if again else 0)
    assert not any(isinstance(n.target, HigherOrderOperator) for n in step.backward.graph.nodes)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("n", torch.ones(()))

    def forward(self, x):
        self.n += 1
        return self.linear(x) * self.n


@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_is_read_of_a_written_buffer_is_kept(fake_mesh, on_cpu):
    """As when it is compiled."""
    mesh = fake_mesh(2)
    with FakeTensorMode():
        step = trace(simple_fsdp(Counted(), mesh), torch.ones(2, 4), averages=not on_cpu)
    targets = [{node.target for node in graph.graph.nodes} for graph in step[:2]]
    assert [torch.ops.aten.add.Tensor in found for found in targets] == [True, False]


@pytest.mark.parametrize("rows", [1, 8, 13, 16])
@pytest.mark.parametrize("rank", [0, 5, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_fake_shard_is_this_ranks_part(fake_mesh, rows, rank, dim):
    mesh, weight = fake_mesh(8, rank=rank), torch.randn(rows, 3).movedim(0, dim).contiguous()
    real = shard(weight, data_parallel(mesh, "fully_shard"), None, dim)
    with FakeTensorMode() as mode:
        fake = shard(mode.from_tensor(weight), data_parallel(mesh, "fully_shard"), None, dim)
    assert fake.shape == real.shape and fake.placements == real.placements
    assert fake.to_local().shape == real.to_local().shape
