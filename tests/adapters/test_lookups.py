"""Lookups in gathered parameters: which are stored."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from inductor_passes.adapters.lookups import look_up_once

_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def stored(function, *inputs) -> list[str]:
    """What is marked of a function that is given a gathered table first."""

    def gathered(shard, *others):
        return function(_wait(_gather(shard, 4, "0")), *others)

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        graph: Graph = make_fx(gathered, tracing_mode="fake")(*inputs).graph
    finally:
        dist.destroy_process_group()
    before = {node: dict(node.meta) for node in graph.nodes}
    look_up_once(graph)
    return [node.name for node in graph.nodes if node.meta != before[node]]


def test_rows_that_several_read_are_stored():
    def function(table, i):
        rows = torch.ops.aten.embedding(table.view(32, 4), i)
        return rows.sin(), rows.cos()

    assert stored(function, torch.ones(8, 4), torch.zeros(3, dtype=torch.long)) == ["embedding"]


def test_rows_that_one_reads_and_what_is_larger_than_the_parameter_are_not():
    def function(table, i):
        wide = table.double()
        return torch.ops.aten.embedding(table, i).sin(), wide.sin(), wide.cos(), table @ table.mT

    assert stored(function, torch.ones(8, 4), torch.zeros(3, dtype=torch.long)) == []
