"""The parts of a training step: the model with its loss in one graph, AdamW, the learning rate."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from inductor_passes.passes import PassError
from simplefsdp.launcher.errors import UserError
from simplefsdp.models.build import WithLoss
from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.step.compile_step import compile_step
from simplefsdp.train.config import (
    CompileOptions,
    OptimOptions,
    TrainConfig,
    as_flags,
    backend_options,
)

_FINAL_LR_FRACTION = 0.1


@contextmanager
def telling_flags() -> Iterator[None]:
    """Rewrite errors of the compiler so that they name command-line flags, not compiler options.

    Raises:
        UserError: a ValueError named an option, which must have another value.
        PassError: a RuntimeError named an option that avoids it: a pass failed, which is a defect.
    """
    try:
        yield
    except RankMismatchError:  # its message quotes what the ranks have, which is not rewritten
        raise
    except (ValueError, RuntimeError) as error:
        told = as_flags(str(error))
        if told == str(error):
            raise
        kind = UserError if isinstance(error, ValueError) else PassError
        raise kind(told) from error


def loss_of(model: nn.Module, options: CompileOptions) -> Any:
    """A module that maps tokens and targets, ``[b, s]`` each, to their mean loss, 0-d; compiled
    unless ``--no-compile`` is given.

    The loss is part of the graph because, with Llama 3's vocabulary, the float32 logits of one
    sequence take gigabytes. Such a graph never stores them whole, and its plan counts what it does
    store.
    """
    whole = WithLoss(model)
    if not options.compile:
        return whole
    return torch.compile(whole, backend="simplefsdp", options=backend_options(options))


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, microbatches: int
) -> Any:
    """The step of the last micro-batch as one compiled program; None without ``--whole-step``.

    The program takes tokens and targets, ``[b, s]`` each, and updates the parameters. It returns
    the micro-batch's share of the mean loss, and the norm of the gradients.
    """
    if not config.compile.whole_step:
        return None
    with_loss = WithLoss(model)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return with_loss(tokens, targets) / microbatches

    return compile_step(
        loss_of,
        optimizer,
        max_norm=config.optim.max_grad_norm,
        options=backend_options(config.compile),
    )


def learning_rate(step: int, options: OptimOptions) -> float:
    """Learning rate of update number ``step``, counted from 0.

    Rises linearly to ``lr`` over ``warmup`` updates, then follows half a cosine down to
    a tenth of it, which update ``steps - 1`` gets. A function of the step alone, so
    there is no schedule state to save.
    """
    warmup = options.warmup
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, options.steps - 1 - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.lr * (_FINAL_LR_FRACTION + (1.0 - _FINAL_LR_FRACTION) * cosine)


def make_optimizer(model: nn.Module, options: OptimOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; only matrices are decayed.

    Parameters are also grouped by mesh, because one kernel for many parameters cannot mix DTensors
    of different meshes (tensor-parallel parameters live on a larger mesh). The fused kernel is the
    whole update, and reads and writes each tensor once. There is no such kernel for meta tensors.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    on_meta = any(p.is_meta for parameters in groups.values() for p in parameters)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": options.weight_decay if decayed else 0.0}
            for (decayed, _), parameters in groups.items()
        ],
        lr=options.lr,
        betas=(0.9, 0.95),
        foreach=on_meta,
        fused=not on_meta,
    )
