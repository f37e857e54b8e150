"""An example of a model for ``simplefsdp inspect --target``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp.frontend.wrap import simple_fsdp

WIDTH = 2048


def build_model(mesh: DeviceMesh) -> nn.Module:
    """A wrapped model; on meta, as nothing names a device."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return simple_fsdp(nn.Sequential(*blocks, nn.Linear(WIDTH, 1)), mesh, mp_policy=policy)


def example_batch() -> Tensor:
    """The input of one rank's forward."""
    return torch.randn(4096, WIDTH, dtype=torch.bfloat16)
