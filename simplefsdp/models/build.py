"""From options to a wrapped model, still on meta, and its loss."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from simplefsdp.models.configs import CONFIGS, LlamaConfig
from simplefsdp.models.layout import data_parallel_mesh, precision_policy
from simplefsdp.models.llama3 import Llama
from simplefsdp.models.options import ModelOptions, ParallelOptions
from simplefsdp.models.tensor_parallel import apply_tensor_parallel
from simplefsdp.wrap import simple_fsdp


def model_config(options: ModelOptions) -> LlamaConfig:
    """The hyper-parameters by name. Raises ValueError, listing the names, for an unknown one."""
    if options.config not in CONFIGS:
        raise ValueError(f"unknown --config {options.config!r}: choose one of {', '.join(CONFIGS)}")
    return CONFIGS[options.config]


def plain_model(options: ModelOptions) -> Llama:
    """The model on meta, as it is before anything parallel."""
    with torch.device("meta"):
        return Llama(
            model_config(options), activation_checkpointing=options.activation_checkpointing
        )


def wrapped_model(
    model_options: ModelOptions, options: ParallelOptions, mesh: DeviceMesh
) -> nn.Module:
    """The model on meta, split over ``tp`` if the mesh has it, then wrapped over the rest."""
    model = plain_model(model_options)
    if options.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    return simple_fsdp(
        model,
        data_parallel_mesh(mesh),
        mode=options.mode,
        mp_policy=precision_policy(options, mesh.device_type),
        reshard_after_forward=options.reshard_after_forward,
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, in float32: ``[b, s, vocab]``, ``[b, s]`` -> 0-d."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
