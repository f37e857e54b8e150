"""Builds a wrapped model, still on meta, and its loss, from options.

A launcher builds the plain model to check a run, so the imports for wrapping are inside functions.
"""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from simplefsdp.models.configs import config_of
from simplefsdp.models.layout import data_parallel_mesh, precision_policy
from simplefsdp.models.llama3 import Llama
from simplefsdp.models.options import ModelOptions, ParallelOptions


def plain_model(options: ModelOptions, layers: int | None = None) -> Llama:
    """The model on meta, without parallelism; with ``layers`` layers, None for all of them."""
    config = config_of(options.model, layers)
    # On meta, not in a fake mode: slicing a mesh reads values of the mesh's own tensors.
    with torch.device("meta"):
        return Llama(config, activation_checkpointing=options.activation_checkpointing)


def wrapped_model(
    model_options: ModelOptions,
    options: ParallelOptions,
    mesh: DeviceMesh,
    layers: int | None = None,
) -> nn.Module:
    """The model on meta, split over ``tp`` if the mesh has it, then wrapped over the rest."""
    model = plain_model(model_options, layers)
    if options.tp > 1:
        from simplefsdp.models.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, mesh["tp"])
    return wrap(model, options, mesh)


def wrap(model: nn.Module, options: ParallelOptions, mesh: DeviceMesh) -> nn.Module:
    """``model``, in place, wrapped over all dimensions of the mesh but ``tp``."""
    from simplefsdp.frontend.wrap import simple_fsdp

    return simple_fsdp(
        model,
        data_parallel_mesh(mesh),
        mode=options.mode,
        mp_policy=precision_policy(options, mesh.device_type),
        reshard_after_forward=options.post_forward_ranks or options.reshard_after_forward,
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, in float32: ``[b, s, vocab]``, ``[b, s]`` -> 0-d."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class WithLoss(nn.Module):
    """A model of tokens, and the loss of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(tokens), targets)


def llama_with_loss(
    options: ModelOptions, parallel: ParallelOptions, mesh: DeviceMesh, layers: int | None = None
) -> WithLoss:
    """:func:`wrapped_model` with its loss of tokens and targets, ``[batch, seq]``; to be traced."""
    # torch warns of recomputed layers with in-place ops; ours have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    return WithLoss(wrapped_model(options, parallel, mesh, layers))
