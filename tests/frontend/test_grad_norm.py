"""Norms of parameters that others placed; those of our own are in ``test_parity.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

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


class Operators(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def with_gradients(dtypes, n: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = []
    for i in range(n):
        param = nn.Parameter(torch.randn(3, i, dtype=dtypes[i % len(dtypes)]))
        param.grad = torch.randn_like(param)
        params.append(param)
    return params


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32]])
def test_a_few_kernels_however_many_parameters(norm_type, dtypes):
    counts = []
    for n in (10, 100):
        params = with_gradients(dtypes, n)
        wanted = [p.grad.clone() for p in params]
        parts = torch.cat([grad.float().flatten() for grad in wanted])
        norm = torch.linalg.vector_norm(parts, norm_type)
        with Operators() as launched:
            total = clip_grad_norm_(params, 0.5, norm_type)
        counts.append(launched.calls)
        torch.testing.assert_close(total, norm)
        for param, grad in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.grad, grad.mul_(0.5 / (norm + 1e-6)))
    assert counts[0] == counts[1] <= 24


def test_gradients_of_double_precision():
    params = with_gradients([torch.float64, torch.float32], 4)
    wanted = torch.nn.utils.get_total_norm([p.grad.double() for p in params])
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(wanted.item())
    for param in params[::2]:  # as on a rank that used none of those
        param.grad = None
    assert clip_grad_norm_(params, 1.0).dtype == torch.float64


def test_on_a_gpu_the_factor_is_of_the_gradients_dtype(monkeypatch):
    """Else PyTorch launches a kernel for each of them."""
    factors = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda grads, factor: factors.append(factor.dtype))
    params = [param.to("meta") for param in with_gradients([torch.bfloat16, torch.float32], 4)]
    for param in params:
        param.grad = torch.ones_like(param)
    clip_grad_norm_(params, 1.0)
    assert factors == [torch.bfloat16, torch.float32]
