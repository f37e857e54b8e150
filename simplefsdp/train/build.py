"""What the training step calls: the compiled model, and its loss."""

from typing import Any

import torch
from torch import nn

from simplefsdp.models.build import cross_entropy
from simplefsdp.train.config import CompileOptions, backend_options


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
