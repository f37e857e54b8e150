"""Parameters that are written to between a forward and its backward: right, or an error."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import wrapped
from torch import Tensor, nn

from simplefsdp import microbatch

ERROR = r"^{}: written to between a forward and its backward"


def mlp(executor: str, **how) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return wrapped(model, options={"executor": executor}, **how)


def loss_of(model: nn.Module, x: Tensor | None = None) -> Tensor:
    return model(torch.ones(2, 8) if x is None else x).square().mean()


def write(*params: Tensor) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(2.0)


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


def _written(executor: str) -> None:
    model = mlp(executor)
    loss = loss_of(model)
    write(*model.parameters())
    with pytest.raises(RuntimeError, match=ERROR.format(r"2\.weight")):
        loss.backward()
    # The weight of the first layer is not needed: x wants no gradient. Nothing is left behind.
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    "executor",
    ["aot_eager", *(pytest.param(n, marks=pytest.mark.slow) for n in ("inductor", "regions"))],
)
def test_a_backward_that_gathers_other_values_raises(pools, executor):
    pools(2).run(partial(_written, executor))


def _steps_in_turn() -> None:
    """As of two losses with a step between them; then in the right order."""
    model = mlp("aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, second = loss_of(model), loss_of(model, torch.zeros(2, 8))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=ERROR.format(r"2\.weight")):
        second.backward()
    for x in (torch.ones(2, 8), torch.zeros(2, 8)):
        loss_of(model, x).backward()
        optimizer.step()


def test_a_step_between_two_losses(pools):
    pools(2).run(_steps_in_turn)


def _not_needed(reshard: bool, ready: bool) -> None:
    """Biases are not needed; and no weight is, where the full one is kept."""
    model, same = (mlp("aot_eager", reshard_after_forward=reshard) for _ in range(2))
    loss_of(same).backward()
    loss = loss_of(model)
    write(model[0].bias, model[2].bias, *([] if reshard else model.parameters()))
    if ready:  # a forward after the write is nobody's concern
        behind = loss_of(model)
    loss.backward()
    for ours, wanted in zip(gradients(model), gradients(same), strict=True):
        assert torch.equal(ours, wanted)
    if ready:
        behind.backward()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ready", [True, False])
def test_what_backward_does_not_need_may_be_written_to(pools, reshard, ready):
    pools(2).run(partial(_not_needed, reshard, ready))


def _accumulated() -> None:
    model = mlp("aot_eager")
    with microbatch(model, is_last=False):
        loss = loss_of(model)
        write(model[2].weight)
        with pytest.raises(RuntimeError, match=ERROR.format(r"2\.weight")):
            loss.backward()


def test_while_gradients_accumulate(pools):
    pools(2).run(_accumulated)
