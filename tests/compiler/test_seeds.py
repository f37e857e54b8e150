"""Layers look up their seeds by number, which rises from layer to layer."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import inductor_prims
from torch.fx import Graph, Node

from simplefsdp.compiler import seeds
from simplefsdp.compiler.seeds import Seeds


def graph_of(*layers: list[int]) -> tuple[Graph, list[list[Node]]]:
    """A graph whose layers look up these seeds."""
    graph = Graph()
    drawn = graph.call_function(inductor_prims.seeds, (8, torch.device("cpu")))
    drawn.meta["val"] = torch.empty(8, dtype=torch.int64)
    return graph, [
        [graph.call_function(inductor_prims.lookup_seed, (drawn, i)) for i in layer]
        for layer in layers
    ]


@pytest.mark.parametrize("numbers", [[4, 5, 6], [6, 5, 4]])
def test_seeds_of_layers(numbers):
    _, layers = graph_of([3, 2], [5, 4], [7, 6])
    layers = layers if numbers[0] == 4 else layers[::-1]  # backward's numbers fall
    assert seeds.numbered(layers, numbers, 1) == {"inductor_seeds_default": Seeds(2, 4)}


@pytest.mark.parametrize("last", [[7, 5], [0, 1]])
def test_another_order(last):
    _, layers = graph_of([0, 1], [2, 3], last)
    with pytest.raises(ValueError, match="another order"):
        seeds.numbered(layers, [0, 1, 2], 1)


def test_what_is_in_no_layer():
    graph, ((ahead,), _, (behind,)) = graph_of([0], [1, 2], [3])
    (drawn,) = graph.find_nodes(op="call_function", target=inductor_prims.seeds)
    for node in (drawn, ahead, behind):
        seeds.move_outside(node, {drawn.name: Seeds(2, 1)}, more=3)
    assert (drawn.args[0], drawn.meta["val"].shape) == (14, (14,))
    assert (ahead.args, behind.args) == ((drawn, 0), (drawn, 9))


def test_backward_is_like_forward():
    forward = {"drawn": Seeds(2, 1)}
    assert seeds.of_both(forward, {"drawn": Seeds(2, 2)}) == forward
    for backward in ({"drawn": Seeds(1, 1)}, {"other": Seeds(2, 1)}):
        with pytest.raises(ValueError, match="another order"):
            seeds.of_both(forward, backward)


@pytest.mark.parametrize("looked_up", [[1, 1], [8]])
def test_each_seed_is_looked_up_once(looked_up):
    seeds.check(graph_of([0, 7])[0])
    with pytest.raises(ValueError, match="another order"):
        seeds.check(graph_of(looked_up)[0])
