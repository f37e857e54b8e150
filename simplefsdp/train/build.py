"""What the training step calls: the model and its loss, compiled as one graph."""

from typing import Any

import torch
from torch import nn

from simplefsdp.models.build import WithLoss
from simplefsdp.train.config import CompileOptions, backend_options


def loss_of(model: nn.Module, options: CompileOptions) -> Any:
    """From tokens and targets, ``[b, s]`` each, to their mean loss, 0-d: compiled, or with
    ``--no-compile`` as it is.

    With Llama 3's vocabulary the float32 logits of one sequence are gigabytes: a graph that goes
    on to the loss never stores them whole, and its plan accounts for what it does store.
    """
    whole = WithLoss(model)
    if not options.compile:
        return whole
    return torch.compile(whole, backend="simplefsdp", options=backend_options(options))
