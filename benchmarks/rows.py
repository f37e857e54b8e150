"""The rows of the benchmark: a model, a batch, a wire; and the grid that RESULTS.md shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from simplefsdp.models import LlamaConfig

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Row:
    """What is trained, over which wire."""

    layers: int = 6
    """Transformer layers."""
    dim: int = 512
    """Width; a multiple of two heads'. The feed-forward is 3.5 times as wide."""
    vocab: int = 2048
    """Rows of the embedding and of the output matrix."""
    seq_len: int = 256
    """Tokens per sequence."""
    batch: int = 2
    """Sequences per rank."""
    dtype: Precision = "fp32"
    """bf16: parameters gathered and computed with in bf16, gradients reduced in fp32."""
    world_size: int = 8
    """Virtual ranks."""
    wire_ratio: float = 0.75
    """Bytes of all gathers and reduces / bandwidth, as a multiple of the compiled model's forward
    and backward without communication, which is measured first."""
    bandwidth_gb_s: float | None = None
    """Bandwidth in 1e9 bytes/s instead, whatever the compute."""
    latency_us: float = 100.0
    """Added to each collective, on top of --wire-ratio."""
    head: int = 64
    """Channels of a head."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.head):
            raise ValueError(
                f"dim: expected a multiple of {2 * self.head} (heads of {self.head}), "
                f"got {self.dim}"
            )
        if self.world_size < 2:
            raise ValueError(f"world_size: expected 2 or more, got {self.world_size}")
        if self.wire_ratio <= 0:
            raise ValueError(f"wire_ratio: expected more than 0, got {self.wire_ratio}")

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype on the wire of gathers, and of compute."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def config(self) -> LlamaConfig:
        """The model: half as many key/value heads as query heads."""
        heads = self.dim // self.head
        return LlamaConfig(
            vocab_size=self.vocab,
            dim=self.dim,
            n_layers=self.layers,
            n_heads=heads,
            n_kv_heads=heads // 2,
            ffn_dim=7 * self.dim // 2,
            max_seq_len=self.seq_len,
            rope_scaling=None,
        )


# The wire is that of 8 H100 in one node (nccl-tests: 394 GB/s of gathered bytes, 30 us).
_GPU = Row(
    layers=4, dim=4096, head=128, vocab=32000, seq_len=4096, batch=1, dtype="bf16",
    latency_us=30.0, bandwidth_gb_s=394.0,
)  # fmt: skip

ROWS: dict[str, Row] = {
    "default": Row(),
    "ratio_half": Row(wire_ratio=0.5),
    "ratio_one": Row(wire_ratio=1.0),
    "bandwidth_bound": Row(wire_ratio=1.5),
    "latency_bound": Row(wire_ratio=0.1, latency_us=3000.0),
    "small": Row(layers=4, dim=256, vocab=1024, seq_len=256, batch=2),
    "large": Row(layers=12, dim=768, seq_len=256, batch=1),
    "long_sequence": Row(seq_len=1024, batch=1),
    # Small, because a CPU without bf16 instructions multiplies bf16 matrices some 50 times slower.
    "bf16": Row(layers=4, dim=256, vocab=1024, seq_len=128, batch=1, dtype="bf16"),
    "world_64": Row(world_size=64),
}

GPU_ROWS: dict[str, Row] = {"gpu": _GPU, "gpu_tight": replace(_GPU, seq_len=1024)}
"""Of `benchmarks/gpu`, and of `--row`; `--grid` is for CPU and leaves them out."""
