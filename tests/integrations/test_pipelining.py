"""Pipelines of wrapped stages: two stages, or four, on two by two ranks, beside the whole model."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from beside import DIM, Mlp, check_grads, numbers
from graphs import capture, reduces
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import TorchDispatchMode

from simplefsdp import microbatch, simple_fsdp
from simplefsdp.integrations.pipelining import PipelineStage

MICRO, SEQUENCES = 4, 16


class Counted(TorchDispatchMode):
    """How many reduces of gradients are launched inside."""

    reduces = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reduces += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def pipelined(schedule, stages_of, stages, executor, reduces_each):
    torch.manual_seed(1)
    torch._dynamo.reset()
    plain = nn.Sequential(*[Mlp() for _ in range(stages)])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mine = {i: copy.deepcopy(plain[i]) for i in range(mesh["pp"].get_local_rank(), stages, 2)}
    for module in mine.values():
        simple_fsdp(module, mesh["dp"])
        if executor != "eager":
            module.compile(backend="simplefsdp", options={"executor": executor})
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    made = [stages_of(module, i, stages, cpu, group=group) for i, module in mine.items()]
    run = schedule(made if stages > 2 else made[0], n_microbatches=MICRO, loss_fn=loss_of)
    every = sum(len(list(module.parameters())) for module in mine.values())
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, nn.ModuleList(mine.values()))
    ]
    with capture() as graphs:
        for step in range(2):
            whole, target = numbers(SEQUENCES, DIM, seed=step), numbers(SEQUENCES, DIM, seed=9)
            x, y = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in (whole, target))
            # Inside a mode nothing is compiled.
            with Counted() if executor == "eager" else nullcontext() as counted:
                run.step(*[x][: 0 in mine], **({"target": y} if stages - 1 in mine else {}))
            loss_of(plain(whole), target).backward()
            for i, module in mine.items():
                check_grads(plain[i], module)
            if step and executor == "eager":  # at first, torch asks for shapes by running a stage
                assert counted.reduces == every * reduces_each
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    if executor != "eager":
        assert {bool(reduces(graph)) for graph in graphs.backward} == {False, True}


def loss_of(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize(
    ("schedule", "stages", "executor"),
    [
        (pipelining.Schedule1F1B, 2, "eager"),
        (pipelining.Schedule1F1B, 2, "aot_eager"),
        pytest.param(pipelining.ScheduleGPipe, 2, "aot_eager", marks=pytest.mark.slow),
        (pipelining.ScheduleInterleaved1F1B, 4, "eager"),
    ],
)
def test_only_the_last_micro_batch_is_reduced(pools, schedule, stages, executor):
    pools(4).run(pipelined, schedule, PipelineStage, stages, executor, 1)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [(pipelining.Schedule1F1B, 2), (schedules.ScheduleInterleavedZeroBubble, 4)],
)
def test_a_stage_of_torchs_reduces_each(pools, schedule, stages):
    pools(4).run(pipelined, schedule, pipelining.PipelineStage, stages, "eager", MICRO)


@pytest.mark.parametrize(
    ("chunk", "whole", "last"), [(3, False, False), (0, True, True), (3, True, False)]
)
def test_a_schedule_that_would_lose_gradients_is_refused(chunk, whole, last):
    stage = PipelineStage.__new__(PipelineStage)
    stage.chunks, stage.one_reduce, stage.has_backward = MICRO, True, True
    with pytest.raises(ValueError, match=r"expected whole backwards.*one_reduce=False"):
        stage.backward_one_chunk(chunk, full_backward=whole, last_backward=last)


class Switched(nn.Module):
    """``off`` is used where the first row of its input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.off = Mlp(), Mlp()

    def forward(self, x):
        return self.on(x) + (self.off(x) if x.requires_grad or x[0, 0] > 0 else 0)


def two_stages(plain, executor="eager", **options):
    """The stage of ``plain`` that this rank has, beside it; a schedule; and its arguments, of whole
    inputs and targets."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    at, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    mine = simple_fsdp(copy.deepcopy(plain[at]), mesh["dp"])
    if executor != "eager":
        mine.compile(backend="simplefsdp", options={"executor": executor})
    stage = PipelineStage(mine, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    run = pipelining.Schedule1F1B(stage, loss_fn=loss_of, **options)

    def arguments(x, y):
        x, y = (t.chunk(2)[part] for t in (x, y))
        return [x][: 1 - at], ({"target": y} if at else {})

    return plain[at], mine, run, arguments


def unused_at_last():
    """After forwards alone; and with parameters that the last micro-batch has no use for."""
    torch.manual_seed(1)
    torch._dynamo.reset()
    plain = nn.Sequential(Switched(), Mlp())
    beside, mine, run, arguments = two_stages(plain, n_microbatches=MICRO)
    x = numbers(SEQUENCES, DIM, seed=3)
    signs = torch.ones(2, MICRO, SEQUENCES // 2 // MICRO, 1)
    signs[:, -1] = -1
    x = x.abs() * signs.view(SEQUENCES, 1)
    target = numbers(SEQUENCES, DIM, seed=9)
    args, kwargs = arguments(x, target)
    if torch.__version__ >= "2.13":  # before, torch forgets what training needs
        run.eval(*args, **kwargs)
    assert all(param.grad is None for param in mine.parameters())
    run.step(*args, **kwargs)
    for rows in zip(x.split(2), target.split(2), strict=True):
        (loss_of(plain(rows[0]), rows[1]) / (2 * MICRO)).backward()
    check_grads(beside, mine)


def test_what_the_last_micro_batch_does_not_use_is_reduced_all_the_same(pools):
    pools(4).run(unused_at_last)


def over_several_steps(executor):
    """Of two steps only the last sends; torch's look at shapes comes before the first."""
    torch.manual_seed(1)
    torch._dynamo.reset()
    plain = nn.Sequential(Mlp(), Mlp())
    beside, mine, run, arguments = two_stages(plain, executor, n_microbatches=2, scale_grads=False)
    for turn in range(2):
        for step in range(2):
            x, y = numbers(8, DIM, seed=2 * turn + step), numbers(8, DIM, seed=9)
            (loss_of(plain(x), y) * 2).backward()  # the sum of two micro-batches' means
            args, kwargs = arguments(x, y)
            with microbatch(mine, is_last=step == 1):
                run.step(*args, **kwargs)
            assert step or all(param.grad is None for param in mine.parameters())
        check_grads(beside, mine)
        plain.zero_grad()
        mine.zero_grad()


@pytest.mark.parametrize("executor", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_accumulation_over_several_steps(pools, executor):
    pools(4).run(over_several_steps, executor)
