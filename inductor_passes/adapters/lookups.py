"""Rows that are looked up in a gathered parameter: looked up once.

Inductor writes nothing of a cheap loop that several others read; each of them computes it again::

    gather ─ table ─ embedding ─┬─ norm ─ ...
                                └─ add ─ ... ─ norm's backward: the table is alive till here

In a graph of a whole step that is all of the step.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters.fx import KIND_OF
from inductor_passes.adapters.loops import loop_of, nbytes_of


def look_up_once(graph: Graph) -> None:
    """Have Inductor store what takes less memory than the full parameter that it is read from.

    Args:
        graph: of aten operators, with the values of nodes in ``meta["val"]``; its nodes are marked.
    """
    for start in list(graph.nodes):
        if KIND_OF.get(start.target) == "gather":
            for node in _readers(start):
                if loop_of(node) and len(node.users) > 1 and nbytes_of(node) < nbytes_of(start):
                    _torch.store(node)


def _readers(value: Node) -> list[Node]:
    """What reads a gathered value, its waits, or views of them."""
    found: list[Node] = []
    for user in value.users:
        is_same = _torch.is_view(user) or user.target is _torch.WAIT
        found += _readers(user) if is_same else [user]
    return found
