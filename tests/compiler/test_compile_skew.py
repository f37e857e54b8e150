"""Ranks meet when they have compiled, so that none waits in a collective for one that has not."""

from __future__ import annotations

import copy
import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import simple_fsdp
from simplefsdp.compiler import compilation
from simplefsdp.compiler.observers import observing
from simplefsdp.rank_guard import RankMismatchError

GROUP_TIMEOUT_S, SLOW_S = 1.0, 3.0
bucket_and_reorder = compilation.bucket_and_reorder


def run_a_step(slow_calls, timeout_s, backward, executor="aot_eager"):
    """A step of a model whose process group has little patience; rank 1 compiles slowly."""
    # Gloo's groups connect while they are made: not within so short a time.
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    model = simple_fsdp(nn.Linear(4, 4), DeviceMesh.from_group(group, "cpu"))
    options = {"executor": executor, "rank_guard_timeout_s": timeout_s}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    calls = []

    def slowly(*args):
        calls.append(args)
        if len(calls) in slow_calls:
            time.sleep(SLOW_S)
        return bucket_and_reorder(*args)

    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(backward):
        if dist.get_rank() == 1:
            patch.setattr(compilation, "bucket_and_reorder", slowly)
        try:
            loss = compiled(torch.ones(2, 4)).sum()
            if backward:
                loss.backward()
        except RankMismatchError as error:
            return str(error)
    return len(calls)


def run_experts(rows):
    """Experts that are alike and compiled apart; how many graphs this rank compiles."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    plain = copy.deepcopy(experts)
    simple_fsdp(experts)
    for expert in experts:
        options = {"executor": "aot_eager", "rank_guard_timeout_s": 20}
        expert.compile(backend="simplefsdp", options=options)
    graphs = []
    with observing(graphs.append):
        for run in (plain, experts):
            given = [torch.ones(count, 8) for count in rows[dist.get_rank()]]
            sum(e(x).sum() for e, x in zip(run, given, strict=True)).backward()
    for wanted, got in zip(plain.parameters(), experts.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad / dist.get_world_size())
    return len(graphs)


def test_a_rank_that_compiles_alone_for_a_module_like_others(pools):
    """One row is another graph. The other rank runs what was compiled for the first experts."""
    first, alone = pools(2).run(run_experts, [[4, 5, 6], [4, 5, 1]])
    assert alone > first > 1


class InParts(nn.Module):
    """Reads its weights as often as this rank has parts of its rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        return sum(self.down(self.up(part).exp()).sum() for part in x.split(2))


def run_in_parts(rows):
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = nn.ModuleList(InParts() for _ in range(3))
    experts = simple_fsdp(copy.deepcopy(plain))
    options = {"executor": "aot_eager", "rank_guard_timeout_s": 20, "cluster": "h100"}
    for expert in experts:
        expert.compile(backend="simplefsdp", dynamic=False, options=options)
    names = []
    for i, count in enumerate(rows[dist.get_rank()]):
        graphs = []
        with observing(graphs.append):
            for run in (plain, experts):
                run[i](torch.ones(count, 8)).backward()
        programs = [graph.rehearsal.reading.program for graph in graphs]
        names.append([{f for _, op in p.starts() for f in op.collective.fqns} for p in programs])
    for wanted, got in zip(plain.parameters(), experts.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad / dist.get_world_size())
    return names


def test_names_do_not_depend_on_how_often_a_rank_reads(pools):
    """Else two ranks would take other modules' names for one that both compile, and other plans."""
    one, other = pools(2).run(run_in_parts, [[4, 2, 1], [2, 4, 1]])
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize(("slow_calls", "backward"), [([1], False), ([2], True)])
def test_a_rank_that_compiles_slowly_is_waited_for(pools, slow_calls, backward):
    assert pools(2).run(run_a_step, slow_calls, 60, backward) == [0, max(slow_calls)]


def test_the_others_say_who_still_compiles(pools):
    waited, late = pools(2).run(run_a_step, [2], 1, True)
    assert "running the backward graph: after 1 s, rank 1 did not get to" in waited
    assert "still compile it" in waited and "rank_guard_timeout_s" in waited
    assert "rank 0 gave up waiting for rank 1" in late


class Pair(nn.Module):
    """Keeps sizes for its backward, which is then compiled with its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return self.linear(x).reshape(x.shape[0] * x.shape[1], 8)


def run_lengths(evaluated, trained, options):
    """Two steps, of several forwards and one backward each, with this rank's lengths."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, warned = dist.get_rank(), []
    plain = Pair()
    model = simple_fsdp(copy.deepcopy(plain))
    model.compile(backend="simplefsdp", options={"rank_guard_timeout_s": 20, **options})
    with torch.no_grad():
        for length in evaluated[rank]:
            model(torch.ones(2, length, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Handler, "handle", lambda self, record: warned.append(record.msg))
        for _ in range(2):
            batches = [torch.randn(2, length, 4) for length in trained[rank]]
            for run in (plain, model):
                sum(run(batch).square().mean() for batch in batches).backward()
    for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad / dist.get_world_size())
    return [message for message in warned if "backwards" in str(message)]


@pytest.mark.slow(quick=["manual", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"executor": "aot_eager", "bucketing": "manual"}, id="manual"),
        pytest.param({"executor": "aot_eager"}, id="auto"),
        pytest.param({}, id="code"),
    ],
)
def test_a_rank_that_leaves_sizes_open_alone(pools, options):
    """The other has met one size only: in its evaluation, or in the forwards before a backward."""
    for evaluated, trained in (
        (((8, 8), (8, 6)), ((8,), (8,))),
        (((), ()), ((8, 8, 8), (8, 6, 5))),
    ):
        assert pools(2).run(run_lengths, evaluated, trained, options) == [[], []]
