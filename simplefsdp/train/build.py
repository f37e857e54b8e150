"""What the training step calls: the model and its loss, compiled as one graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inductor_passes.passes import PassError
from simplefsdp.launcher.errors import UserError
from simplefsdp.models.build import WithLoss
from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.step.compile_step import compile_step
from simplefsdp.train.config import CompileOptions, TrainConfig, as_flags, backend_options


@contextmanager
def telling_flags() -> Iterator[None]:
    """Have what the compiler tells its user name options of the command line.

    Raises:
        UserError: such an option must have another value.
        PassError: a pass failed, which is a defect; one may do without.
    """
    try:
        yield
    except RankMismatchError:  # quotes what ranks have
        raise
    except (ValueError, RuntimeError) as error:
        told = as_flags(str(error))
        if told == str(error):
            raise
        kind = UserError if isinstance(error, ValueError) else PassError
        raise kind(told) from error


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


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, microbatches: int
) -> Any:
    """From tokens and targets of the last micro-batch, ``[b, s]`` each, to its share of the mean
    loss and the gradients' norm, the parameters updated: one program. None without
    ``--whole-step``."""
    if not config.compile.whole_step:
        return None
    with_loss = WithLoss(model)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return with_loss(tokens, targets) / microbatches  # type: ignore[no-any-return]

    return compile_step(
        loss_of,
        optimizer,
        max_norm=config.optim.max_grad_norm,
        options=backend_options(config.compile),
    )
