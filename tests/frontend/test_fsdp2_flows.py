"""Flows of FSDP2's own tests of training: accumulation, parts by themselves, casts, modes."""

from __future__ import annotations

import pytest
import torch
from beside import (
    DIM,
    EXECUTORS,
    Mlp,
    check_close,
    check_grads,
    mean,
    mine,
    numbers,
    rows,
    train_beside,
    two_mlps,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)


def accumulate(plain, model, call):
    """Several backwards before a step, and zeros that stay in the place of gradients."""
    optimizers = [torch.optim.Adam(m.parameters(), eps=1e-3) for m in (plain, model)]
    for step in range(2):
        for micro in range(3):
            x = numbers(4, DIM, seed=3 * step + micro)
            mean(plain(x)).backward()
            mean(call(mine(x))).backward()
        check_grads(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def two_forwards(plain, model, call):
    """One backward through both, and then theirs one after the other."""
    for run, part in ((plain, lambda whole: whole), (call, mine)):
        one, other = part(numbers(4, DIM)), part(numbers(4, DIM, seed=1))
        (run(one) - run(other)).square().mean().backward()
        losses = [mean(run(one)), mean(run(other))]
        for loss in losses:
            loss.backward()
    check_grads(plain, model)


def a_part_by_itself(plain, model, call):
    for theirs, ours in ((plain, call), (plain[0], model[0]), (plain[:1], model[:1])):
        mean(theirs(numbers(4, DIM))).backward()
        mean(ours(mine(numbers(4, DIM)))).backward()
        check_grads(plain, model)


def as_float64(plain, model, call):
    plain.double()
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            model.float().to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p.dtype == p.to_local().dtype == torch.float64 for p in model.parameters())
    train_beside(plain, model, call, lambda step: (numbers(4, DIM, seed=step).double(),))


def checkpoint_wrapper_after(plain, model, call):
    for m in (plain, model):
        apply_activation_checkpointing(m, check_fn=lambda part: isinstance(part, Mlp))
    train_beside(plain, model, call, rows)


def under_autocast(plain, model, call):
    with torch.autocast("cpu", torch.bfloat16):
        losses = mean(plain(numbers(4, DIM))), mean(call(mine(numbers(4, DIM))))
    for loss in losses:
        loss.backward()
    check_grads(plain, model, tolerance=3e-2)


def in_inference_mode(plain, model, call):
    """Before training and after; what was gathered there is no constant of later graphs."""
    for _ in range(2):
        with torch.inference_mode():
            wanted = mine(plain(numbers(4, DIM)))
            check_close(call(mine(numbers(4, DIM))), wanted, 1e-5, "output")
        train_beside(plain, model, call, rows, steps=1)


FLOWS = {
    accumulate: True,
    two_forwards: True,
    a_part_by_itself: False,
    as_float64: False,
    checkpoint_wrapper_after: True,
    under_autocast: False,
    in_inference_mode: True,
}


@pytest.mark.slow(
    quick=[
        "accumulate",
        "two_forwards",
        "a_part_by_itself",
        "as_float64",
        "under_autocast",
        "in_inference_mode",
    ]
)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_a_flow(pools, flow):
    pools(2).run(two_mlps, flow, EXECUTORS if FLOWS[flow] else ("eager",))
