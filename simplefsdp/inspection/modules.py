"""Which module each node of a traced graph belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch.fx import Graph, Node

from simplefsdp.simulation.trace import TracedStep

_ROOT = re.compile(r"^L\['\w+'\]\.?")


def modules_of_step(step: TracedStep) -> dict[str, dict[str, str]]:
    """Module paths by node name, for the forward and for the backward graph."""
    forward = modules_of(step.forward.graph, step.fqns, {})
    return {"forward": forward, "backward": modules_of(step.backward.graph, step.fqns, forward)}


def modules_of(graph: Graph, fqns: Iterable[str], forward: Mapping[str, str]) -> dict[str, str]:
    """Module paths by node name; a node without a path gets that of the node before it.

    Paths begin like those in ``fqns``: a module around the wrapped one, such as a loss, is left
    out. An input that a backward graph gets from a forward node has the module of that node;
    ``forward`` has these modules.
    """
    paths = {node: path for node in graph.nodes if (path := _path(node)) is not None}
    around = _around(paths.values(), {fqn.partition(".")[0] for fqn in fqns})
    found: dict[str, str] = {}
    last = ""
    for node in graph.nodes:
        if node in paths and node.op != "placeholder":
            last = paths[node].removeprefix(around)
        if last and node.op == "call_function":
            found[node.name] = last
        elif node.op == "placeholder" and node.name in forward:
            found[node.name] = forward[node.name]
    return found


def _path(node: Node) -> str | None:
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if isinstance(stack, Mapping) and stack:
            path, _ = list(stack.values())[-1]
            return _ROOT.sub("", path)
    return None


def _around(paths: Iterable[str], roots: set[str]) -> str:
    """The prefix of module paths that comes before the wrapped module's own names."""
    for path in paths:
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part in roots), None)
        if at is not None:
            return "".join(f"{part}." for part in parts[:at])
    return ""
