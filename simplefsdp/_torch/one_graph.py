"""Recomputation in a graph that has forward, backward and update in one.

AOTAutograd cuts a joint graph in two, and chooses what the forward saves and what the backward
recomputes. A graph that computes its gradients itself is not cut, so all activations would be kept.
Therefore this file cuts such a graph as AOTAutograd would, and appends the second part to the first
again::

    forward ─ loss ─ backward ─ update        cut where the gradient begins, at the last input
    forward ─ saved ─▶ recompute, backward, update
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import torch
from torch._functorch import config
from torch.fx import Graph, GraphModule, Node

from simplefsdp._torch.cut import graph_module

AsOne = Literal["as one"]
AS_ONE: Final = "as one"
_COPY = torch.ops.aten.copy_.default
# The partitioner takes an input whose name has "tangents" in it for the beginning of the backward.
# It does so twice: in the graph, and in the backward that it has extracted, where it moves what is
# recomputed to where that is used. The inputs of the extracted graphs are named as the nodes here.
_TANGENT = "tangents_1"
# Since 2.15, where the partitioner has a memory budget (``activation_memory_budget``), it refuses
# to size what is no tensor, such as the mesh of a DTensor.
_OBJECTS_HAVE_NO_SIZE = "unsafe_treat_script_objects_as_zero_size"


def partitioning() -> AbstractContextManager[None]:
    """Settings with which AOTAutograd chooses what the backward recomputes.

    It saves no views, but the tensors that they are views of. If an input is written to before
    backward and only a view of it was saved, autograd does not notice, and gradients are silently
    wrong: torch has this bug (2.11 to 2.15) where Inductor removes, as redundant, a clone that the
    user made to prevent it, of a memory bank's queue. If the input was saved, autograd raises.

    torch's own recomputation in a graph with its own backward is off: it does not know what the cut
    here chooses, and refuses random ops (since 2.12).
    """
    settings = {"recompute_views": True, "remat_using_tags_for_fwd_loss_bwd_graph": False}
    if hasattr(config, _OBJECTS_HAVE_NO_SIZE):
        settings[_OBJECTS_HAVE_NO_SIZE] = True
    return config.patch(settings)


def as_if_cut(gm: GraphModule, static: Sequence[int] = ()) -> GraphModule:
    """A graph like ``gm`` that recomputes what a separate backward graph would recompute.

    ``gm``, which is changed, has aten operators only, functional except for copies into inputs at
    its end. Its backward begins with its last input, the gradient of the loss. ``static`` are the
    indices of inputs that stay at their addresses, so that keeping them costs nothing. Raises a
    ValueError if the backward would need a random generator's state, which one graph cannot pass.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    inputs = gm.graph.find_nodes(op="placeholder")
    copies = _take_copies(gm.graph)
    output: Any = gm.graph.output_node()
    name = inputs[-1].name
    seed = inputs[-1] = _renamed(gm.graph, inputs[-1], _TANGENT)
    results = list(output.args[0])
    backward = _downstream(seed)
    values = [r for r in [*results, *copies.values()] if isinstance(r, Node)]
    early = [value for value in values if value not in backward]
    late = [value for value in values if value in backward]
    output.args = ((*early, *late),)
    output.meta.pop("desc", None)
    parts = min_cut_rematerialization_partition(
        gm, None, num_fwd_outputs=len(early), static_lifetime_input_indices=list(static)
    )
    graph = Graph()
    known = {node.name: graph.node_copy(node) for node in inputs}
    known[seed.name].target = name
    found = [value for part in parts for value in _appended(graph, part, known)]
    # In between are the values that the forward saves, which are no results of the graph.
    asked = [*found[: len(early)], *found[len(found) - len(late) :]]
    made = dict(zip([*early, *late], asked, strict=True))
    for target, value in copies.items():
        copy = graph.call_function(_COPY, (known[target.name], made[value]))
        copy.meta["val"] = target.meta["val"]
    graph.output(tuple(made[r] if isinstance(r, Node) else r for r in results))
    return graph_module(gm, graph)


def _renamed(graph: Graph, old: Node, name: str) -> Node:
    """Replace the input ``old`` by one with another name."""
    with graph.inserting_before(old):
        new = graph.placeholder(name)
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new


def _take_copies(graph: Graph) -> dict[Node, Node]:
    """Remove the copies into inputs at the end of ``graph``; gives what each input is to hold."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=_COPY):
        target, value = node.args[:2]
        if target.op == "placeholder" and not node.users:
            found[target] = value
            graph.erase_node(node)
    return found


def _downstream(node: Node) -> set[Node]:
    found, left = {node}, [node]
    while left:
        users = left.pop().users.keys() - found
        found |= users
        left += users
    return found


def _appended(graph: Graph, part: GraphModule, known: dict[str, Node]) -> list[Any]:
    """Append the nodes of ``part`` to ``graph``; gives the results of ``part``. ``known`` has the
    nodes of ``graph`` by name: the inputs of ``part`` are found there, and its nodes are added."""
    copied: dict[Node, Node] = {}
    again: list[Node] = []
    for node in part.graph.nodes:
        if node.op == "placeholder":
            if node.name not in known:
                raise ValueError(
                    f"a training step as one graph cannot hand {node.name} from forward to "
                    "backward: it recomputes random numbers; do not checkpoint what draws some, or "
                    "compile the model alone"
                )
            copied[node] = known[node.name]
        elif node.op != "output":
            copied[node] = graph.node_copy(node, copied.__getitem__)
            again += [copied[node]] if node.name in known else []
            known[node.name] = copied[node]
    output: Any = part.graph.output_node()
    results = [copied[r] if isinstance(r, Node) else r for r in output.args[0]]
    # A collective has side effects, so the partitioner never drops it: a recomputed gather whose
    # result nothing reads, as if its parameter is only updated, is removed here.
    for node in reversed(again):
        if not node.users and node not in results:
            graph.erase_node(node)
    return results
