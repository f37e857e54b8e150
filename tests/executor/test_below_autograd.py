"""What compiled graphs call goes past autograd formulas, unless it is somebody else's."""

from __future__ import annotations

import pytest
import torch
from formulas import formulas_asked
from torch import Tensor, nn

from simplefsdp import simple_fsdp


@pytest.mark.parametrize("executor", ["inductor", "regions"])
def test_collectives_ask_no_autograd_formula(fake_mesh, executor):
    mesh, x = fake_mesh(2), torch.ones(2, 8)

    def asked(executor: str) -> int:
        torch._dynamo.reset()
        model = simple_fsdp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh)
        model.compile(backend="simplefsdp", options={"bucketing": "manual", "executor": executor})
        model(x).sum().backward()  # compiles
        with formulas_asked() as found:
            model(x).sum().backward()
        return len(found)

    assert asked("aot_eager") > 0  # or nothing is counted
    assert asked(executor) == 0


class Forces(nn.Module):
    """Computes with an operator whose kernel asks autograd for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = self.inner(x)
        return places + torch.ops.simplefsdp_tests.forces(places.detach())


def forces(places: Tensor) -> Tensor:
    with torch.enable_grad():
        places = places.detach().requires_grad_()
        (found,) = torch.autograd.grad(places.pow(3).sum(), places)
    return found


@pytest.mark.parametrize("executor", ["inductor", "regions"])
def test_an_operator_of_the_users_may_ask_autograd(solo_mesh, executor):
    x = torch.arange(16.0).view(2, 8)
    torch.manual_seed(0)
    model = simple_fsdp(Forces(), solo_mesh)
    with torch.library._scoped_library("simplefsdp_tests", "DEF") as library:
        library.define("forces(Tensor places) -> Tensor")
        library.impl("forces", forces, "CPU")
        library.impl("forces", torch.empty_like, "Meta")
        expected = model(x)
        model.compile(backend="simplefsdp", options={"bucketing": "manual", "executor": executor})
        for _ in range(3):
            try:
                found = model(x)
            except RuntimeError:  # torch looks at a first call from below autograd itself
                continue
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found, expected)
