"""Norms of parameters that others placed; those of our own are in ``test_parity.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simplefsdp import clip_grad_norm_


def norm_of_strided_shards() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert any("Strided" in str(p.placements) for p in model.parameters())
    x = torch.randn(4, 6)
    for m in (plain, model):
        m(x).square().sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert clip_grad_norm_(model, 0.1).item() == pytest.approx(wanted.item(), rel=1e-5)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_fsdp2_over_tensor_parallelism(pools):
    pools(4).run(norm_of_strided_shards)


def test_a_placement_of_which_no_norm_is_known(fake_mesh):
    mesh = fake_mesh(2)
    summand = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(TypeError, match="expected parameters placed by Shard or Replicate, got P"):
        clip_grad_norm_(summand, 1.0)
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"is placed \(Replicate.*, its gradient \(Shard"):
        clip_grad_norm_(param, 1.0)
