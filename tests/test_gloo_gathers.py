"""All-gathers over gloo take the way on which torch does not corrupt memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import _torch, simple_fsdp

OPS = torch.ops._c10d_functional
SHAPES = ((3,), (2, 5), (), (4, 1, 2))


def shards(rank: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(7 * 6).view(6, 7) + 100 * rank).to(dtype).t()[:2]] + [
        torch.full(shape, float(rank + i)).to(dtype) for i, shape in enumerate(SHAPES)
    ]


def gathered(tensors: list[Tensor], ranks: int, group: Any) -> list[Tensor]:
    """Each alone, two that differ in dtype, and all at once; awaited in another order."""
    alone = [OPS.all_gather_into_tensor(t.contiguous(), ranks, group) for t in tensors]
    pair = [tensors[0].contiguous(), tensors[1].to(torch.int32)]
    mixed = OPS.all_gather_into_tensor_coalesced(pair, ranks, group)
    at_once = OPS.all_gather_into_tensor_coalesced([t.contiguous() for t in tensors], ranks, group)
    launched = [*alone, *mixed, *at_once]
    return [OPS.wait_tensor(t) for t in reversed(launched)]


def expected(ranks: int, dtype: torch.dtype) -> list[Tensor]:
    every = [shards(rank, dtype) for rank in range(ranks)]
    each = [torch.cat([s.reshape(s.shape or (1,)) for s in of]) for of in zip(*every, strict=True)]
    return [*reversed(each), each[1].to(torch.int32), each[0], *reversed(each)]


def operators(profile: torch.profiler.profile) -> list[str]:
    names = [event.name.rpartition("::")[2] for event in profile.events()]
    return [name for name in names if name.startswith("all_gather_into_tensor")]


def gathers_by_the_safe_way() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    simple_fsdp(torch.nn.Linear(4, 4), init_device_mesh("cpu", (ranks,)))
    group = dist.distributed_c10d._get_default_group().group_name
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        with torch.profiler.profile() as profile:
            found = gathered(shards(rank, dtype), ranks, group)
        for got, want in zip(found, expected(ranks, dtype), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
        assert operators(profile).count("all_gather_into_tensor_out") == len(SHAPES) + 1 + 2 + 1
    grown = OPS.all_gather_into_tensor(torch.ones(2, requires_grad=True), ranks, group)
    assert torch.equal(OPS.wait_tensor(grown), torch.ones(2 * ranks))
    pair = torch.complex(torch.ones(2), torch.full((2,), float(rank)))
    full = OPS.wait_tensor(OPS.all_gather_into_tensor(pair, ranks, group))
    assert torch.equal(full.imag, torch.arange(ranks).repeat_interleave(2).float())


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathers_over_gloo_are_right_and_take_the_safe_way(pools, ranks):
    pools(ranks).run(gathers_by_the_safe_way)


def test_groups_without_gloo_keep_the_kernel_of_torch(fake_mesh):
    fake_mesh(4)
    _torch.mend_gloo_gathers()
    group = dist.distributed_c10d._get_default_group().group_name
    with torch.profiler.profile() as profile:
        full = OPS.wait_tensor(OPS.all_gather_into_tensor(torch.ones(3), 4, group))
    assert full.shape == (12,)
    assert operators(profile) == ["all_gather_into_tensor"]
