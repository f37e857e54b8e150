"""Single numbers that ranks all-reduce: all at once, if all are known when a graph begins.

A parameter that is gathered in float8 is scaled by the largest value that any rank has of it. Each
such number is a collective of four bytes that takes the wire's latency, and its gather waits for
it::

    shard ─ abs ─ max ─ all_reduce ─ scale ─ cast ─ gather        of every parameter, or
    shards ─ abs ─ max ─ cat ─ all_reduce ─ scales ─ casts ─ gathers

What is reduced is the same, element by element, and so are the results, to the bit.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters.copies import Calls
from inductor_passes.adapters.fx import FqnOf

_aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def reduce_at_once(graph: Graph, fqn_of: FqnOf) -> None:
    """Reduce in one all-reduce, at the beginning of ``graph``, the single numbers that are made of
    its inputs alone, without matmuls; in place.

    Args:
        graph: of aten operators, with the values of nodes in ``meta["val"]``.
        fqn_of: of the parameter whose gradient a start reduces, or None. Gradients are left out
            here, as they are bucketed later.
    """
    alike: defaultdict[tuple[object, ...], list[tuple[Node, list[Node]]]] = defaultdict(list)
    for start in _before_writes(graph):
        if start.target is not _ALL_REDUCE or fqn_of(start) is not None or not _is_one(start):
            continue
        if any(user.target is not _torch.WAIT for user in start.users):
            continue
        made_of = _made_of_inputs(start)
        if made_of is not None:
            number, operation, group = start.args
            value = number.meta["val"]  # type: ignore[union-attr]
            alike[operation, group, value.dtype, value.device].append((start, made_of))
    places = {node: place for place, node in enumerate(graph.nodes)}
    for found in alike.values():
        if len(found) > 1:
            _reduce([start for start, _ in found], [n for _, nodes in found for n in nodes], places)


def _before_writes(graph: Graph) -> Iterator[Node]:
    """Nodes that read the inputs as they were given."""
    for node in graph.nodes:
        if _torch.mutated_arguments(node):
            return
        yield node


def _is_one(start: Node) -> bool:
    number = start.meta["val"].numel()
    return isinstance(number, int) and number == 1  # a symbol is not compared, to add no guard


def _made_of_inputs(start: Node) -> list[Node] | None:
    """The nodes that lead from inputs of the graph to what ``start`` sends. None if one of them
    multiplies matrices, perhaps late on purpose, is random, or communicates."""
    found: dict[Node, None] = {}
    left = list(start.all_input_nodes)
    while left:
        node = left.pop()
        if node.op == "placeholder" or node in found:
            continue
        is_pure = node.op == "get_attr" or node.target is operator.getitem or _is_light(node)
        if not is_pure:
            return None
        found[node] = None
        left += node.all_input_nodes
    return list(found)


def _is_light(node: Node) -> bool:
    return (
        _torch.is_op(node)
        and not _torch.is_random(node)
        and not _torch.is_wait(node)
        and not _torch.is_collective_start(node)
        and not _torch.multiplies_matrices(node)
    )


def _reduce(starts: list[Node], made_of: list[Node], places: dict[Node, int]) -> None:
    graph, first = starts[0].graph, starts[0]
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    for node in sorted(set(made_of), key=places.__getitem__):
        if node is begin:
            begin = begin.next
        else:
            begin.prepend(node)
    calls = Calls(graph)

    def call(like: Node, target: torch._ops.OpOverload, *args: Any) -> Node:
        """A call with the metadata of ``like``, which says where in the model it comes from."""
        node = calls(target, *args)
        node.meta = {**like.meta, "val": node.meta["val"]}
        return node

    with graph.inserting_before(begin):
        parts = [call(start, _aten.view.default, start.args[0], [1]) for start in starts]
        numbers = call(first, _aten.cat.default, parts)
        sent = call(first, _ALL_REDUCE, numbers, *first.args[1:])
        reduced = call(first, _torch.WAIT, sent)
        for place, start in enumerate(starts):
            one = call(start, _aten.select.int, reduced, 0, place)
            shape = list(start.meta["val"].shape)
            # In memory of its own: backward may write over what forward saves for it.
            result = call(start, _aten.clone.default, call(start, _aten.view.default, one, shape))
            for wait in start.users:
                wait.replace_all_uses_with(result)
    for node in [*(wait for start in starts for wait in start.users), *starts]:
        graph.erase_node(node)
