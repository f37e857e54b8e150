"""How values really lie in memory, where a graph says otherwise.

Torch's joint passes leave out what computes nothing, as a division by 1, and then tell of what it
was given what they knew of its result. If the former is a part of a larger tensor, it lies apart,
and the latter would have been dense::

    part = slice(x, 1, 0, 8)      strides 16, 1
    same = div(part, 1.0)         strides  8, 1: gone, and `part` is told to have them

Inductor lowers views anew, and does not mind. Code of a region, which begins with what the graph
says of its inputs, would read the wrong places.
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
    """Let ``graph`` say of its inputs how the (fake) ``inputs`` lie."""
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, FakeTensor) and _differ(node.meta.get("val"), value):
            node.meta["val"] = value


def correct_strides(graph: Graph) -> None:
    """Let ``graph``, which is right about its inputs, say how its values lie."""
    changed: set[Node] = set()
    right: set[str] = set()  # calls that make what is said: layers repeat them
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
    """Whether what is known of a view may be of something else."""
    if not _torch.is_view(node):
        return False
    of_input = any(n.op == "placeholder" for n in node.all_input_nodes)
    return of_input or node.meta.get("original_aten") is not node.target


def _call(node: Node) -> str:
    """An operator, what it is given, and what is said of its result."""
    told = map_arg((node, node.args, node.kwargs), lambda n: _lies(n.meta.get("val")))
    return f"{node.target} {told}"


def _lies(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)


def _made_by(node: Node) -> FakeTensor | None:
    """What an operator of one result makes of what its inputs are; None if that is not known."""
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
