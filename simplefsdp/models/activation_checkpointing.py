"""What the backward recomputes of a layer: nothing, the cheap operations, or everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from simplefsdp.models.options import ActivationCheckpointing


def layer_caller(mode: ActivationCheckpointing) -> Callable[..., Tensor]:
    """How a model should call a layer: `call(layer, *inputs)`.

    - "none": every activation is kept until the backward.
    - "selective": the outputs of matmuls and attention are kept, and so are those of
      tensor-parallel reductions; norms, rotary turns, SwiGLU products and casts are recomputed.
      The backward repeats no matmul and no transfer of activations.
    - "full": only the layer's input is kept; the backward runs its forward again. Compiled by
      the simplefsdp backend for the CPU, attention's output is kept too (see `recompute.py`).

    Raises:
        ValueError: Another mode.
    """
    if mode not in get_args(ActivationCheckpointing):
        raise ValueError(
            f"activation_checkpointing must be one of {get_args(ActivationCheckpointing)}, "
            f"got {mode!r}"
        )
    # The model has no dropout, so there is no generator state worth stashing.
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    callers: dict[str, Callable[..., Tensor]] = {
        "none": _call,
        "selective": partial(recomputed, context_fn=_selective_contexts),
        "full": recomputed,
    }
    return callers[mode]


def _call(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return layer(*inputs)  # type: ignore[no-any-return]


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
# By list, torch keeps these and prefers to recompute the rest.
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_reduce.default,
]
