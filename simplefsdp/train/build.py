"""From options to a wrapped model, still on meta: the same steps for a run and for a dry run."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import simple_fsdp
from simplefsdp.models import CONFIGS, Llama, LlamaConfig, apply_tensor_parallel
from simplefsdp.train.config import (
    CompileOptions,
    ModelOptions,
    ParallelOptions,
    backend_options,
)
from simplefsdp.train.distributed import data_parallel_mesh, precision_policy
from simplefsdp.train.evaluate import cross_entropy


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


def loss_function(options: CompileOptions, device: torch.device) -> Any:
    """Cross entropy of logits and targets; compiled on CUDA, where it saves whole copies of them.

    With Llama 3's vocabulary the float32 logits of one sequence are gigabytes; fused, they are
    never stored. On CPU it is not worth the seconds it takes to compile.
    """
    return (
        torch.compile(cross_entropy) if options.compile and device.type == "cuda" else cross_entropy
    )


def compiled_model(model: nn.Module, options: CompileOptions) -> Any:
    """What the training step calls: the compiled model, or with ``--no-compile`` the model."""
    if not options.compile:
        return model
    return torch.compile(
        model,
        backend="simplefsdp",
        options=backend_options(options),
    )
