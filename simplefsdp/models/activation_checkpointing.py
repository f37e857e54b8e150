"""What the backward recomputes of a layer: nothing, the cheap operations, or everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from simplefsdp.models.options import ActivationCheckpointing


def layer_caller(mode: ActivationCheckpointing) -> Callable[..., Tensor]:
    """How a model should call a layer: `call(layer, *inputs)`.

    - "none": every activation is kept until the backward.
    - "selective": the outputs of matmuls and attention are kept, and so are those of
      tensor-parallel reductions; norms, rotary turns, SwiGLU products and casts are recomputed.
      The backward repeats no matmul and no transfer of activations.
    - "full": only the layer's input is kept; the backward runs its forward again. Compiled by
      the simplefsdp backend for the CPU, attention's output is kept too (see `recompute.py`).

    Args:
        mode: One of the above.

    Returns:
        A function that calls the layer under that mode.

    Raises:
        ValueError: Another mode.
    """
    if mode not in get_args(ActivationCheckpointing):
        raise ValueError(
            f"activation_checkpointing must be one of {get_args(ActivationCheckpointing)}, "
            f"got {mode!r}"
        )
    return {"none": _call, "selective": _call_selective, "full": _call_full}[mode]


def _call(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return layer(*inputs)  # type: ignore[no-any-return]


def _call_selective(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return _checkpoint(layer, *inputs, context_fn=_selective_contexts)


def _call_full(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return _checkpoint(layer, *inputs)


def _checkpoint(layer: nn.Module, *inputs: Tensor, **options: Any) -> Tensor:
    # The model has no dropout, so there is no generator state worth stashing.
    return checkpoint(  # type: ignore[no-any-return]
        layer, *inputs, use_reentrant=False, preserve_rng_state=False, **options
    )


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
