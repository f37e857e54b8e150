"""A small model with every kind of parameter, and its training loop, for parity tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
VOCAB = 11  # not divisible by 2 or 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)  # 10 rows: uneven on 4 ranks
        self.down = nn.Linear(10, WIDTH, bias=False)
        self.register_buffer("running", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x) * self.running.to(x.dtype))))


class Zoo(nn.Module):
    """Uneven, smaller than the ranks, scalar, frozen, tied, mixed-dtype, read twice, ...

    Args:
        scalars: include 0-d parameters (FSDP2 cannot shard them).
        mixed: include a parameter of another dtype.
        recompute: checkpoint the activations of the blocks.
    """

    def __init__(
        self, *, scalars: bool = True, mixed: bool = True, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute, self.mixed = recompute, mixed
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tiny = nn.Parameter(torch.randn(3, WIDTH) * 0.1)  # fewer rows than 4 ranks
        self.row = nn.Parameter(torch.randn(1, WIDTH) * 0.1)  # fewer rows than 2 ranks
        self.listed = nn.ParameterList([torch.randn(WIDTH) * 0.1, torch.randn(WIDTH) * 0.1])
        self.named = nn.ParameterDict({"gain": torch.ones(WIDTH)})
        self.scale = nn.Parameter(torch.tensor(0.5)) if scalars else None
        dtype = torch.bfloat16 if mixed else torch.float32
        self.narrow = nn.Parameter(torch.full((WIDTH,), 0.25, dtype=dtype))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = x + self.frozen(x) * self.named["gain"] + self.mix(x)
        for shift in self.listed:
            x = 0.5 * x + shift  # scaled, or both gradients are equal and CSE makes them one
        if self.scale is not None:
            x = x * self.scale
        return self.head(x * self.narrow.to(x.dtype))

    def mix(self, x: Tensor) -> Tensor:
        """Reads a parameter twice, and one of another module, outside any ``forward``."""
        twice = x @ self.tiny.t() @ self.tiny
        return twice + self.row + x @ self.blocks[0].up.weight.t() @ self.blocks[1].up.weight


class Small(Zoo):
    """Computes with fewer of the parameters: for what takes long to compile."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        x = x @ self.tiny.t() @ self.tiny + self.row
        return self.head(x * self.scale)


def batch(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step for all ranks, ``[ranks * 2, 5]``."""
    generator = torch.Generator().manual_seed(step)
    data = torch.randint(0, VOCAB, (ranks * 2, 6), generator=generator)
    return data[:, :-1], data[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
