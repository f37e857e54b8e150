"""What compiled graphs call goes past the Python of autograd formulas."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from simplefsdp import simple_fsdp


def formulas_in(model: nn.Module) -> int:
    """How many operators asked their autograd formula in a forward and backward."""
    x = torch.ones(2, 8)
    model(x).sum().backward()  # compiles
    found = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "autograd_impl":
            found.append(frame.f_code.co_filename)

    # In a thread of its own torch runs backward only where there is a GPU.
    sys.setprofile(look)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    assert all("_library" in name for name in found)
    return len(found)


@pytest.mark.parametrize("executor", ["inductor", "regions"])
def test_collectives_ask_no_autograd_formula(fake_mesh, executor):
    mesh = fake_mesh(2)

    def model(executor: str) -> nn.Module:
        model = simple_fsdp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh)
        model.compile(backend="simplefsdp", options={"bucketing": "manual", "executor": executor})
        return model

    assert formulas_in(model("aot_eager")) > 0  # or this counts nothing
    torch._dynamo.reset()
    assert formulas_in(model(executor)) == 0
