"""Process groups that we make: of high priority on NCCL, and without ranks that take no part."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from simplefsdp import _torch
from simplefsdp.calibrate import collectives
from simplefsdp.launcher import ranks

CUDA_BACKEND = "cpu:gloo,cuda:nccl"


class Options:
    """``ProcessGroupNCCL.Options``, which builds for CPU do not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream


@pytest.fixture
def nccl(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


def made_by(monkeypatch, module, name: str) -> list[dict]:
    """What groups are asked for by this function, which makes none."""
    asked: list[dict] = []

    def ask(*args, **kwargs):
        asked.append(kwargs)
        return SimpleNamespace(group_name="another")

    monkeypatch.setattr(module, name, ask)
    return asked


def is_first_in_line(asked: dict) -> bool:
    assert asked["pg_options"]._timeout == asked["timeout"]  # else torch warns
    return asked["pg_options"].is_high_priority_stream


def test_no_options_where_there_is_no_nccl():
    assert _torch.high_priority("gloo", timedelta(1)) is None
    assert _torch.high_priority("cpu:gloo,cuda:gloo", timedelta(1)) is None


def test_the_launchers_group(nccl, monkeypatch):
    asked = made_by(monkeypatch, dist, "init_process_group")
    monkeypatch.setattr(ranks, "local_device", lambda: torch.device("cuda", 0))
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("destroy_process_group", None)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    with ranks.join_ranks() as rank:
        assert rank.world_size == 2
    assert is_first_in_line(asked[0])
    # The groups of a mesh are split from it then, with its options.
    assert asked[0]["device_id"] == torch.device("cuda", 0)


def test_the_groups_that_calibrate_times(nccl, monkeypatch):
    asked = made_by(monkeypatch, dist, "new_group")
    monkeypatch.setattr(dist, "get_backend_config", lambda *group: CUDA_BACKEND)
    for name, value in (("get_rank", 2), ("barrier", None)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    collectives.time_collectives(2, SimpleNamespace(), torch.device("cpu"))
    assert is_first_in_line(asked[0])


def test_the_second_group(nccl, monkeypatch, fake_mesh):
    asked = made_by(monkeypatch, c10d, "new_group")
    group = fake_mesh(2).get_group()
    monkeypatch.setattr(c10d, "get_backend_config", lambda *group: CUDA_BACKEND)
    assert _torch.second_group(group.group_name) == "another"
    assert is_first_in_line(asked[0]) and asked[0]["backend"] == CUDA_BACKEND


def test_the_second_group_is_not_split_from_all_ranks(solo_mesh, monkeypatch):
    """To split a communicator takes all its ranks: those that compile nothing would not come."""
    world = dist.group.WORLD
    splits = []

    def source(*args):
        splits.append(args)

    monkeypatch.setattr(c10d, "_get_split_source", source)
    world.bound_device_id = torch.device("cuda", 0)  # as of init_process_group(device_id=...)
    dist.new_group([0])
    assert len(splits) == 1  # what torch does
    second = c10d._resolve_process_group(_torch.second_group(world.group_name))
    assert second is not world and c10d.get_process_group_ranks(second) == [0]
    assert len(splits) == 1
    assert c10d._get_split_source is source


def test_the_second_group_waits_as_long_as_the_first():
    timeout = timedelta(seconds=123)  # no release's default
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        name = _torch.second_group(dist.group.WORLD.group_name)
        second = c10d._resolve_process_group(name)
        assert second._get_backend(torch.device("cpu")).options._timeout == timeout
    finally:
        dist.destroy_process_group()
