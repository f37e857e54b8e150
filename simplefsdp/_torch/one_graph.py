"""Forward, backward and what comes after them, traced as one graph.

AOTAutograd cuts a joint graph in two, and chooses what the forward saves and what the backward
computes again. Of a graph that computes its gradients itself it has nothing to cut, and all is
saved. So that graph is cut here, as AOTAutograd would, and the two are put one behind the other::

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
# By a name that has "tangents" in it the partitioner knows where a backward begins; and once more
# in the backward that it has taken out, whose inputs are called as nodes here are, to put what is
# computed again where it is used.
_TANGENT = "tangents_1"


def partitioning() -> AbstractContextManager[None]:
    """How AOTAutograd is to choose what backward computes again.

    It saves no views, but what they are views of. Of a view it takes no notice when that is written
    to before backward, and gradients are silently wrong, as torch's are (2.11 to 2.15) where
    Inductor has removed a clone that the user made against this, of a memory bank's queue, as one
    in vain; of an input autograd takes notice, and raises.

    And it leaves a graph with its own backward alone: it knows nothing of what the cut chooses, and
    refuses random ops (since 2.12).
    """
    return config.patch(recompute_views=True, remat_using_tags_for_fwd_loss_bwd_graph=False)


def as_if_cut(gm: GraphModule, static: Sequence[int] = ()) -> GraphModule:
    """``gm`` with that computed again which a backward of its own would compute again; it is made
    of aten operators, functional but for copies into inputs at the end, and changed.

    Its gradients begin with its last input. ``static`` are places of inputs that stay where they
    are, which it costs nothing to keep. A ValueError if its backward would be told the state of
    random numbers, which one graph has not.
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
    # Between the two stands what is saved, which is not among what the graph was asked for.
    asked = [*found[: len(early)], *found[len(found) - len(late) :]]
    made = dict(zip([*early, *late], asked, strict=True))
    for target, value in copies.items():
        copy = graph.call_function(_COPY, (known[target.name], made[value]))
        copy.meta["val"] = target.meta["val"]
    graph.output(tuple(made[r] if isinstance(r, Node) else r for r in results))
    return graph_module(gm, graph)


def _renamed(graph: Graph, old: Node, name: str) -> Node:
    """An input of that name in the place of another."""
    with graph.inserting_before(old):
        new = graph.placeholder(name)
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new


def _take_copies(graph: Graph) -> dict[Node, Node]:
    """What is copied into each input at the end of ``graph``; the copies are taken out of it."""
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
    """Copy the nodes of a part behind those of ``graph``; gives its results. ``known`` are nodes of
    the whole by name: what the part takes is there, and what it makes is added."""
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
    # A collective counts as used. Whose parameter is only updated, its gather is not made again.
    for node in reversed(again):
        if not node.users and node not in results:
            graph.erase_node(node)
    return results
