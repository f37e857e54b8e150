"""Has Dynamo trace only one of several layers, if it can tell that the others are like it.

Torch can do so for a function that the user marks (``nested_compile_region``). It checks whether
the guards and other conditions of one traced call hold for the arguments of the next. If all hold,
the graph calls the same subgraph again. Here each member of a long list of layers is treated as
such a function. :func:`inline_repeated_calls` then replaces the calls by the layers' nodes, before
any other code sees the graph. One thing is added to torch's way: guards are installed for every
layer, so that a layer that is changed later is traced anew.

If a layer cannot be such a function, because the graph breaks in it, say, Dynamo restarts the
frame, and traces all layers of that class in full. ``trace_once.py`` intercepts the calls of
layers, and ``traced_calls.py`` compares them.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

REPEATED = "_simple_fsdp_repeated"
"""Attribute of a module that is one of many that may be alike."""

LAYER = "simplefsdp_layer"
"""Key in ``meta``. For the node of a call: the path of the layer that it calls. For the graph that
is called: the path of the layer that was traced."""

INSIDE = "_simplefsdp_inside_layer"
"""Attribute of Dynamo's output graph while a layer's call is being traced."""

REFUSED: set[object] = set()
"""Kinds of layers (see :func:`kind_of`) that are traced one by one."""


def kind_of(layer: nn.Module) -> object:
    """What layers must have in common besides what guards check: the class of the layer, and the
    global modes that a trace depends on."""
    devices = sorted({"cpu", *(p.device.type for p in layer.parameters())})
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
        if torch.amp.is_autocast_available(device)
    ]
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
    )
    return type(layer), *modes, *autocast, torch._C._len_torch_function_stack()


def reset_repeated_calls() -> None:
    """Forget which kinds of layers are not alike, as layers may have been changed."""
    REFUSED.clear()


def inline_repeated_calls(gm: GraphModule) -> int:
    """Replace the calls of layers by the layers' nodes; gives the number of layers that Dynamo did
    not trace, because they are like others."""
    bodies: set[str] = set()
    return _inline_in(gm, bodies) - len(bodies)


def _inline_in(gm: GraphModule, bodies: set[str]) -> int:
    """Do so in a graph, and in the regions in it; gives the number of calls. The names of the
    subgraphs that are called are added to ``bodies``."""
    calls = [node for node in gm.graph.nodes if LAYER in node.meta]
    names = {str(node.args[0].target) for node in calls}
    count = len(calls)
    for name, region in gm.named_children():
        if isinstance(region, GraphModule) and name not in names:
            count += _inline_in(region, bodies)
    for node in calls:
        attribute, *operands = node.args
        _inline(gm, node, getattr(gm, str(attribute.target)), operands[1:])
        gm.graph.erase_node(node)
        if not attribute.users:
            gm.graph.erase_node(attribute)
    if calls:
        gm.recompile()
        gm.delete_all_unused_submodules()
    bodies |= names
    return count


def _inline(gm: GraphModule, call: Node, body: GraphModule, operands: Sequence[Any]) -> None:
    made: dict[Node, Any] = {}
    traced, layer = body.meta[LAYER], call.meta[LAYER]
    with gm.graph.inserting_before(call):
        placeholders = iter(operands)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(placeholders)
            elif node.op == "output":
                results = torch.fx.node.map_arg(node.args[0], made.__getitem__)
            else:
                inlined = made[node] = gm.graph.node_copy(node, made.__getitem__)
                _move(inlined, traced, layer)
                if node.op == "get_attr":
                    inlined.target = target = _own_attribute(gm, body, str(node.target))
                    for inner in _nodes_of(getattr(gm, target)):
                        _move(inner, traced, layer)
    for user in list(call.users):  # getitem of each result
        result = results[user.args[1]]
        if isinstance(result, Node) and traced != layer:
            # The fake tensor of this layer's result, which has a storage of its own.
            result.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(result)
        gm.graph.erase_node(user)


def _own_attribute(gm: GraphModule, body: GraphModule, target: str) -> str:
    """The name in ``gm`` of an attribute of ``body``, which is added to ``gm`` if it is not there.
    A graph is always added, as a copy."""
    value = operator.attrgetter(target)(body)
    if isinstance(value, GraphModule):
        meta = value.meta
        value = GraphModule(value, copy.deepcopy(value.graph))
        value.meta.update(meta)
    elif operator.attrgetter(target)(gm) is value:
        return target
    names = (f"{target.replace('.', '_')}_{i}" for i in itertools.count())
    name = next(name for name in names if not hasattr(gm, name))
    setattr(gm, name, value)
    return name


def _nodes_of(value: object) -> Iterator[Node]:
    """The nodes of a graph, and of the graphs in it."""
    graphs = value.modules() if isinstance(value, GraphModule) else ()
    return (n for graph in graphs if isinstance(graph, GraphModule) for n in graph.graph.nodes)


def _move(node: Node, traced: str, layer: str) -> None:
    stack = node.meta.get("nn_module_stack")
    if stack and traced != layer:
        node.meta["nn_module_stack"] = {
            key: (f"{layer}{path[len(traced) :]}" if path.startswith(traced) else path, kind)
            for key, (path, kind) in stack.items()
        }
