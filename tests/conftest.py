"""Fixtures: pools of real ranks, and a process group that stands for ranks that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """Pools of real gloo ranks by world size; only the last one used is kept alive."""
    running: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in running:
            for other in running.values():
                other.stop()
            running.clear()
            running[world_size] = RankPool(world_size)
        return running[world_size]

    yield pool_of
    for pool in running.values():
        pool.stop()


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """``fake_mesh(4)`` or ``fake_mesh(2, 4, names=("dp", "tp"), rank=1)``: no communication."""

    def make(
        *shape: int, names: tuple[str, ...] | None = None, rank: int = 0, device: str = "cpu"
    ) -> DeviceMesh:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world_size = int(torch.tensor(shape).prod())
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        return init_device_mesh(device, shape, mesh_dim_names=names)

    torch._dynamo.reset()
    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
