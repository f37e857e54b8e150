"""Floating-point operations of attention, by formulas of our own.

torch's formulas differ by version: before 2.12 they refuse grouped queries, before 2.13 there is
none for flex attention, before 2.15 none for the CPU's operators. A plan must not depend on the
version. And torch has no formula for the operators of the flash-attn package, which Hugging Face's
``"flash_attention_2"`` calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class AttentionOp(NamedTuple):
    """An attention operator: where its arguments are, and how its tensors are laid out."""

    query: int = 0  # place of the query among the arguments; key and value are behind it
    backward: bool = False  # whether it computes gradients
    # Dimension of the key that counts its tokens.
    length: int = -2  # of [batch, heads, tokens, channels]
    # For packed sequences: place among the arguments of the length of the longest key sequence.
    # Every sequence is taken to be that long, since their real lengths are data.
    longest: int | None = None

    def flops(self, args: Sequence[Any]) -> int:
        """Operations of a call with these arguments; a tensor is given as its shape.

        Scores are ``[batch, heads of the query, queries, keys]``: a head of the key may serve
        several of the query. Scores that a mask or a window leaves out are counted, too. Forward is
        two matmuls: query and key make scores, scores and value make the output. Backward is five:
        the scores once more, and the gradients of scores, value, query and key.
        """
        query, key, value = args[self.query : self.query + 3]
        keys = key[self.length] if self.longest is None else args[self.longest]
        channels = 3 * query[-1] + 2 * value[-1] if self.backward else query[-1] + value[-1]
        flops: int = math.prod(query[:-1]) * keys * 2 * channels  # a SymInt, if the sizes are
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
    # [batch, tokens, heads, channels], or packed; with the arguments that flash-attn 2 has
    # registered since 2.7.
    "flash_attn::_flash_attn_forward": AttentionOp(length=-3),
    "flash_attn::_flash_attn_backward": AttentionOp(1, backward=True, length=-3),
    "flash_attn::_flash_attn_varlen_forward": AttentionOp(longest=6),
    "flash_attn::_flash_attn_varlen_backward": AttentionOp(1, backward=True, longest=12),
}
"""Attention operators by name."""
