"""The models of the matrix: real architectures, tiny and random; nothing is downloaded.

Every configuration is its library's default except for sizes. So `use_cache` stays True, and tied
weights, attention implementation and auxiliary losses are what a user gets. One change is needed
for parity: every dropout probability (and drop path, layer drop) is set to 0, because no two
programs draw the same masks; `Sample.silenced` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 128
ROWS = 4  # of a batch, two per rank
LENGTH = 16  # of a text

Batch = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A model and what it eats.

    Attributes:
        model: on the CPU, in training mode, its values those of the seed.
        batch: makes the keyword arguments of one forward by torch's generator; the rows of its
            tensors are shared out among the ranks.
        silenced: options whose default is not 0 and that were set to 0, so that there is parity.
    """

    model: nn.Module
    batch: Callable[[], Batch]
    silenced: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One row of the matrix.

    Attributes:
        build: makes it.
        tolerance: largest relative difference of gradients that counts as parity; 1e-5 in fp32.
        note: what is to be known when the row is read.
    """

    build: Callable[[], Sample]
    tolerance: float = 1e-5
    note: str = ""


# What configurations call the same sizes. Each gets those that it knows; the rest is given by name.
WIDTH, LAYERS, HEADS, INNER = 32, 2, 4, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
}
DROPS = ("drop", "dropout", "drop_rate", "layerdrop", "drop_path", "pdrop")


def silence(config: Any, prefix: str = "") -> Iterator[str]:
    """Set every dropout probability of a configuration, and of its parts, to 0; their names."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            yield from silence(value, f"{prefix}{name}.")
        elif isinstance(value, float) and value and any(part in name for part in DROPS):
            setattr(config, name, 0.0)
            yield f"{prefix}{name}={value}"


def texts(vocab: int = VOCAB, length: int = LENGTH) -> Tensor:
    """Tokens of one batch; the lowest, which may be special, are left out."""
    return torch.randint(8, vocab, (ROWS, length))


def labelled() -> Batch:
    """Texts that are their own labels."""
    ids = texts()
    return {"input_ids": ids, "labels": ids.clone()}


def hugging_face(
    cls: str,
    batch: Callable[[], Batch] = labelled,
    *,
    base: Mapping[str, Any] = SIZES,
    note: str = "",
    **sizes: Any,
) -> Entry:
    """A model of transformers, of its default configuration but for sizes.

    Args:
        cls: of the model; its ``config_class`` is the configuration.
        batch: see :class:`Sample`.
        base: sizes, in the names of most configurations; ``{}`` for one with names of its own.
        note: see :class:`Entry`.
        sizes: further ones, and the numbers of special tokens, which are sizes of the vocabulary.
    """

    def build() -> Sample:
        import transformers

        model_class = getattr(transformers, cls)
        config = model_class.config_class(**{**base, **sizes})
        silenced = tuple(silence(config))
        return Sample(model_class(config).train(), batch, silenced)

    return Entry(build, note=note)
