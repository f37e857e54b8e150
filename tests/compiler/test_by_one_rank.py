"""Ranks that need the same code have it compiled by one of them, and compute what all would."""

from __future__ import annotations

import shutil
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from simplefsdp import _torch, rank_guard, rank_work, simple_fsdp
from simplefsdp.compiler import compilation, warm_start
from simplefsdp.frontend.gather import gather
from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.rank_work import RankWork

needs_saved_code = pytest.mark.skipif(not _torch.can_save_code(), reason="torch before 2.15")
MANUAL = {"bucketing": "manual"}
AUTO = {"bucketing": "auto", "cluster": "h100", "executor": "regions"}
RANKS = (0, 1)


def model(rows: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8))


def breaking(what: str) -> object:
    """``what`` of saved code fails, on the rank that is to do it."""
    return patch.object(_torch, what, side_effect=OSError("broken for the test"))


def train(folder, options, rows=16, broken=None, batches=(4,), grad=True):
    """How often this rank compiled a graph, and its losses and gradients. What is shared is in a
    folder of this name; kernels are where those of all tests are."""
    rank_guard._agreed.clear()
    rank_guard.forget_decisions()
    options = {**options, "rank_guard_timeout_s": 60}
    run = simple_fsdp(model(rows), init_device_mesh("cpu", (2,)))
    compiled = torch.compile(run, backend="simplefsdp", options=options, dynamic=False)
    found = []
    real = compilation.few_layers_traced
    with (
        functorch_config.patch(enable_autograd_cache=True),
        patch.object(warm_start, "FOLDER", folder),
        breaking(broken) if broken else nullcontext(),
        patch.object(compilation, "few_layers_traced", side_effect=real) as traced,
        torch.set_grad_enabled(grad),
    ):
        for size in batches:
            for _ in range(2):
                x = torch.arange(8.0 * size).view(size, 8) / (dist.get_rank() + 1)
                loss = compiled(x).square().mean()
                if grad:
                    loss.backward(retain_graph=len(found) == 0)
                found.append(loss.item())
    grads = [p.grad.full_tensor().tolist() for p in run.parameters() if p.grad is not None]
    return traced.call_count, found, grads


@pytest.fixture
def folder():
    """Of a name that no other test has, nor an earlier run."""
    name = f"simplefsdp_code_{uuid.uuid4().hex}"
    yield name
    for found in Path(cache_dir()).glob(f"{name}*"):
        shutil.rmtree(found)


@needs_saved_code
@pytest.mark.slow(quick=["options1-True"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [MANUAL, AUTO])
def test_one_compiles_and_all_compute_the_same(own_ranks, folder, options, grad):
    apart = own_ranks.run(_apart, folder, options, grad)
    together = own_ranks.run(_shared, folder, options, grad)
    again = own_ranks.run(_shared, folder, options, grad)
    assert [number for number, *_ in apart] == [1, 1]
    assert [number for number, *_ in together] == [1, 0]
    assert [number for number, *_ in again] == [0, 0]
    for rank in RANKS:
        assert apart[rank][1:] == together[rank][1:] == again[rank][1:]


def _apart(folder, options, grad):
    return train(f"{folder}{dist.get_rank()}", options, grad=grad)


def _shared(folder, options, grad):
    return train(folder, options, grad=grad)


@needs_saved_code
@pytest.mark.slow
@pytest.mark.parametrize(("broken", "on_rank"), [("dump_code", 0), ("keep", 0), ("load_code", 1)])
def test_what_cannot_be_shared_is_compiled_by_all(own_ranks, folder, broken, on_rank):
    first, second = own_ranks.run(_broken, folder, broken, on_rank)
    assert (first[0], second[0]) == (2, 1)
    assert first[2] == second[2]


@needs_saved_code
@pytest.mark.slow
def test_what_cannot_be_kept_is_tried_once(own_ranks, folder):
    for numbers in ([2, 1], [1, 1]):
        assert [number for number, *_ in own_ranks.run(_not_kept, folder)] == numbers


def _not_kept(folder):
    return train(folder, MANUAL, broken="dump_code")


def _broken(folder, broken, on_rank):
    return train(folder, MANUAL, broken=broken if dist.get_rank() == on_rank else None)


@needs_saved_code
@pytest.mark.slow
def test_ranks_whose_shards_differ_compile_each_its_own(own_ranks, folder):
    first, second = own_ranks.run(_uneven, folder)
    assert first[0] == second[0] == 1 and first[2] == second[2]


def _uneven(folder):
    return train(folder, MANUAL, rows=5)


@needs_saved_code
@pytest.mark.slow
def test_what_fails_is_told_on_all_ranks_as_ever(own_ranks, folder):
    for told in own_ranks.run(_too_little_memory, folder):
        assert "forward graph" in told and "budget" in told


def _too_little_memory(folder):
    try:
        train(folder, {**AUTO, "memory_budget_gb": 1e-9})
    except Exception as error:
        return str(error)
    return "nothing"


@needs_saved_code
@pytest.mark.slow
def test_a_rank_that_compiles_alone_later_waits_for_nobody(own_ranks, folder):
    assert own_ranks.run(_other_batches, folder) == [[1, 1], [1, 0]]


def _other_batches(folder):
    """How often this rank compiled: one more batch of its own, then another model."""
    batches = (4, 4, 4) if dist.get_rank() == 0 else (4, 5, 4)
    return [train(folder, AUTO, batches=batches)[0], train(folder, AUTO, rows=24)[0]]


def _work(how, timeout_s):
    """Rank 0 takes longer than is waited for, but gives signs of life."""
    work = RankWork("the work", how, RANKS, 0, timeout_s)
    if dist.get_rank() == 1:
        try:
            return str(work.wait())
        except RankMismatchError as error:
            return str(error)
    if how != "nothing":
        work.do(lambda: time.sleep(1.5 * timeout_s) or ("code" if how == "succeeds" else None))
    return how


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout_s", "told"),
    [("succeeds", 4, "True"), ("fails", 4, "False"), ("nothing", 0.5, "rank 0 did not get to")],
)
def test_signs_of_life_are_waited_for(own_ranks, how, timeout_s, told):
    assert told in own_ranks.run(_work, how, timeout_s)[1]


def test_who_is_stuck_gives_no_signs_for_ever(monkeypatch):
    said = []
    monkeypatch.setattr(rank_work, "store_of", lambda ranks: dist.HashStore())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(rank_work, "_AT_MOST", 2)
    monkeypatch.setattr(RankWork, "_say", lambda self, text: said.append(text))
    RankWork("the work", "name", RANKS, 0, 0.04).do(lambda: time.sleep(0.5) or "code")
    assert 1 <= len(said) <= 9 and said[-1] == "succeeded"


def full(weight, x):
    return (weight.full_tensor() ** 2).sum() + x.sum()


def inside(weight, x):
    mesh = weight.device_mesh

    def body(x):
        whole = DTensor.from_local(x, mesh, [Replicate()])
        return whole.redistribute(mesh, [Shard(0)]).to_local() * 2

    return checkpoint(body, x, use_reentrant=False).sum()


def scaled(weight, x):
    return torch.ops.aten.mul(weight, 2).to_local().sum() + x.sum()


def plain(weight, x):
    return checkpoint(lambda x: x.sin() * 2, x, use_reentrant=False).sum()


@needs_saved_code
@pytest.mark.parametrize(("compute", "number"), [(full, 2), (inside, 2), (scaled, 2), (plain, 1)])
def test_who_computes_with_shards_has_code_of_its_own(fake_mesh, compute, number):
    """Tracing asks for the rank; of the same without shards it does not."""
    keys = set()
    for rank in RANKS:
        mesh = fake_mesh(2, rank=rank)
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))

        def key(gm, inputs):
            keys.add(_torch.key_of_graph(gm, inputs, [], gather))
            return gm.forward

        with functorch_config.patch(enable_autograd_cache=True):
            torch.compile(compute, backend=key, fullgraph=True)(weight, torch.ones(4, 2))
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert len(keys) == number
