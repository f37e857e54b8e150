"""The nodes of autograd's graph, and whether its engine is going to run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge


def backward_nodes(outputs: Any) -> Iterator[Node]:
    """The nodes that run the backward of a compiled function with these outputs, mostly one."""
    found: set[Node] = set()
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        node = getattr(output, "grad_fn", None)
        # A view of an output is made again outside of the compiled function.
        while node is not None and "CompiledFunction" not in node.name():
            before = [n for n, _ in node.next_functions if n is not None]
            node = before[0] if len(before) == 1 else None
        if node is not None:
            found.add(node)
    yield from found


def reached(node: Node, gradients: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves that a node's gradients of its inputs, which its hook is given, go to."""
    for (after, _), gradient in zip(node.next_functions, gradients, strict=True):
        leaf = after
        while leaf is not None and not hasattr(leaf, "variable"):  # a view of one, say
            leaf = leaf.next_functions[0][0] if leaf.next_functions else None
        if leaf is not None and gradient is not None:
            yield leaf.variable


def accumulates(param: torch.Tensor) -> bool:
    """Whether the backward that is running adds to the gradient of ``param``, a leaf.

    ``torch.autograd.grad`` does not, with respect to whatever, and ``backward(inputs=...)`` only if
    the parameter is one of them.
    """
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
    except RuntimeError:  # of a leaf, where autograd.grad was called
        return False
