"""FX graphs of the passes: recorded, and run on ranks that are all in this process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

import simplefsdp.compiler.compilation
from inductor_passes.adapters import _torch
from inductor_passes.passes import bucket_and_reorder
from inductor_passes.rehearsal import Settings

RANKS = 4


def copied(graph: Graph) -> Graph:
    copy = Graph(graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy


class Recorder:
    """Every graph that ``bucket_and_reorder`` was given, before and after, forward first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[Graph] = []
        self.after: list[Graph] = []
        monkeypatch.setattr(simplefsdp.compiler.compilation, "bucket_and_reorder", self)

    def __call__(self, graph: Graph, settings: Settings, *args: Any) -> None:
        self.before.append(copied(graph))
        bucket_and_reorder(graph, settings, *args)
        self.after.append(copied(graph))


def run_on_ranks(graph: Graph, inputs: Sequence[Sequence[Any]]) -> list[Any]:
    """Outputs of ``graph`` on each rank, all of them run in this process, node by node.

    Ranks of a group of n are n successive ones; an all-reduce, which does not tell, is over all.
    """
    values: list[dict[Node, Any]] = [{} for _ in inputs]
    feeds = [iter(given) for given in inputs]
    for node in graph.nodes:
        args = [map_arg((node.args, node.kwargs), known.__getitem__) for known in values]
        if node.op == "placeholder":
            results = [next(feed) for feed in feeds]
        elif node.op == "get_attr":
            results = [getattr(graph.owning_module, node.target) for _ in inputs]
        elif node.op == "output":
            return [a[0] for a, _ in args]
        elif _torch.is_collective_start(node):
            results = _communicate(node, [a for a, _ in args])
        elif _torch.is_wait(node):
            results = [a[0] for a, _ in args]
        else:
            results = [node.target(*a, **k) for a, k in args]
        for known, result in zip(values, results, strict=True):
            known[node] = result
    raise AssertionError("the graph has no output")


def _communicate(node: Node, args: Sequence[Any]) -> list[Any]:
    name = node.target._schema.name.removeprefix("_c10d_functional::")
    size = next((a for a in args[0][1:] if isinstance(a, int)), len(args))
    if not name.endswith("_coalesced"):
        return _send(name, size, [a[0] for a in args])
    members = zip(*(a[0] for a in args), strict=True)
    sent = [_send(name.removesuffix("_coalesced"), size, list(tensors)) for tensors in members]
    return [list(received) for received in zip(*sent, strict=True)]


def _send(name: str, size: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    received: list[torch.Tensor] = []
    for first in range(0, len(tensors), size):
        group = tensors[first : first + size]
        assert all(tensor.is_contiguous() for tensor in group), name  # as every backend asks
        if name == "all_gather_into_tensor":
            received += [torch.cat(group) for _ in group]
        else:
            total = functools.reduce(torch.add, group)
            parts = total.chunk(size) if name == "reduce_scatter_tensor" else [total] * size
            received += [part.clone() for part in parts]
    return received


def same_numbers(one: Graph, other: Graph, ranks: int = RANKS) -> bool:
    """Whether two graphs give equal bits on all ranks, whose inputs differ."""
    found = []
    for graph in (one, other):
        torch.manual_seed(0)
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = [[_value_like(node.meta["val"]) for node in nodes] for _ in range(ranks)]
        # Inputs afterwards, too: a graph may write to them.
        found.append(_tensors([run_on_ranks(graph, inputs), inputs]))
    assert all(tensor.isfinite().all() for tensor in found[0]), "nothing to compare"
    return all(map(torch.equal, *found)) and len(found[0]) == len(found[1])


def _value_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_torch.size_hint(n) for n in value.shape]
    if value.dtype.is_floating_point:
        return torch.randn(shape).to(value.dtype)
    return torch.randint(0, 2, shape).to(value.dtype)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    nested = values if isinstance(values, (list, tuple)) else []
    return [tensor for value in nested for tensor in _tensors(value)]
