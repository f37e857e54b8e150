"""Lookups in gathered parameters: which are stored."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from inductor_passes.adapters import _torch
from inductor_passes.adapters.lookups import look_up_once
from inductor_passes.adapters.loops import loop_of

_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_wait = torch.ops._c10d_functional.wait_tensor.default
_rows = torch.ops.aten.embedding
SHARD, PLACES = torch.ones(8, 4), torch.zeros(3, dtype=torch.long)


def stored(function, *others, fqn: str | None = "embed.weight") -> list[str]:
    """What is marked of a function that is given a gathered table, places in it, and others."""

    def gathered(shard, *given):
        return function(_wait(_gather(shard, 4, "0")), *given)

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        graph: Graph = make_fx(gathered, tracing_mode="fake")(SHARD, PLACES, *others).graph
    finally:
        dist.destroy_process_group()
    look_up_once(graph, lambda start: fqn)
    return [node.name for node in graph.nodes if _torch.is_stored(node)]


def several(value):
    return value.sin(), value.cos()


@pytest.mark.parametrize(
    ("function", "marked"),
    [
        pytest.param(lambda t, i: several(_rows(t.view(32, 4), i)), ["embedding"], id="rows"),
        pytest.param(lambda t, i: several(_rows(t, i) * 2), ["mul"], id="scaled"),
        pytest.param(lambda t, i: several((_rows(t, i) * 2).view(-1)), ["mul"], id="viewed"),
        pytest.param(lambda t, i: several(_rows(t, i) + t[:3]), ["add"], id="and places"),
        pytest.param(lambda t, i: _rows(t, i).sin(), [], id="one reader"),
        pytest.param(lambda t, i: several(_rows(t, i) @ t.mT), [], id="a product"),
        pytest.param(lambda t, i: several(t.double()), [], id="no lookup"),
        pytest.param(lambda t, i: several(_rows(t, i.repeat(99))), [], id="larger than the table"),
    ],
)
def test_rows_that_several_read_are_stored(function, marked):
    assert stored(function) == marked


def test_what_is_no_parameters_gather_stays():
    assert stored(lambda t, i: several(_rows(t, i)), fqn=None) == []
    assert stored(lambda t, i, other: several(_rows(other, i)), torch.ones(32, 4)) == []


def test_the_planner_knows():
    graph = make_fx(lambda t, i: several(_rows(t, i)))(SHARD, PLACES).graph
    (node,) = graph.find_nodes(op="call_function", target=_rows.default)
    assert not loop_of(node).stored
    _torch.store(node)
    assert loop_of(node).stored
