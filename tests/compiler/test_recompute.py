"""What backward computes again is what forward computed, also of what forward writes to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from simplefsdp import simple_fsdp
from simplefsdp.compiler.recompute import save_what_reads_written_inputs


class Counts(nn.Module):
    """A buffer is written to, and then used: a counter, a running scale, a code book."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(5, 1)
        self.register_buffer("n", torch.ones(()))
        self.register_buffer("book", torch.ones(5, 3))

    def forward(self, x):
        return getattr(self, self.kind)(x)

    def then_used(self, x):
        self.n += 1
        return self.linear(x) * self.n

    def twice(self, x):
        self.n += 1
        self.n *= 2
        return (self.linear(x) * self.n).exp() * self.n

    def copied_before(self, x):
        y = self.linear(x) * self.n.clone()
        self.n += 1
        return y

    def view_before(self, x):
        scale = self.book.t()[0, 0] + 1
        self.book.mul_(2)
        return self.linear(x) * scale

    def row(self, x):
        self.book[0].mul_(3)
        return self.linear(x * self.book[:, 0].cos())

    def from_activations(self, x):
        y = self.linear(x)
        self.n.lerp_(y.detach().mean(), 0.5)
        return y * self.n.exp()


KINDS = (
    "then_used",
    "twice",
    "copied_before",
    "view_before",
    "row",
    "from_activations",
)


@pytest.mark.slow(quick=[*(f"{kind}-aot_eager" for kind in KINDS), "twice-inductor"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor", "regions"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_written_buffers(solo_mesh, kind, executor):
    """torch's own compilers (2.11 to 2.15) recompute what was read before the write, and differ."""
    torch._dynamo.reset()
    plain, x = Counts(kind), torch.rand(8, 5)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    model.compile(backend="simplefsdp", options={"executor": executor})
    for run in (plain, model):
        for _ in range(2):
            run(x).square().sum().backward()
    for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_local(), wanted.grad)
    for wanted, got in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


class MemoryBank(nn.Module):
    """Features are compared with a queue, which the loop writes to before it calls backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.register_buffer("queue", torch.rand(4, 6))

    copied = staticmethod(torch.clone)

    def forward(self, x):
        return self.linear(x) @ self.copied(self.queue).detach()


COPIES = {
    "clone": torch.clone,
    "contiguous": lambda q: q.clone(memory_format=torch.contiguous_format),
    "to": lambda q: q.to(q.dtype, copy=True),
    "copy_": lambda q: torch.empty_like(q).copy_(q),
}


@pytest.mark.slow(quick=["clone-aot_eager", "clone-regions", "to-inductor"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor", "regions"])
@pytest.mark.parametrize("copied", COPIES)
def test_an_input_that_is_written_to_before_backward(solo_mesh, copied, executor, monkeypatch):
    """Inductor, by itself, takes the clone for a copy in vain."""
    torch._dynamo.reset()
    monkeypatch.setattr(MemoryBank, "copied", staticmethod(COPIES[copied]))
    plain, x = MemoryBank(), torch.rand(8, 5)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    model.compile(backend="simplefsdp", options={"executor": executor})
    losses = [run(x).square().sum() for run in (plain, model)]
    for run in (plain, model):
        run.queue.zero_()
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(model.linear.weight.grad.to_local(), plain.linear.weight.grad)


def test_not_a_view_is_kept_but_what_reads_it():
    """A view would show what was written."""

    def joint(book, x):
        part, _ = torch.ops.aten.split_with_sizes.default(book, [1, 2])
        scale = part.unsqueeze(0) + 1
        book.copy_(book * 2)
        return x * scale

    graph = make_fx(joint)(torch.ones(3), torch.ones(1)).graph
    save_what_reads_written_inputs(graph)
    kept = {n.name for n in graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}
    assert kept == {"add", "mul"}
