"""Parameters that a model writes to in its forward: what is read is what was there at that time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from simplefsdp import simple_fsdp
from simplefsdp.compiler.dedupe import dedupe_gathers


class Written(nn.Module):
    """Its ``inner`` weights are clamped in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self) -> None:
        with torch.no_grad():
            for param in self.inner.parameters():
                param.clamp_(-0.1, 0.1)


class WrittenFirst(Written):
    def forward(self, x: Tensor) -> Tensor:
        self.write()
        with torch.no_grad():  # for Dynamo one block with that above
            target = self.inner(x)
        return self.outer(target)


class ReadOnBothSides(Written):
    def forward(self, x: Tensor) -> Tensor:
        before = self.inner(x).detach()
        self.write()
        return self.outer(before + self.inner(x))


class ReadInsideAndBehind(Written):
    """Under ``no_grad`` first: the gradient is that of the second read."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for param in self.inner.parameters():
                param.data.mul_(0.5)
            target = self.inner(x)
        return self.outer(target) + self.inner(x)


class Teacher(Written):
    """As MoCo and DINO: the moving average of the student is the teacher of this very batch."""

    def forward(self, x: Tensor) -> Tensor:
        teacher, student = list(self.inner.parameters()), list(self.outer.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(teacher, student, 0.5)
            target = self.inner(x)
        return self.outer(x) * target


class MultipliedInPlace(ReadOnBothSides):
    def write(self) -> None:
        with torch.no_grad():
            for param in self.inner.parameters():
                param *= 0.5  # noqa: PLW2901


class WrittenAsOut(ReadOnBothSides):
    def write(self) -> None:
        with torch.no_grad():
            for param in self.inner.parameters():
                torch.mul(param, 0.5, out=param)


class Columns(Written):
    """Writes to a view that it made before it read."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = next(self.inner.parameters()).data.unbind(1)[0]
        before = self.inner(x).detach()
        with torch.no_grad():
            first.mul_(0.0)
        return self.outer(before + self.inner(x))


class WrittenInCheckpointed(Written):
    def part(self, x: Tensor) -> Tensor:
        self.write()
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        before = self.inner(x).detach()
        inside = checkpoint(self.part, self.outer(x), use_reentrant=False)
        return self.outer(before + self.inner(inside))


class ReadInCheckpointed(WrittenInCheckpointed):
    def part(self, x: Tensor) -> Tensor:
        self.write()
        return self.inner(x)


_ALL = (
    *(WrittenFirst, ReadOnBothSides, ReadInsideAndBehind, Teacher, MultipliedInPlace),
    *(WrittenAsOut, Columns, WrittenInCheckpointed),
)
MODELS = {cls.__name__: cls for cls in _ALL}


def run(name: str, executor: str) -> list[list[Tensor]]:
    """Output of this rank, parameters and gradients: plain and wrapped, all with the same input."""
    found: list[list[Tensor]] = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for wrapped in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: nn.Module = MODELS[name]()
        if wrapped:
            simple_fsdp(model)
            model.compile(backend="simplefsdp", options={"executor": executor})
        out = model(x)
        out.square().sum().backward()
        params = list(model.parameters())
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
        found.append([out.detach(), *(_full(t.detach()) for t in (*params, *grads))])
    return found


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("executor", ["aot_eager", "regions"])
def test_a_model_reads_what_it_has_written(name, executor, pools) -> None:
    for plain, ours in pools(2).run(run, name, executor):
        for a, b in zip(plain, ours, strict=True):
            torch.testing.assert_close(b, a)


def test_a_checkpointed_part_that_reads_what_it_writes_is_refused(solo_mesh) -> None:
    model = simple_fsdp(ReadInCheckpointed(), solo_mesh)
    model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    with pytest.raises(ValueError, match=r"inner.weight: a part .* in front of torch.utils.check"):
        model(torch.ones(4, 8))


class ReadAround(Written):
    """Writes nothing, and reads ``inner`` before, in and behind a checkpointed part."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for _ in range(2):
            x = self.inner(checkpoint(self.inner, x, use_reentrant=False))
        return self.outer(x)


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_a_checkpointed_part_that_only_reads_costs_no_gather(solo_mesh, mode):
    """On one rank what is gathered is the shard, and operands of the part have its storage."""
    found = []

    def backend(gm, inputs):
        found.append([spec.fqn for spec in dedupe_gathers(gm, inputs)])
        return gm

    model = simple_fsdp(ReadAround(), solo_mesh, mode=mode)
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(4, 8))
    assert [sorted(fqns) for fqns in found] == [sorted(fqn for fqn, _ in model.named_parameters())]
