"""Which model, and how it is spread over the ranks: options of the trainer and of ``inspect``.

The field docstrings are the text of ``--help``.
"""

from dataclasses import dataclass
from typing import Literal

from simplefsdp.choices import Mode

ActivationCheckpointing = Literal["none", "selective", "full"]
MixedPrecision = Literal["auto", "none", "bf16"]


@dataclass(frozen=True)
class ModelOptions:
    """What is trained."""

    model: str = "debug"
    """A Llama 3 of ours: debug, 160m, 1b, 8b, 70b or 405b."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute activations in backward: in no block, in part of each block, or whole blocks."""


@dataclass(frozen=True)
class ParallelOptions:
    """How it is spread over the ranks."""

    ranks: int | None = None
    """Local ranks to start (not under torchrun). Default: 2 on CPU, every GPU on CUDA."""
    mode: Mode = "fully_shard"
    """Shard over all ranks; shard within groups and replicate across; or replicate (DDP)."""
    shard_size: int | None = None
    """Ranks per group for hybrid_shard. Default: the ranks of one node."""
    tp: int = 1
    """Tensor-parallel ranks (innermost)."""
    reshard_after_forward: bool = True
    """Drop gathered parameters after forward and gather them again in backward."""
    post_forward_ranks: int | None = None
    """Keep a part of each gathered parameter for backward, which gathers it from so many neighbours
    (the ranks of one node, say). It divides the ranks that share the shards."""
    mixed_precision: MixedPrecision = "auto"
    """bf16: gather and compute in bfloat16, reduce in float32. auto: bf16 on CUDA, none on CPU."""
