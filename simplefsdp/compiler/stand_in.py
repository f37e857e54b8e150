"""An operator that stands for layers which are not traced, and its backward.

AOTAutograd runs it, on fake tensors, in the place of layers that are like a traced one. It takes
what the first of them takes and all their own inputs, gives what the last of them gives, and has a
gradient for each input that needs one. So what AOTAutograd notes of inputs and outputs is true of
the whole model. Nothing ever runs it for real (``lengthen.py`` puts the layers in its place).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp._torch import grad_like

_library = torch.library.Library("simplefsdp_depth", "DEF")
_library.define("layers(Tensor[] passed, Tensor[] own, Tensor[] example) -> Tensor[]")
_library.define("layers_backward(Tensor[] grads, Tensor[] own) -> Tensor[]")

layers = torch.ops.simplefsdp_depth.layers
layers_backward = torch.ops.simplefsdp_depth.layers_backward


@torch.library.register_fake("simplefsdp_depth::layers", lib=_library)
def _(passed: list[Tensor], own: list[Tensor], example: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value) for value in passed]


@torch.library.register_fake("simplefsdp_depth::layers_backward", lib=_library)
def _(grads: list[Tensor], own: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value) for value in (*grads, *own)]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: int, own: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        ctx.wanted = ctx.needs_input_grad[2 + passed : 2 + passed + own]
        # Unwrapped without DTensor's own operators, of which AOTAutograd would trace each.
        ctx.owners = values[passed : passed + own]
        values = tuple(v._local_tensor if isinstance(v, DTensor) else v for v in values)
        theirs = values[passed : passed + own]
        ctx.save_for_backward(*itertools.compress(theirs, ctx.wanted))
        return tuple(layers(list(values[:passed]), list(theirs), list(values[passed + own :])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = iter(layers_backward(list(grads), list(ctx.saved_tensors)))
        of_passed = [next(found) for _ in range(ctx.passed)]
        of_own = [
            grad_like(owner, next(found)) if is_wanted else None
            for owner, is_wanted in zip(ctx.owners, ctx.wanted, strict=True)
        ]
        rest = len(ctx.needs_input_grad) - 2 - len(of_passed) - len(of_own)
        return None, None, *of_passed, *of_own, *[None] * rest


def stand_in(
    passed: Sequence[Tensor], own: Sequence[Tensor], example: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The results of the layers that are not traced: one like each of ``passed``, the tensors that
    go from layer to layer, which all need a gradient. ``own`` are the inputs of these layers only,
    layer by layer; ``example`` are those of one traced layer, so that the graph tells which they
    are."""
    found = _Layers.apply(len(passed), len(own), *passed, *own, *example)
    return tuple(found)
