"""What tests on ranks compare with one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def mesh_for(mode: str) -> DeviceMesh:
    ranks = dist.get_world_size()
    if mode == "hybrid_shard":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks,))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def global_loss(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def relative_error(got: torch.Tensor, wanted: torch.Tensor, floor: float = 1e-12) -> float:
    """Norm of the difference over the norm of ``wanted``, or over ``floor`` if that is larger."""
    scale = wanted.double().norm().clamp_min(floor)
    return ((got.double() - wanted.double()).norm() / scale).item()


def compare_gradients(plain, model, tolerance):
    largest = max(p.grad.norm().item() for p in plain.parameters() if p.grad is not None)
    for fqn, param in plain.named_parameters():
        got = model.get_parameter(fqn).grad
        if param.grad is None:
            assert got is None, fqn
        else:
            assert isinstance(got, DTensor) and got.dtype == param.dtype, fqn
            # a scalar's gradient is a sum of many terms that cancel: its error is the terms'
            floor = largest if param.dim() == 0 else 1e-12
            error = relative_error(got.full_tensor(), param.grad, floor)
            assert error < tolerance, (fqn, error)
