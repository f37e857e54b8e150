"""The seeds of layers: Inductor draws all seeds of a graph at once, and each random operator looks
up its own by number, which tells apart layers that are alike.

The layers' numbers rise by equal steps. In a graph that gets more layers, each of them looks up
what it would if it had been traced, and as many more are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from inductor_passes.adapters._torch import is_draw_of_seeds, is_lookup_of_seed


class Seeds(NamedTuple):
    """How the layers of a graph number the seeds that are drawn for them."""

    step: int  # from layer to layer, as the layers' numbers rise
    first: int  # of the template


SeedsByName = Mapping[str, Seeds]  # by the name of the node that draws them

_OTHERWISE = "{}: layers look up seeds in another order"


def numbered(
    layers: Sequence[Sequence[Node]], numbers: Sequence[int], template: int
) -> SeedsByName:
    """The seeds of the layer ``template`` and the one behind it; ``numbers`` are of the layers in
    the model. ValueError if its numbers do not rise by equal steps."""
    found: dict[str, Seeds] = {}
    up = numbers[template + 1] - numbers[template]
    for ours, theirs in zip(layers[template], layers[template + 1], strict=True):
        if is_lookup_of_seed(ours):
            (seeds, index), (others, other) = _looked_up(ours), _looked_up(theirs)
            its = Seeds((other - index) * up, index)
            known = found.get(seeds, its)
            if others != seeds or its.step != known.step or its.step < 1:
                raise ValueError(_OTHERWISE.format(ours.format_node()))
            found[seeds] = min(known, its)
    return found


def _looked_up(node: Node) -> tuple[str, int]:
    """What draws the seeds that ``node`` takes one of, by name, and which one that is."""
    seeds: Any
    index: Any
    seeds, index = node.args
    return seeds.name, index


def moved_by(node: Node, seeds: SeedsByName, by: int) -> tuple[Any, ...]:
    """The arguments of ``node``, which is in a layer, or those of its counterpart in the layer that
    is ``by`` layers on, if they look up a seed."""
    if not seeds or not is_lookup_of_seed(node):
        return node.args
    drawn, index = _looked_up(node)
    return node.args[0], index + (seeds[drawn].step * by if drawn in seeds else 0)


def move_outside(node: Node, seeds: SeedsByName, more: int) -> None:
    """Have ``node``, which is in no layer, look up or draw the seeds of a graph with ``more``
    layers ahead of the template."""
    if seeds and is_lookup_of_seed(node):
        drawn, index = _looked_up(node)
        if drawn in seeds and index >= seeds[drawn].first:
            node.args = node.args[0], index + seeds[drawn].step * more
    elif node.name in seeds:
        count = node.meta["val"].numel() + seeds[node.name].step * more
        node.meta["val"] = node.meta["val"].new_empty(count)
        if is_draw_of_seeds(node):  # else they come from forward
            node.args = count, *node.args[1:]


def of_both(forward: SeedsByName, backward: SeedsByName) -> SeedsByName:
    """The seeds of a step, which forward draws; ValueError if backward numbers them otherwise."""
    for name, its in backward.items():
        if name not in forward or forward[name].step != its.step:
            raise ValueError(_OTHERWISE.format(name))
    return forward


def check(graph: Graph) -> None:
    """ValueError unless each seed that is looked up is there, and each that ``graph`` draws is
    looked up once at most."""
    for seeds in {node.all_input_nodes[0] for node in filter(is_lookup_of_seed, graph.nodes)}:
        found = [_looked_up(node)[1] for node in seeds.users if is_lookup_of_seed(node)]
        is_twice = is_draw_of_seeds(seeds) and len({*found}) < len(found)
        if is_twice or max(found) >= seeds.meta["val"].numel():
            raise ValueError(_OTHERWISE.format(seeds.format_node()))
