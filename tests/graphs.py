"""Capture the forward and backward graphs that the backend compiles, and ask them questions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch.fx import GraphModule, Node

from simplefsdp import provenance
from simplefsdp._torch.cpp_kernels import kernels_together
from simplefsdp.compiler import compilation

_ops = torch.ops._c10d_functional
STARTS = {
    _ops.all_gather_into_tensor.default,
    _ops.reduce_scatter_tensor.default,
    _ops.all_reduce.default,
}


class Captured:
    """The graphs, in the order they were compiled."""

    def __init__(self) -> None:
        self.forward: list[GraphModule] = []
        self.backward: list[GraphModule] = []


@contextmanager
def capture() -> Iterator[Captured]:
    captured, original = Captured(), compilation.observe

    def observe(gm: GraphModule, is_backward: bool, *args: object) -> object:
        (captured.backward if is_backward else captured.forward).append(copy.deepcopy(gm))
        return original(gm, is_backward, *args)

    compilation.observe = observe
    try:
        yield captured
    finally:
        compilation.observe = original


@contextmanager
def no_kernels() -> Iterator[None]:
    """Let Inductor generate code, but compile no kernel: nothing computes, nothing is cached."""
    with kernels_together():
        pass  # which changes the same function, once: not while another one stands there
    patch = pytest.MonkeyPatch()
    patch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *args: None)
    try:
        with config.patch(fx_graph_cache=False):
            yield
    finally:
        patch.undo()
        PyCodeCache.cache_clear()


def calls(gm: GraphModule, *targets: object) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in targets]


def gathers(gm: GraphModule) -> list[str]:
    """FQNs of the parameters gathered, in graph order, duplicates included."""
    found = [provenance.gathered_fqn(n) for n in calls(gm, _ops.all_gather_into_tensor.default)]
    return [fqn for fqn in found if fqn is not None]


def reduces(gm: GraphModule) -> list[str]:
    targets = (_ops.reduce_scatter_tensor.default, _ops.all_reduce.default)
    found = [provenance.reduced_fqn(n) for n in calls(gm, *targets)]
    return [fqn for fqn in found if fqn is not None]
