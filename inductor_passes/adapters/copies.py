"""The copies around a bucket: its members into one buffer, and out of it, as nodes of an FX graph.

Where :mod:`inductor_passes.adapters.packs` has a kernel, one kernel copies all members, and nodes
that only cast or padded a member before are left out. Elsewhere a cast is fused with the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters._torch_calls import Call, computed
from inductor_passes.adapters.loops import loop_of
from inductor_passes.adapters.packs import PACK, UNPACK, has_kernel
from inductor_passes.adapters.unrounded import is_cast

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_PAD, _CLONE = _aten.constant_pad_nd.default, _aten.clone.default
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED = 128  # bytes: what is sent should begin at a multiple of it


class Calls:
    """Calls that are added to a graph, in order, with their values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: list[Node] = []

    def __call__(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = computed(Call(target, args, {}))
        self.made.append(node)
        return node


def copied_in(call: Calls, inputs: Sequence[Node], rows: int) -> Node:
    """One buffer of all inputs, row by row, where each input is taken as ``rows`` rows."""
    widths = [n.meta["val"].numel() // rows for n in inputs]
    first = inputs[0].meta["val"]
    if has_kernel(first.device):
        return call(PACK, [source_of(n) for n in inputs], rows, widths, first.dtype)
    parts = [
        call(_aten.view.default, n, [rows, width]) for n, width in zip(inputs, widths, strict=True)
    ]
    return call(_aten.view.default, call(_aten.cat.default, parts, 1), [rows * sum(widths)])


def copied_out(call: Calls, flat: Node, rows: int, shapes: Sequence[Sequence[int]]) -> list[Node]:
    """The members in a buffer of so many ``rows``, each in its shape; views if it is one row."""
    widths = [torch.Size(shape).numel() // rows for shape in shapes]
    if rows > 1 and has_kernel(flat.meta["val"].device):
        members = call(UNPACK, flat, rows, widths)
        parts = [call(operator.getitem, members, i) for i in range(len(widths))]
        pairs = zip(parts, shapes, strict=True)
        return [call(_aten.view.default, part, list(shape)) for part, shape in pairs]
    full = call(_aten.view.default, flat, [rows, sum(widths)])
    at, out = 0, []
    for width, shape in zip(widths, shapes, strict=True):
        part = call(_aten.slice.Tensor, full, 1, at, at + width)
        if rows > 1:
            part = call(_aten.clone.default, part)
        out.append(call(_aten.view.default, part, list(shape)))
        at += width
    return out


def cast_together(
    call: Calls, alone: Sequence[Node], shared: Sequence[Node]
) -> tuple[list[Node], list[Node]]:
    """What a gather sends: a tensor for each input ``alone``, and a buffer of those ``shared``, if
    there are any.

    Where there is a kernel, one launch makes the buffer and all tensors that are casts or pads.
    """
    first = (*alone, *shared)[0].meta["val"]
    sources = {n: source for n in alone if (source := source_of(n)) is not n}
    if not has_kernel(first.device) or not sources or len(sources) + len(shared) < 2:
        return list(alone), [copied_in(call, shared, 1)] if shared else []
    step = max(1, _ALIGNED // first.dtype.itemsize)
    sizes = [n.meta["val"].numel() for n in (*sources, *shared)]
    slots = [-(-size // step) * step for size in sizes[: len(sources)]]
    widths = [*slots, *sizes[len(sources) :]]  # what is shared lies together, at the end
    members = [*sources.values(), *(source_of(n) for n in shared)]
    flat = call(PACK, members, 1, widths, first.dtype)
    made, at = {}, 0
    for node, size, slot in zip(sources, sizes, slots, strict=False):
        part = call(_aten.slice.Tensor, flat, 0, at, at + size)
        made[node] = call(_aten.view.default, part, list(node.meta["val"].shape))
        at += slot
    buffer = [call(_aten.slice.Tensor, flat, 0, at, sum(widths))] if shared else []
    return [made.get(node, node) for node in alone], buffer


def source_of(node: Node) -> Node:
    """The node that holds the elements of ``node``, in their order, before they are cast, padded by
    zeros at the end, or copied for ``node`` alone; ``node`` itself if nothing of that is done."""
    dtype = node.meta["val"].dtype
    found, at, copies = node, node, False
    # One cast at most: what was rounded twice may not be what is rounded once.
    while len(at.users) == 1 and (at.target in _VIEWS or _copies(at, dtype)):
        copies = copies or at.target not in _VIEWS
        at = at.all_input_nodes[0]
        value = at.meta["val"]
        castable = value.dtype == dtype or {value.dtype, dtype} <= set(_FLOATS)
        if not castable or _torch.has_symbols(value):
            break
        if copies and value.is_contiguous():
            found = at
    return found


def _copies(node: Node, dtype: torch.dtype) -> bool:
    """Whether a node only copies. A cast of what a loop makes does not count: it is fused there."""
    if is_cast(node, dtype):
        source = node.all_input_nodes[0]
        while source.target in _VIEWS:
            source = source.all_input_nodes[0]
        # If a loop makes the source, it casts before it writes, at no cost, and need not round to
        # the dtype of the source first.
        return loop_of(source) is None
    return node.target is _CLONE or _pads(node)


def _pads(node: Node) -> bool:
    """Whether a node pads a tensor by zeros after its last row."""
    if node.target is not _PAD:
        return False
    arguments: tuple[Any, ...] = node.args
    tensor, (*others, last), *value = arguments
    by_rows = len(others) + 1 == 2 * tensor.meta["val"].dim()
    rows_known = isinstance(last, int) and last >= 0  # a symbol's node might stand for a cut
    return bool(by_rows and not any(others) and rows_known and not any(value))


def erase_unused(graph: Graph, nodes: Sequence[Node]) -> list[str]:
    """Erase those of ``nodes`` that nothing uses any more, and what only these used; returns the
    names of all that was erased."""
    gone: list[str] = []
    left = list(nodes)
    while left:
        node = left.pop()
        if node.op == "call_function" and not node.users and node.name not in gone:
            left += node.all_input_nodes
            gone.append(node.name)
            graph.erase_node(node)
    return gone
