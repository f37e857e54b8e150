"""Writes to a graph's inputs, done as soon as the values to write are there.

Functionalization leaves every write to an input for the end of the graph, as a copy. The values to
write live until then: all accumulated gradients of a backward at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch


def write_inputs_early(graph: Graph, is_ours: Callable[[Node], bool]) -> None:
    """Move each final ``copy_`` to an input behind what it copies, and behind other reads of it.

    The graph computes the same: nothing between reads what the input was before.

    Args:
        graph: of aten operators, functional but for these copies; changed in place.
        is_ours: whether a value is copied to an input whose memory no other input shares.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[:2]
        if not (isinstance(target, Node) and isinstance(value, Node) and is_ours(value)):
            continue
        if target.op != "placeholder":
            continue
        last = max([value, *_reads(target, node)], key=place.__getitem__)
        if last.op != "placeholder" and place[last] < place[node]:
            last.append(node)


def _reads(target: Node, write: Node) -> list[Node]:
    """What uses ``target``, or a view of it, beside ``write``; if that is sent, the wait, too."""
    found: list[Node] = []
    left = [target]
    while left:
        users = [user for user in left.pop().users if user not in (write, *found)]
        found += users
        left += [user for user in users if _may_alias(user) or _torch.is_collective_start(user)]
    return found


def _may_alias(node: Node) -> bool:
    if not _torch.is_op(node):
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns)  # type: ignore[union-attr]
