"""A model that Dynamo breaks wherever a model may be broken, and what it is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6  # not divisible by 4


class Views(nn.Module):
    """Hands two views of one tensor from one graph to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        one, other = y[0], y[1]
        torch._dynamo.graph_break()
        return x + torch.stack([one * 2, other + one])


class Crossing(nn.Module):
    """Gathers a parameter in one graph, and computes with it and a view of it in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weight, turned = self.weight, self.weight.t()
        x = x @ weight
        torch._dynamo.graph_break()
        return (x @ turned).tanh() + x @ weight


class Twice(nn.Module):
    """Gathers a parameter in two graphs, with one between them that gathers none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        torch._dynamo.graph_break()
        x = x.sin() + 1
        torch._dynamo.graph_break()
        return self.fc(x).tanh()


class Recomputed(nn.Module):
    """Breaks inside of a region that the user checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            torch._dynamo.graph_break()
        return x


class Guarded(nn.Module):
    """Breaks where Dynamo cannot resume, so that the whole frame runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            try:
                x = self.fc(x) * self.gain
                torch._dynamo.graph_break()
            except KeyError:
                pass
            else:
                x = x.tanh()
        return x


PARTS = {part.__name__: part for part in (Views, Crossing, Twice, Recomputed, Guarded)}


class Broken(nn.Module):
    """All of them in a row, or some."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(PARTS[name]() for name in names or PARTS)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(x)
