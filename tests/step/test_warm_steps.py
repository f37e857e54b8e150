"""Whole steps whose code an earlier run left: the same steps, for the same step and no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

from simplefsdp import _torch, compile_step, simple_fsdp
from simplefsdp.rank_guard import decisions

pytestmark = pytest.mark.skipif(not _torch.can_save_code(), reason="torch before 2.15")

WIDTH = 8
ADAMW = {"kind": torch.optim.AdamW, "lr": 1e-2}


@pytest.fixture(autouse=True)
def kept(caplog) -> Iterator[None]:
    caplog.set_level(logging.DEBUG, "simplefsdp")
    with fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield


def steps(mesh, *, kind=torch.optim.AdamW, max_norm=1.0, options=None, **hyperparameters):
    """Losses, norms and parameters of three steps, as a new process would make them."""
    torch._dynamo.reset()
    decisions().clear()
    torch.manual_seed(0)
    model = simple_fsdp(nn.Linear(WIDTH, WIDTH), mesh)
    optimizer = kind(model.parameters(), **hyperparameters)
    step = compile_step(
        lambda x: (model(x) - x).square().mean(),
        optimizer,
        max_norm=max_norm,
        options=options or {"bucketing": "manual"},
    )
    results = [step(torch.randn(4, WIDTH)) for _ in range(3)]
    values = [value.clone() for result in results for value in result if value is not None]
    return [*values, *(p.to_local().detach().clone() for p in model.parameters())]


@pytest.mark.slow(quick=["step0-options0"])
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (ADAMW, {"bucketing": "auto", "cluster": "h100"}),
        (ADAMW, {"bucketing": "manual", "executor": "regions"}),
        ({"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "max_norm": None}, None),
    ],
)
def test_a_step_of_an_earlier_run(fake_mesh, caplog, step, options):
    mesh = fake_mesh(2)
    cold = steps(mesh, **step, options=options)
    assert "the code of an earlier run is used" not in caplog.text
    warm = steps(mesh, **step, options=options)
    assert "the code of an earlier run is used" in caplog.text
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.inductor
def test_each_step_is_that_of_its_hyperparameters(solo_mesh, caplog):
    """Numbers that are computed outside of the code need no other one, and constants in it do."""
    steps(solo_mesh, **ADAMW)
    others = {
        "lr": ({"lr": 1e-3}, True),
        "weight_decay": ({"weight_decay": 0.5}, True),
        "eps": ({"eps": 0.1}, True),
        "betas": ({"betas": (0.5, 0.9)}, False),
        "max_norm": ({"max_norm": 0.01}, False),
        "maximize": ({"maximize": True}, False),
    }
    for name, (other, warm) in others.items():
        caplog.clear()
        found = steps(solo_mesh, **ADAMW | other)
        assert ("the code of an earlier run is used" in caplog.text) == warm, name
        torch.testing.assert_close(found[-2:], plain_steps(**ADAMW | other))
    assert "is not kept" not in caplog.text


def plain_steps(*, kind, max_norm=1.0, **hyperparameters):
    """The parameters of a plain model after the same steps."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = kind(model.parameters(), **hyperparameters)
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        (model(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]
