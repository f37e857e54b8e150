"""Matmuls that add to an input of the graph in place.

Gradients that accumulate over several backwards are such inputs. A functionalized graph computes a
matmul by itself, adds it, and copies the sum back: twice the memory traffic of the gradients, and a
buffer for each, though the library that multiplies can add in place. (Megatron-LM's "gradient
accumulation fusion" is the same)::

    mm ─ add(total, mm) ─ copy_(total, add)            add_matmul_(total, ...)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import mm_flop, register_flop_formula

from inductor_passes.adapters import _torch

_aten = torch.ops.aten
_NAME = "inductor_passes::add_matmul_"

# An operator of our own, because in a backward Inductor gives contiguous tensors to all aten
# operators that it does not know: it would transpose the matrix that a weight's gradient is made
# from.
torch.library.define(
    _NAME,
    "(Tensor(a!) total, Tensor left, Tensor right) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)
ADD_MATMUL = torch.ops.inductor_passes.add_matmul_.default


@torch.library.impl(_NAME, ("CPU", "CUDA"))
def add_matmul_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``: matrices ``[m, k]``, ``[k, n]`` and ``[m, n]``."""
    total.addmm_(left, right)


@torch.library.register_fake(_NAME)
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.inductor_passes.add_matmul_)  # type: ignore[untyped-decorator]
def _flops(
    total: object, left: torch.Size, right: torch.Size, *, out_shape: object = None, **_: object
) -> int:
    flops: int = mm_flop(left, right)
    return flops


def add_matmuls_in_place(graph: Graph) -> None:
    """Have each matmul that is added to an input, and written there, add to it in place.

    Args:
        graph: of aten operators, functional but for copies to inputs, behind which nothing reads
            these inputs; changed in place.
    """
    writes = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    written = {write.args[0] for write in writes}
    for write in writes:
        matmul = _added(write)
        if matmul is None or any(_base(node) in written for node in matmul.all_input_nodes):
            continue
        total, added = write.args[:2]
        with graph.inserting_before(write):
            new = graph.call_function(ADD_MATMUL, (total, *matmul.args))
        new.meta = {**matmul.meta, "val": None}
        for node in (write, added, matmul):
            graph.erase_node(node)  # type: ignore[arg-type]


def _added(write: Node) -> Node | None:
    """The matmul whose sum with an input ``write`` copies to that input; None if it writes another
    value."""
    total, value = write.args[:2]
    if write.users or not (isinstance(value, Node) and value.target == _aten.add.Tensor):
        return None
    if value.kwargs or len(value.users) > 1 or total not in value.args:
        return None
    matmul = next((n for n in value.args if n is not total), None)
    if not isinstance(matmul, Node) or matmul.target != _aten.mm.default:
        return None
    values = [node.meta["val"] for node in (total, matmul)]  # type: ignore[union-attr]
    alike = len({(v.shape, v.dtype) for v in values}) == 1
    return matmul if alike and len(matmul.users) == 1 and not matmul.kwargs else None


def _base(node: Node) -> Node:
    while _torch.is_view(node):
        node = node.all_input_nodes[0]
    return node
