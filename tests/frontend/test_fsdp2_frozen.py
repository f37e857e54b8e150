"""What FSDP2's own tests of frozen parameters ask for, on two ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from beside import (
    DIM,
    EXECUTORS,
    Mlp,
    call_of,
    check_close,
    compiled,
    mean,
    mine,
    numbers,
    rows,
    train_beside,
    wrapped,
)
from graphs import capture, reduces
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode


def only_biases(model: nn.Module) -> None:
    for fqn, param in model.named_parameters():
        param.requires_grad_("bias" in fqn)


def reduces_of(model: nn.Module) -> int:
    with CommDebugMode() as sent:
        mean(model(numbers(2, DIM).requires_grad_())).backward()
    counts = sent.get_comm_counts().items()
    return sum(count for op, count in counts if "reduce" in str(op))


def train_biases(freeze_first: bool) -> None:
    plain = nn.Sequential(Mlp(), Mlp())
    if freeze_first:
        only_biases(plain)
    model = wrapped(plain)
    for m in (plain, model):
        only_biases(m)
    train_beside(plain, model, model, rows)
    assert reduces_of(model) == 2  # of biases, and of nothing else
    model.zero_grad()
    with capture() as captured:
        train_beside(plain, model, compiled(model), rows)
    assert len(reduces(captured.backward[0])) in (1, 2)


@pytest.mark.slow(quick=["True"])
@pytest.mark.parametrize("freeze_first", [True, False])
def test_only_biases_train(pools, freeze_first):
    pools(2).run(train_biases, freeze_first)


def freeze_and_unfreeze(executor: str) -> None:
    """A step without the even layers, an evaluation, and a step with them."""
    plain = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)])
    model = wrapped(plain)
    call = call_of(model, executor)
    for trainable in (False, True):
        for m in (plain, model):
            m[0].requires_grad_(trainable)
            m[2].requires_grad_(trainable)
        train_beside(plain, model, call, rows, steps=1)
        with torch.no_grad():
            wanted = mine(plain(numbers(4, DIM)))
            check_close(call(mine(numbers(4, DIM))), wanted, 1e-5, "output")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_freezing_and_unfreezing(pools, executor):
    pools(2).run(freeze_and_unfreeze, executor)


class ManyTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.trained = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


def train_many_times(executor: str) -> None:
    plain = ManyTimes()
    model = wrapped(plain)
    train_beside(plain, model, call_of(model, executor), rows)


@pytest.mark.slow(quick=["eager"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_frozen_and_trained_layers_read_many_times(pools, executor):
    pools(2).run(train_many_times, executor)


def gradient_of_the_input(trainable: bool) -> None:
    for executor in ("eager",) if trainable else EXECUTORS:
        plain = Mlp().requires_grad_(trainable)
        model = wrapped(plain)
        x = numbers(4, DIM).requires_grad_()
        own = mine(x)
        plain(x).square().sum().backward()
        call_of(model, executor)(own).square().sum().backward()
        check_close(own.grad, mine(x.grad), 1e-5, "input")
        assert all((p.grad is not None) == trainable for p in model.parameters())


@pytest.mark.parametrize("trainable", [True, False])
def test_the_gradient_of_the_input(pools, trainable):
    pools(2).run(gradient_of_the_input, trainable)
