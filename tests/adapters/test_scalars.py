"""Single numbers that all ranks reduce: which are reduced at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from inductor_passes.adapters.scalars import reduce_at_once

_all_reduce = torch.ops._c10d_functional.all_reduce.default
_wait = torch.ops._c10d_functional.wait_tensor.default
A, B, C = torch.arange(4.0), torch.arange(4.0, 8.0).view(2, 2), torch.ones(1, 1)


def reduced(number, operation: str = "max"):
    return _wait(_all_reduce(number, operation, "0"))


def largest(value):
    return reduced(value.abs().max())


def three(a, b, c):
    return a / largest(a), b * reduced(c), (b - 9) / largest(b - 9)


def deep(a, b, c):
    return largest(a), largest(b @ b)


def with_constants(a, b, c):
    return largest(a * torch.tensor(2.0)), largest(b * torch.tensor(3.0))


def write_first(a, b, c):
    c.add_(1)
    return largest(a), largest(b)


def in_turn(a, b, c):
    return (largest(b * largest(a)),)


def others(a, b, c):
    return largest(a), reduced(b.sum(), "sum"), reduced(b.double().max()), reduced(a)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        pytest.param(three, [3], id="of inputs"),
        pytest.param(deep, [1, 1], id="a matmul before one"),
        pytest.param(with_constants, [2], id="of constants, too"),
        pytest.param(write_first, [1, 1], id="an input was written"),
        pytest.param(in_turn, [1, 1], id="one after the other"),
        pytest.param(others, [1, 1, 1, 4], id="another operation, dtype, or many numbers"),
    ],
)
def test_what_is_reduced_at_once(function, sizes):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        made: GraphModule = make_fx(function, tracing_mode="fake")(A, B, C)
        inputs = (A, B.clone(), C.clone())
        wanted = made(*inputs)
        reduce_at_once(made.graph, lambda start: None)
        made.graph.lint()
        made.recompile()
        starts = made.graph.find_nodes(op="call_function", target=_all_reduce)
        assert [start.meta["val"].numel() for start in starts] == sizes
        for got, value in zip(made(A, B.clone(), C.clone()), wanted, strict=True):
            assert got.shape == value.shape and torch.equal(got, value)
        for node in made.graph.nodes:
            if node.op == "call_function":
                assert isinstance(node.meta["val"], torch.Tensor), node
    finally:
        dist.destroy_process_group()


def test_gradients_are_left_to_their_buckets():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        made: GraphModule = make_fx(three, tracing_mode="fake")(A, B, C)
    finally:
        dist.destroy_process_group()
    reduce_at_once(made.graph, lambda start: "weight")
    assert len(made.graph.find_nodes(op="call_function", target=_all_reduce)) == 3
