"""A step of one program trains as a forward, a backward, clipping and an update do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from graphs import capture, gathers, reduces
from parity import POLICIES, global_loss, local, mesh_for, relative_error
from zoo import Small, Zoo, batch, loss_of

from simplefsdp import clip_grad_norm_, compile_step, simple_fsdp

STEPS = 4
MAX_NORM = 0.5
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}


def make_optimizer(kind, model):
    """AdamW, decayed matrices apart, as trainers do; or another kind."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind is not torch.optim.AdamW:
        return kind(params, lr=1e-2)
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    return kind(groups, lr=1e-2)


def train_beside(
    mode,
    precision,
    executor,
    *,
    bucketing="manual",
    build=Zoo,
    kind=torch.optim.AdamW,
    max_norm=MAX_NORM,
    **variant,
):
    torch.manual_seed(1)
    plain = build(**{"mixed": False, **variant})
    model = copy.deepcopy(plain)
    simple_fsdp(model, mesh_for(mode), mode=mode, mp_policy=POLICIES[precision])
    own, others = make_optimizer(kind, plain), make_optimizer(kind, model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (own, others)]
    options = {"executor": executor, "bucketing": bucketing}
    options |= {"cluster": "h100"} if bucketing == "auto" else {}
    step = compile_step(
        lambda *inputs: loss_of(model, *inputs), others, max_norm=max_norm, options=options
    )
    tolerance = TOLERANCE[precision]
    with capture() as captured:
        for number in range(STEPS):
            tokens, targets = batch(number, dist.get_world_size())
            wanted = loss_of(plain, tokens, targets)
            wanted.backward()
            norm = clip_grad_norm_(plain, max_norm) if max_norm is not None else None
            own.step()
            own.zero_grad()
            result = step(local(tokens), local(targets))
            assert global_loss(result.loss) == pytest.approx(wanted.item(), rel=tolerance), number
            assert not result.loss.requires_grad
            if norm is None:
                assert result.grad_norm is None
            else:
                error = relative_error(result.grad_norm, norm)
                assert error < tolerance, (number, error)
            for schedule in schedules:
                schedule.step()
    assert all(p.grad is None for p in model.parameters())
    # AdamW makes much of little: where a gradient is nearly nothing, its sign decides.
    for fqn, param in plain.named_parameters():
        got = model.get_parameter(fqn).full_tensor()
        assert relative_error(got, param.detach()) < 50 * tolerance, fqn
    (graph,) = captured.forward
    assert not captured.backward
    assert reduces(graph)
    found = gathers(graph)
    if mode != "replicate":
        assert 0 < len(found) - len(set(found)) < len(set(found))  # again, but the first layer's


MODES = [
    (2, "fully_shard", "fp32", "aot_eager"),
    (2, "replicate", "fp32", "aot_eager"),
    (4, "fully_shard", "bf16", "aot_eager"),
    (4, "hybrid_shard", "fp32", "aot_eager"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode", "precision", "executor"), MODES)
def test_trains_as_one_process(pools, ranks, mode, precision, executor):
    pools(ranks).run(train_beside, mode, precision, executor)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(("ranks", "executor"), [(2, "inductor"), (2, "regions")])
def test_generated_code_trains_as_one_process(pools, ranks, executor):
    pools(ranks).run(generated_code, executor, timeout=300)


def generated_code(executor):
    train_beside("fully_shard", "fp32", executor, bucketing="auto", build=Small)


def checkpointed():
    train_beside("fully_shard", "fp32", "aot_eager", recompute=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_checkpointed_layers_are_computed_again(pools, ranks):
    pools(ranks).run(checkpointed)
