"""Tracing a step without memory or ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_passes import fx
from simplefsdp import simple_fsdp
from simplefsdp.backend import fqn_of
from simplefsdp.trace import trace


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
