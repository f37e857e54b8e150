"""The real strides of values, where a graph says otherwise.

Torch's joint passes remove a node that computes nothing, as a division by 1, and then note on its
input what was known of its result. If the input is a part of a larger tensor, its strides are not
dense, while those of the result would have been::

    part = slice(x, 1, 0, 8)      strides 16, 1
    same = div(part, 1.0)         strides  8, 1: gone, and `part` is told to have them

Inductor computes the strides of views anew, so the whole graph is compiled correctly. The code of a
region, which relies on what the graph says of the region's inputs, would read the wrong places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.adapters import _torch
from inductor_passes.adapters._torch_calls import Call, computed


def take_strides_of_inputs(graph: Graph, inputs: Sequence[Any]) -> None:
    """Note on the inputs of ``graph`` the strides of the (fake) ``inputs``, where they differ."""
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, FakeTensor) and _differ(node.meta.get("val"), value):
            node.meta["val"] = value


def correct_strides(graph: Graph) -> None:
    """Correct the strides noted on the nodes of ``graph``; those noted on its inputs are right."""
    changed: set[Node] = set()
    right: set[str] = set()  # calls that were found right, since layers repeat calls
    for node in graph.nodes:
        if _torch.is_op(node) and (not changed.isdisjoint(node.all_input_nodes) or _is_odd(node)):
            if (call := _call(node)) in right:
                continue
            made = _made_by(node)
            if made is not None and _differ(node.meta["val"], made):
                node.meta["val"] = made
                changed.add(node)
            else:
                right.add(call)


def _is_odd(node: Node) -> bool:
    """Whether what is noted on a view may be of another node."""
    if not _torch.is_view(node):
        return False
    of_input = any(n.op == "placeholder" for n in node.all_input_nodes)
    return of_input or node.meta.get("original_aten") is not node.target


def _call(node: Node) -> str:
    """A text of an operator, the layouts of its arguments, and the layout noted for its result."""
    told = map_arg((node, node.args, node.kwargs), lambda n: _lies(n.meta.get("val")))
    return f"{node.target} {told}"


def _lies(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)


def _made_by(node: Node) -> FakeTensor | None:
    """The one result that an operator computes from its inputs' values; None if not known."""
    if not isinstance(node.meta.get("val"), FakeTensor):
        return None
    try:
        made = computed(Call(node.target, node.args, node.kwargs))
    except Exception:  # an operator that is not for fake tensors is known by what was traced
        return None
    return made if isinstance(made, FakeTensor) else None


def _differ(was: Any, value: torch.Tensor) -> bool:
    if not isinstance(was, torch.Tensor) or any(map(_torch.has_symbols, (was, value))):
        return False  # graphs of symbols are compiled whole
    strides = zip(value.shape, was.stride(), value.stride(), strict=True)
    return any(size != 1 and old != new for size, old, new in strides)
