"""Floating-point operations of attention, by formulas of our own.

torch's differ by version: before 2.12 they refuse grouped queries, before 2.13 there is none for
flex attention, before 2.15 none for the CPU's operators. A plan is to depend on no version. And
torch has none for the flash-attn package, which Hugging Face's ``"flash_attention_2"`` calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class AttentionOp(NamedTuple):
    """An operator: where its arguments are, and how its tensors lie."""

    query: int = 0  # place of the query among the arguments; key and value are behind it
    backward: bool = False  # whether it computes gradients
    # Dimension of the key that counts its tokens.
    length: int = -2  # of [batch, heads, tokens, channels]
    # Place of the length of the longest key, where sequences are packed behind one another; each is
    # taken to be so long, since where they begin is data.
    longest: int | None = None

    def flops(self, args: Sequence[Any]) -> int:
        """Operations of a call with these arguments, of tensors their shapes.

        Scores are ``[batch, heads of the query, queries, keys]``: a head of the key may serve
        several of the query. What a mask or a window leaves out is counted. Forward is two matmuls:
        scores of query and key, output of scores and value. Backward is five: the scores once more,
        and the gradients of scores, value, query and key.
        """
        query, key, value = args[self.query : self.query + 3]
        keys = key[self.length] if self.longest is None else args[self.longest]
        channels = 3 * query[-1] + 2 * value[-1] if self.backward else query[-1] + value[-1]
        flops: int = math.prod(query[:-1]) * keys * 2 * channels  # a SymInt, if sizes are
        return flops


_FUSED = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)

OPERATORS = {
    **dict.fromkeys(_FUSED, AttentionOp()),
    **dict.fromkeys((f"{name}_backward" for name in _FUSED), AttentionOp(1, backward=True)),
    "flex_attention": AttentionOp(),
    "flex_attention_backward": AttentionOp(backward=True),
    "torch_attn::_varlen_attn": AttentionOp(longest=6),
    "torch_attn::_varlen_attn_backward": AttentionOp(1, backward=True, longest=9),
    # [batch, tokens, heads, channels], or packed; as flash-attn 2 has registered them since 2.7.
    "flash_attn::_flash_attn_forward": AttentionOp(length=-3),
    "flash_attn::_flash_attn_backward": AttentionOp(1, backward=True, length=-3),
    "flash_attn::_flash_attn_varlen_forward": AttentionOp(longest=6),
    "flash_attn::_flash_attn_varlen_backward": AttentionOp(1, backward=True, longest=12),
}
"""By the operator's name."""
