"""The Llama 3 family as data: hyper-parameters, and numbers that follow from them by formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

DOCUMENT_SEPARATOR = 0xFF
"""The byte between documents of a byte-level corpus: the one that never occurs in UTF-8 text."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths beyond the original context.

    Wavelengths shorter than `original_context / high_freq_factor` are kept, those longer than
    `original_context / low_freq_factor` are multiplied by `factor`, those between are
    interpolated. Source: `apply_scaling` in meta-llama/llama-models.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The hyper-parameters of one Llama 3 model.

    Raises:
        ValueError: A size is not positive, or the heads do not divide as they must.
    """

    vocab_size: int  # 256 means byte-level: a token is a byte
    dim: int  # of the residual stream
    n_layers: int
    n_heads: int  # of queries; each has `dim / n_heads` channels
    n_kv_heads: int  # divides `n_heads`
    ffn_dim: int  # of the SwiGLU feed-forward
    # The number of rows of the rotary tables, which depend on it in no other way: a smaller one
    # changes no weight and no result.
    max_seq_len: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = RopeScaling()
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    tie_embeddings: bool = False  # the embedding matrix is the output matrix, too
    bos_token_id: int = 128000
    eos_token_id: int = 128001

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_seq_len")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(
                f"dim ({self.dim}) must be a multiple of 2 * n_heads (2 * {self.n_heads}): rotary "
                "embedding turns the channels of a head in pairs"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads}): "
                "each key/value head serves the same number of query heads"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


# The trainer reads bytes, so our own two have no use for a vocabulary beyond 256: a 128256-row
# embedding would be most of a 160M model, and nearly all of it would never see a token.
CONFIGS: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(
        vocab_size=256, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=384,
        max_seq_len=2048, rope_scaling=None,
        bos_token_id=DOCUMENT_SEPARATOR, eos_token_id=DOCUMENT_SEPARATOR,
    ),
    "160m": LlamaConfig(
        vocab_size=256, dim=1024, n_layers=12, n_heads=16, n_kv_heads=4, ffn_dim=3456,
        max_seq_len=8192, rope_scaling=None,
        bos_token_id=DOCUMENT_SEPARATOR, eos_token_id=DOCUMENT_SEPARATOR,
    ),
    "1b": LlamaConfig(
        vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192,
        rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336,
    ),
    "70b": LlamaConfig(
        vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672,
    ),
    "405b": LlamaConfig(
        vocab_size=128256, dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248,
    ),
}  # fmt: skip
"""`debug` and `160m` are our own, byte-level, for any machine and for one GPU. `1b` is Llama 3.2,
the others are Llama 3.1, with the published sizes."""


def config_of(name: str, layers: int | None = None) -> LlamaConfig:
    """The hyper-parameters of ``--model``, with ``layers`` layers, None for all of them. Raises a
    ValueError that lists the names if ``name`` is unknown."""
    if name not in CONFIGS:
        raise ValueError(f"unknown --model {name!r}: choose one of {', '.join(CONFIGS)}")
    config = CONFIGS[name]
    return config if layers is None else replace(config, n_layers=layers)


def num_parameters(config: LlamaConfig) -> int:
    """The number of parameters, by formula; a tied embedding counts once."""
    embeddings = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return embeddings + config.n_layers * sum(layer_numels(config)) + config.dim


def layer_numels(config: LlamaConfig) -> list[int]:
    """The elements of each parameter of a layer, by formula, in the layer's order."""
    dim, kv_dim = config.dim, config.n_kv_heads * config.head_dim
    attention = [dim * dim, dim * kv_dim, dim * kv_dim, dim * dim]
    return [dim, *attention, dim, *[dim * config.ffn_dim] * 3]


def flops_per_token(config: LlamaConfig, seq_len: int) -> int:
    """Floating-point operations of one training step per token, for model FLOPs utilisation.

    `6 N + 12 * n_layers * n_heads * head_dim * seq_len`, as in PaLM (Chowdhery et al. 2022,
    appendix B): two operations per weight in the forward and four in the backward, and the same
    for the two attention matmuls. N leaves out the embedding lookup, which is no matmul, but
    keeps the output matrix, tied or not. By that source's convention neither the causal mask
    (which halves attention) nor recomputation is counted.
    """
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.dim
    attention = 12 * config.n_layers * config.dim * seq_len
    return 6 * (num_parameters(config) - lookup) + attention
