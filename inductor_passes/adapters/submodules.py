"""Graphs that an operator takes as arguments, as flex attention its ``score_mod`` and its mask."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node


def attribute_of(node: Node) -> Any:
    """What a ``get_attr`` node gets."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_submodule(node: Node) -> bool:
    """Whether a node gets a graph."""
    return node.op == "get_attr" and isinstance(attribute_of(node), GraphModule)


def submodule_text(node: Node) -> str:
    """The code of the graph that ``node`` gets, and of those inside it, whatever they are called.

    A graph that holds anything but graphs is equal to no other.
    """
    module = attribute_of(node)
    inner = [m for m in module.modules() if isinstance(m, GraphModule)]
    held = [n for m in inner for n in m.graph.find_nodes(op="get_attr") if not is_submodule(n)]
    return f"<{id(module) if held else module.print_readable(print_output=False)}>"
