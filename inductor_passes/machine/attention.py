"""Floating-point operations of attention, by formulas of our own.

torch's differ by version: before 2.12 they refuse grouped queries, before 2.13 there is none for
flex attention, before 2.15 none for the CPU's operators. A plan is to depend on no version.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Shape = tuple[int, ...]


def _forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two matmuls: scores of the query and key, output of the scores and value."""
    return _scores(query, key) * 2 * (query[-1] + value[-1])


def _backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Five matmuls: the scores once more, and the gradients of scores, value, query and key."""
    return _scores(query, key) * 2 * (3 * query[-1] + 2 * value[-1])


def _flex_backward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return _backward(query, query, key, value)


def _scores(query: Shape, key: Shape) -> int:
    """How many scores there are, ``[batch, heads of the query, queries, keys]``: a head of the
    key may serve several of the query. What a mask leaves out is in it."""
    return math.prod(query[:-1]) * key[-2]


_FUSED = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)

# By the operator's name; called with its arguments, of tensors their shapes.
FLOPS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(_FUSED, _forward),
    **{f"{name}_backward": _backward for name in _FUSED},
    "flex_attention": _forward,
    "flex_attention_backward": _flex_backward,
}
