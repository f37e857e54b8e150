"""Where a whole step turns from forward to backward: the parameter read last is read first again.

It is gathered once, as FSDP2 keeps what its root has for itself. A second gather would be on its
way while the first one's result is still read: it would save no memory, and nothing could hide it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters._torch import is_view, is_wait
from simplefsdp.provenance import gathered_fqn

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def gather_once_at_turn(graph: Graph) -> None:
    """Have the backward of a whole step read what its forward gathered, if nothing else that is
    gathered is read for the first time in between."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    gathers = graph.find_nodes(op="call_function", target=_GATHER)
    reads = {gather: sorted(map(place.__getitem__, _reads(gather))) for gather in gathers}
    begins = {at[0]: gather for gather, at in reads.items() if at}
    earlier: dict[str, Node] = {}
    for _, again in sorted(begins.items()):
        first = earlier.setdefault(gathered_fqn(again) or again.name, again)
        between = range(reads[first][-1] + 1, reads[again][0])
        if first is not again and begins.keys().isdisjoint(between) and _is_same(first, again):
            _replace(again, first)


def _reads(node: Node) -> Iterator[Node]:
    """What reads the result of a gather, or a view of it."""
    for user in node.users:
        if is_wait(user) or is_view(user):
            yield from _reads(user)
        elif user.op != "output":
            yield user


def _is_same(one: object, other: object) -> bool:
    """Whether two arguments of gathers are made alike of the same inputs."""
    if not (isinstance(one, Node) and isinstance(other, Node)):
        return one == other
    if one is other or one.op != "call_function" or one.target is not other.target:
        return one is other
    pairs = zip(one.args, other.args, strict=False)
    return one.kwargs == other.kwargs and all(_is_same(a, b) for a, b in pairs)


def _replace(again: Node, first: Node) -> None:
    (wait,) = first.users
    for node in list(again.users):
        node.replace_all_uses_with(wait)
        again.graph.erase_node(node)
    while not again.users and again.op == "call_function":
        sources = again.all_input_nodes
        again.graph.erase_node(again)
        (again,) = sources[:1] or (again,)
