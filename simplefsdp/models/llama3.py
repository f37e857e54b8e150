"""Llama 3 in plain PyTorch: grouped-query attention, rotary embedding, SwiGLU, RMSNorm.

Modules carry the names of `transformers`' Llama, so that weights map one to one. Nothing here
knows of sharding: each module initialises what it owns through in-place calls, which work on
plain tensors and on DTensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from simplefsdp.models.configs import LlamaConfig
from simplefsdp.models.options import ActivationCheckpointing

_INIT_STD = 0.02


def _init_normal(weight: Tensor, std: float) -> None:
    # On meta there is nothing to fill, and torch would import its compiler for it, for a second.
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """A matrix without bias, initialised from a normal distribution of the given deviation."""

    def __init__(self, in_features: int, out_features: int, init_std: float = _INIT_STD) -> None:
        self.init_std = init_std  # first, because nn.Linear initialises while it is constructed
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        _init_normal(self.weight, self.init_std)


class Embedding(nn.Embedding):
    """A token embedding, initialised from a normal distribution of the given deviation."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        _init_normal(self.weight, self.init_std)


class RMSNorm(nn.Module):
    """Scales to unit root mean square, in fp32 whatever the input; returns the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x [..., dim]` over its last dimension."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """The cosines and sines by which queries and keys are rotated; buffers that are never saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.max_seq_len, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the tables on their device; to be called after `to_empty`."""
        if self.cos.is_meta:
            return
        position = torch.arange(self.config.max_seq_len, device=self.cos.device).float()
        angle = torch.outer(position, rope_frequencies(self.config, self.cos.device))
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, seq_len: int) -> tuple[Tensor, Tensor]:
        """The tables for positions 0 to `seq_len` - 1, each `[seq_len, head_dim / 2]`, fp32."""
        return self.cos[:seq_len], self.sin[:seq_len]


def rope_frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair of channels: fp32 `[head_dim / 2]`.

    With `config.rope_scaling` they follow Llama 3.1; see `RopeScaling` for the source.
    """
    channel = torch.arange(0, config.head_dim, 2, device=device).float()
    frequency = 1.0 / config.rope_theta ** (channel / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * frequency / scaling.factor + keep * frequency


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns `x [batch, heads, seq, head_dim]` by its position; returns `x`'s dtype.

    A pair is channel i and channel i + head_dim / 2, the layout of `transformers`' checkpoints
    (Meta's own files pair neighbours). The turn itself is done in fp32.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, config.dim)
        self.k_proj = Linear(config.dim, kv_dim)
        self.v_proj = Linear(config.dim, kv_dim)
        self.o_proj = Linear(config.dim, config.dim, init_std=_residual_std(config))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [batch, seq, dim]` to the same shape; `cos`, `sin` are `[seq, head_dim / 2]`."""
        q, k, v = (self._split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads comes from the tensor: under tensor parallelism it is this rank's.
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.ffn_dim)
        self.up_proj = Linear(config.dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.dim, init_std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """`x [batch, seq, dim]` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer: attention, then feed-forward, each normalised first and added."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [batch, seq, dim]` to the same shape; `cos`, `sin` are `[seq, head_dim / 2]`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama 3 language model.

    With `config.tie_embeddings` there is no `lm_head`: the one matrix is `embed_tokens.weight`,
    so nothing can come untied. Matrices start with deviation 0.02, those that write into the
    residual stream with 0.02 / sqrt(2 * n_layers) (as GPT-2's), and the embedding with 1, or 0.02
    where it is the output matrix too.

    To build it without memory, construct it under `torch.device("meta")`; then `to_empty` and
    `reset_parameters()` of every module that has one make it complete, rotary tables included.

    `activation_checkpointing` says what the backward recomputes of each layer, see `layer_caller`.
    """

    def __init__(
        self, config: LlamaConfig, activation_checkpointing: ActivationCheckpointing = "none"
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self._call_layer: Callable[..., Tensor] = layer_caller(activation_checkpointing)
        embedding_std = _INIT_STD if config.tie_embeddings else 1.0
        self.embed_tokens = Embedding(config.vocab_size, config.dim, embedding_std)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at every position, in the dtype of the weights: int64
        `[batch, seq]` -> `[batch, seq, vocab_size]`.

        Raises:
            ValueError: The sequence is longer than `config.max_seq_len`.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"sequence of {seq_len} tokens is longer than max_seq_len "
                f"{self.config.max_seq_len}: shorten it, or build the model with "
                "dataclasses.replace(config, max_seq_len=...)"
            )
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(seq_len)
        for layer in self.layers:
            x = self._call_layer(layer, x, cos, sin)
        x = self.norm(x)
        if self.lm_head is None:
            return F.linear(x, self.embed_tokens.weight)
        return self.lm_head(x)


def _residual_std(config: LlamaConfig) -> float:
    return _INIT_STD / math.sqrt(2 * config.n_layers)


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
    # The model has no dropout, so there is no generator state worth stashing.
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    callers: dict[str, Callable[..., Tensor]] = {
        "none": _call,
        "selective": partial(recomputed, context_fn=_selective_contexts),
        "full": recomputed,
    }
    if mode not in callers:
        raise ValueError(f"activation_checkpointing must be one of {tuple(callers)}, got {mode!r}")
    return callers[mode]


def _call(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return layer(*inputs)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_KEPT)


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
