"""AdamW over DTensor parameters, and the learning-rate schedule."""

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simplefsdp.train.config import OptimOptions

FINAL_LR_FRACTION = 0.1


def learning_rate(step: int, options: OptimOptions) -> float:
    """Learning rate of update number ``step``, counted from 0.

    Rises linearly to ``lr`` over ``warmup`` updates, then follows half a cosine down to
    ``FINAL_LR_FRACTION * lr``, which update ``steps - 1`` gets. A function of the step alone, so
    there is no schedule state to save.
    """
    warmup = options.warmup
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, options.steps - 1 - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.lr * (FINAL_LR_FRACTION + (1.0 - FINAL_LR_FRACTION) * cosine)


def make_optimizer(model: nn.Module, options: OptimOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; only matrices are decayed.

    One parameter group per mesh as well, because one kernel for many parameters cannot mix DTensors
    of different meshes (tensor-parallel parameters live on a larger one). On CUDA that kernel is
    the whole update, which reads and writes each tensor once.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    on_cuda = all(p.device.type == "cuda" for parameters in groups.values() for p in parameters)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": options.weight_decay if decayed else 0.0}
            for (decayed, _), parameters in groups.items()
        ],
        lr=options.lr,
        betas=(0.9, 0.95),
        foreach=not on_cuda,
        fused=on_cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
