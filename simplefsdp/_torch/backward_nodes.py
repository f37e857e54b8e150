"""Autograd nodes: which compute gradients, and where these go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node as BackwardNode
from torch.autograd.graph import get_gradient_edge


def backward_nodes(outputs: Any, inputs: Iterable[Any]) -> Iterator[BackwardNode]:
    """The autograd nodes of the compiled function that made these outputs of these inputs; usually
    one. An output that is a view of an input is not of that function's nodes, but of the input's,
    which may be those of another compiled function."""
    found: set[BackwardNode] = set()
    ends = _nodes_of(outputs if isinstance(outputs, (list, tuple)) else [outputs])
    others = _nodes_of(inputs) if ends else set()  # without gradients, inputs are not looked at
    for end in ends:
        node: BackwardNode | None = end
        # An output that is a view is recreated outside of the compiled function, by further nodes.
        while node is not None and node not in others and "CompiledFunction" not in node.name():
            before = [n for n, _ in node.next_functions if n is not None]
            node = before[0] if len(before) == 1 else None
        if node is not None and node not in others:
            found.add(node)
    yield from found


def _nodes_of(values: Iterable[Any]) -> set[BackwardNode]:
    nodes = (getattr(value, "grad_fn", None) for value in values)
    return {node for node in nodes if node is not None}


def reached(
    after_node: Iterable[tuple[Any, int]], gradients: Iterable[Any]
) -> Iterator[torch.Tensor]:
    """The leaf tensors that receive one of ``gradients``, the gradients of a node's inputs, which a
    hook of the node is given. ``after_node`` is its ``next_functions``, which the hook may hold: a
    hook that holds its node keeps what that saved until Python looks for garbage."""
    for (after, _), gradient in zip(after_node, gradients, strict=True):
        leaf = after
        while leaf is not None and not hasattr(leaf, "variable"):  # the input is a view, say
            leaf = leaf.next_functions[0][0] if leaf.next_functions else None
        if leaf is not None and gradient is not None:
            yield leaf.variable


def accumulates(param: torch.Tensor) -> bool:
    """Whether the running backward accumulates into ``.grad`` of ``param``, a leaf.
    ``torch.autograd.grad`` does not; ``backward(inputs=...)`` does only for these inputs."""
    if not param.numel():  # get_gradient_edge() makes a view, which an empty DTensor does not have
        return True
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
    except RuntimeError:  # torch raises it for leaves inside of autograd.grad
        return False
