"""Rows that are looked up in a gathered parameter: looked up once.

Inductor does not store the result of a cheap loop that several others read; each of these computes
it again::

    gather ─ table ─ embedding ─┬─ norm ─ ...
                                └─ add ─ ... ─ norm's backward: the table is alive till here

In the graph of a whole step, the table would be alive during all of the step.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters.fx import KIND_OF, FqnOf
from inductor_passes.adapters.loops import is_lookup, loop_of, nbytes_of


def look_up_once(graph: Graph, fqn_of: FqnOf) -> None:
    """Have Inductor store the rows that are looked up in a full parameter, or what loops make of
    them, where several loops read that, if it takes less memory than the parameter.

    Args:
        graph: of aten operators, with the values of nodes in ``meta["val"]``; its nodes are marked.
        fqn_of: of the parameter that a start gathers, or None.
    """
    for start in graph.nodes:
        if KIND_OF.get(start.target) == "gather" and fqn_of(start) is not None:
            for rows in filter(is_lookup, _readers(start)):
                read = _where_several_read(rows)
                if read is not None and nbytes_of(read) < nbytes_of(start):
                    _torch.store(read)


def _readers(value: Node) -> list[Node]:
    """The nodes that read a gathered value, directly or through waits and views."""
    found: list[Node] = []
    for user in value.users:
        is_same = _torch.is_view(user) or _torch.is_wait(user)
        found += _readers(user) if is_same else [user]
    return found


def _where_several_read(rows: Node) -> Node | None:
    """The first loop, in the chain of elementwise loops from ``rows`` on, of which several nodes
    read the result or a view of it; None if there is none."""
    loop = node = rows
    while len(node.users) == 1:
        (node,) = node.users
        if _torch.is_view(node):
            continue
        behind = loop_of(node)
        if behind is None or not behind.elementwise:
            return None
        loop = node
    return loop if node.users else None
