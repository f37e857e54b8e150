"""A product of two dtypes is told by name while it is traced, not by its code's first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp import simple_fsdp


class Scaled(nn.Module):
    """Its second layer gets float32: a buffer is not cast, and makes what it touches wider."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return self.down(self.up(x) * self.scale)


@pytest.mark.parametrize("executor", ["aot_eager", "regions", "inductor"])
def test_a_product_of_two_dtypes(fake_mesh, executor):
    mesh, x = fake_mesh(2), torch.ones(4, 8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    torch._dynamo.reset()
    model = simple_fsdp(Scaled(), mesh, mp_policy=policy)
    model.compile(backend="simplefsdp", options={"executor": executor})
    told = (
        r"aten::addmm of module down \(Linear\) \(File .*test_mixed_dtypes\.py.*self\.down\(.*: "
        r"expected operands of one dtype, got torch\.bfloat16 and torch\.float32.*"
        "wrap inner layers first"
    )
    with pytest.raises(ValueError, match=told):
        model(x)


def test_what_is_cast_is_one_dtype(fake_mesh):
    """The remedy; and autocast, which casts operands by itself."""
    mesh, x = fake_mesh(2), torch.ones(4, 8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for is_inner in (True, False):
        torch._dynamo.reset()
        model = Scaled()
        if is_inner:
            simple_fsdp(model.down, mesh, mp_policy=policy)
        simple_fsdp(model, mesh, mp_policy=policy)
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_inner):
            model(x).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
