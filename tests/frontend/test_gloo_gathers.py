"""All-gathers over gloo take the way on which torch does not corrupt memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import _torch, simple_fsdp
from simplefsdp._torch import gloo

OPS = torch.ops._c10d_functional
SHAPES = ((3,), (2, 5), (), (0, 3), (4, 1, 2))


def shards(rank: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(7 * 6).view(6, 7) + 100 * rank).to(dtype).t()[:2]] + [
        torch.full(shape, float(rank + i)).to(dtype) for i, shape in enumerate(SHAPES)
    ]


def gathered(tensors: list[Tensor], ranks: int, group: Any) -> list[Tensor]:
    """Each alone, and all at once; awaited in another order."""
    alone = [OPS.all_gather_into_tensor(t, ranks, group) for t in tensors]
    at_once = OPS.all_gather_into_tensor_coalesced(tensors, ranks, group)
    return [OPS.wait_tensor(t) for t in reversed([*alone, *at_once])]


def expected(ranks: int, dtype: torch.dtype) -> list[Tensor]:
    every = [shards(rank, dtype) for rank in range(ranks)]
    each = [torch.cat([s.reshape(s.shape or (1,)) for s in of]) for of in zip(*every, strict=True)]
    return [*reversed(each), *reversed(each)]


def operators(profile: torch.profiler.profile) -> list[str]:
    names = [event.name.rpartition("::")[2] for event in profile.events()]
    return [name for name in names if name.startswith("all_gather_into_tensor")]


def gathers_by_the_safe_way() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    simple_fsdp(torch.nn.Linear(4, 4), init_device_mesh("cpu", (ranks,)))
    group = dist.distributed_c10d._get_default_group().group_name
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        with torch.profiler.profile() as profile:
            found = gathered(shards(rank, dtype), ranks, group)
        for got, want in zip(found, expected(ranks, dtype), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
        assert operators(profile).count("all_gather_into_tensor_out") == len(SHAPES) + 1 + 1
    mine = torch.full((2,), float(rank), requires_grad=True)
    full = OPS.wait_tensor(OPS.all_gather_into_tensor(mine, ranks, group))
    assert torch.equal(full, torch.arange(float(ranks)).repeat_interleave(2))
    with torch.inference_mode():
        launched = OPS.all_gather_into_tensor_coalesced([mine, mine + 1], ranks, group)
    more = [OPS.wait_tensor(part) for part in launched]
    assert torch.equal(more[0], full) and torch.equal(more[1], full + 1)


def complex_numbers() -> None:
    """Also conjugates, which torch keeps as numbers with a flag."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group().group_name
    pair = torch.complex(torch.ones(2), torch.full((2,), -float(rank))).conj()
    full = OPS.wait_tensor(OPS.all_gather_into_tensor(pair, ranks, group))
    assert torch.equal(full.imag, torch.arange(float(ranks)).repeat_interleave(2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathers_over_gloo_are_right_and_take_the_safe_way(pools, ranks):
    pools(ranks).run(gathers_by_the_safe_way)
    pools(ranks).run(complex_numbers)


def under_way(ranks: int = 2) -> tuple[Tensor, list[Tensor], list[gloo._Copy]]:
    """A flat buffer that nothing has arrived in, and what waits for its two parts."""
    flat, full = torch.zeros(2 * ranks), [torch.zeros(ranks), torch.zeros(ranks)]
    transfer = gloo._Transfer(flat)
    columns = flat.view(ranks, 2).split(1, dim=1)
    return flat, full, [gloo._Copy(transfer, c, f) for c, f in zip(columns, full, strict=True)]


def test_a_gather_that_failed_has_failed_for_all_that_wait_for_it(monkeypatch):
    def fail(flat: Tensor) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(gloo, "_ops", SimpleNamespace(wait_tensor=fail))
    _, _, works = under_way()
    for work in works:
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait()


def test_threads_wait_for_one_gather(monkeypatch):
    arrives = threading.Event()

    def wait(flat: Tensor) -> None:
        assert arrives.wait(20)
        flat.copy_(torch.arange(4.0))

    monkeypatch.setattr(gloo, "_ops", SimpleNamespace(wait_tensor=wait))
    _, full, works = under_way()
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    arrives.set()
    for thread in threads:
        thread.join(20)
    assert [part.tolist() for part in full] == [[0, 2], [1, 3]]


def test_a_group_that_nobody_configured_keeps_the_kernel_of_torch(solo_mesh, monkeypatch):
    _torch.mend_gloo_gathers()
    group = solo_mesh.get_group()
    assert gloo._uses_gloo(group)
    monkeypatch.delitem(dist.distributed_c10d._world.pg_backend_config, group)
    assert not gloo._uses_gloo(group) and not gloo._uses_gloo(group.group_name)


def test_groups_without_gloo_keep_the_kernel_of_torch(fake_mesh):
    fake_mesh(4)
    _torch.mend_gloo_gathers()
    group = dist.distributed_c10d._get_default_group().group_name
    with torch.profiler.profile() as profile:
        full = OPS.wait_tensor(OPS.all_gather_into_tensor(torch.ones(3), 4, group))
    assert full.shape == (12,)
    assert operators(profile) == ["all_gather_into_tensor"]
