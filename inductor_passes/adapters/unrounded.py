"""Gradients that are reduced in fp32 as they were computed, in fp32: not rounded in between.

::

    mm ─ convert to float32 ─ reduce                              mm.dtype ─ reduce
    sum ─ convert to bfloat16 ─ convert to float32 ─ reduce       sum ─ reduce

A matmul of 16-bit numbers sums in fp32. Rounding the sum to 16 bits, the dtype of the parameter,
only to write it again in the 32 bits that gradients are reduced in, takes a kernel and twice the
bytes, and loses precision. Views may stand in between. A sum that is padded or added to something
first stays rounded: the cast is part of that kernel, which would read twice the bytes otherwise.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters._torch_calls import Call, computed
from inductor_passes.adapters.fx import KIND_OF

_aten = torch.ops.aten
_WIDE = {_aten.mm.default: _aten.mm.dtype, _aten.bmm.default: _aten.bmm.dtype}
_NARROW = (torch.bfloat16, torch.float16)
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)


def write_sums_unrounded(graph: Graph, device: torch.device | None = None) -> None:
    """Remove the rounding of values that are only reduced in fp32, on devices that can do without.

    Args:
        graph: of aten operators, with the values of nodes in ``meta["val"]``; changed in place.
        device: that the graph is planned for; where its values are, if None.
    """
    for cast in list(graph.nodes):
        if is_cast(cast, torch.float32) and _is_only_reduced(cast):
            chain = _from_rounding(cast)
            if chain and _torch.has_wide_matmul(device or cast.meta["val"].device):
                last = _unrounded(graph, chain)
                cast.replace_all_uses_with(last)
                graph.erase_node(cast)


def is_cast(node: Node, *dtypes: torch.dtype) -> bool:
    """Whether a node casts a tensor to one of ``dtypes``, and does not move it."""
    is_cast = node.target in _CASTS and node.kwargs.keys() <= {"dtype"}
    return is_cast and node.meta["val"].dtype in dtypes


def _is_only_reduced(node: Node) -> bool:
    """Whether a value is only reduced, directly or through views."""
    return bool(node.users) and all(
        KIND_OF.get(user.target) in ("reduce", "all_reduce")
        or (_torch.is_view(user) and _is_only_reduced(user))
        for user in node.users
    )


def _from_rounding(cast: Node) -> list[Node]:
    """The node that rounded the fp32 numbers which ``cast`` casts back, and the views between them;
    empty if there is no such node."""
    chain: list[Node] = []
    node = cast
    while node is cast or _torch.is_view(node):
        node = node.all_input_nodes[0]
        chain.insert(0, node)
        if len(node.users) > 1 or node.op != "call_function":
            return []
    values = [n.meta["val"] for n in chain]
    if not _rounds(node) or any(map(_torch.has_symbols, values)):
        return []
    same = all(v.dtype == values[0].dtype for v in values)
    # Without the cast, which gives its result a layout and storage of its own, a collective might
    # get a part of a storage, which it does not take.
    whole = values[-1].stride() == cast.meta["val"].stride() and not values[-1].storage_offset()
    return chain if same and whole else []


def _rounds(node: Node) -> bool:
    """Whether a node computes in fp32, and rounds what it gives."""
    if node.target in _WIDE:
        return node.meta["val"].dtype in _NARROW
    if not is_cast(node, *_NARROW):
        return False
    source = node.all_input_nodes[0].meta["val"]
    return source.dtype == torch.float32 and source.stride() == node.meta["val"].stride()


def _unrounded(graph: Graph, chain: list[Node]) -> Node:
    """Make the node that rounds, and the views of it, float32; returns the last of them."""
    rounds, *views = chain
    if rounds.target in _WIDE:
        rounds.target = _WIDE[rounds.target]
        rounds.kwargs = {"out_dtype": torch.float32}
        views = chain
    else:
        chain[0] = rounds.all_input_nodes[0]
        rounds.replace_all_uses_with(chain[0])
        graph.erase_node(rounds)
    for node in views:
        node.meta["val"] = computed(Call(node.target, node.args, node.kwargs))
    return chain[-1]
