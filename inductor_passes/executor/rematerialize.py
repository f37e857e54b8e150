"""What a region computes again, rather than being handed it by another one.

Inductor fuses a loop with those that read its result, wherever they stand in a graph. A cut between
them would have the result written, kept while collectives run, and read: of SwiGLU's backward,
``silu`` in fp32. So a region repeats loops whose inputs take fewer bytes than their results do, or
are handed to it anyway::

    g --> silu --> h |cut| silu --> gradient        g --> silu --> h |cut| g --> silu --> gradient
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters.loops import loop_of, tensors_of

_aten = torch.ops.aten
_CONSTANTS = {_aten.full.default, torch.ops.prims.iota.default}
MOST = 16  # loops that are repeated for one value, one behind the other


class _Made(NamedTuple):
    """How a value comes to be in a region.

    Attributes:
        again: nodes that are repeated there; none if the value is handed to it.
        given: values that are handed to it instead.
    """

    again: frozenset[Node]
    given: frozenset[Node]

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.given))


def repeatable(graph: Graph) -> set[Node]:
    """What may be repeated: constants, views, and loops that make each element of a few of those in
    its place, by few instructions; of nothing that is written to in place."""
    written = {
        _root(argument)
        for node in graph.nodes
        if node.op == "call_function"
        for argument in _torch.mutated_arguments(node)
    }
    return {
        node
        for node in graph.nodes
        if _is_cheap(node) and not any(_root(n) in written for n in node.all_input_nodes)
    }


def _is_cheap(node: Node) -> bool:
    if node.target in _CONSTANTS and not node.all_input_nodes:
        return True
    loop = loop_of(node)
    return _torch.is_view(node) or (loop is not None and loop.elementwise and not loop.heavy)


def made_again(nodes: Sequence[Node], cheap: Set[Node]) -> list[Node]:
    """What the region of ``nodes`` repeats of others, as they stand in the graph; of ``cheap``."""
    own = set(nodes)
    inputs = {n for node in nodes for n in node.all_input_nodes if n not in own}
    there = set(inputs)  # what is handed to it, or repeated
    again: set[Node] = set()
    known = -1
    while known < len(again):  # what is handed to it for one value makes another one cheaper
        known = len(again)
        for node in sorted((inputs & cheap) - again):
            made = _made(node, there - {node}, cheap, {}, MOST)
            again |= made.again
            there |= made.again | made.given
    return sorted(again)


def _made(
    node: Node, there: Set[Node], cheap: Set[Node], known: dict[Node, _Made], most: int
) -> _Made:
    """How ``node`` comes to be in a region with the fewest bytes beside what is there."""
    if node in there:
        return _Made(frozenset(), frozenset())
    if node not in known:
        known[node] = handed = _Made(frozenset(), frozenset({node}))
        if most and node in cheap:
            inputs = [_made(n, there, cheap, known, most - 1) for n in node.all_input_nodes]
            again = frozenset({node}).union(*(made.again for made in inputs))
            made = _Made(again, frozenset().union(*(made.given for made in inputs)))
            if made.nbytes < handed.nbytes and len(again) <= MOST:
                known[node] = made
    return known[node]


def _nbytes(node: Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node.meta.get("val")))


def _root(node: Node) -> Node:
    while _torch.is_view(node) or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def live(nodes: Iterable[Node], needed: Set[Node]) -> list[Node]:
    """Those of ``nodes`` that lead to what is needed."""
    found: list[Node] = []
    wanted = set(needed)
    for node in reversed(list(nodes)):
        if node in wanted:
            found.append(node)
            wanted.update(node.all_input_nodes)
    return found[::-1]
