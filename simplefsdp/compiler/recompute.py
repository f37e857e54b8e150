"""``reshard_after_forward``: which gathers the backward graph does again.

A pass over the joint graph, before it is split into forward and backward. The full parameter and
every view or cast of it form a *gather chain*; a chain is tagged for recomputation (so that the
partitioner saves only the shard) or its wait is tagged to be saved. Chains are found by
provenance, so collectives of tensor parallelism are never touched, and tagged alike whether or
not the user checkpoints activations too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes.adapters._torch import is_random, is_view, is_wait, layout_text
from inductor_passes.adapters.loops import is_on_cpu
from simplefsdp import provenance

# The partitioner saves a recomputed node that feeds a checkpoint region of a *higher* id, taking
# it for the boundary between two regions. No region of the user's has an id this high.
_LAST_AC_GRAPH_ID = 1 << 30

_GATHERS = {torch.ops._c10d_functional.all_gather_into_tensor.default}
# Operators that copy, with the place of the argument that they copy.
_COPIES = {
    torch.ops.aten.clone.default: 0,
    torch.ops.aten._to_copy.default: 0,
    torch.ops.prims.convert_element_type.default: 0,
    torch.ops.aten.copy.default: 1,
}


def tag_for_recompute(graph: Graph) -> None:
    """The joint-graph pass: tag which parts of the forward the backward recomputes."""
    save_what_reads_written_inputs(graph)
    save_copies_of_inputs(graph)
    tag_in_one_graph(graph)


def tag_in_one_graph(graph: Graph) -> None:
    """As :func:`tag_for_recompute`, for a whole step in one graph: its writes to inputs come last,
    so that nothing read from inputs must be saved because of them."""
    save_cpu_random_ops(graph)
    tag_gather_chains(graph)


def tag_gather_chains(graph: Graph) -> None:
    """Tag the gather chains of a joint graph by their parameter's ``reshard_after_forward``."""
    chain_reshards: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        # Backward nodes may carry a copied mark, but only a true chain begins at a graph input; or
        # at the gather, where a class of tensors says what is sent (``tensor_class.py``).
        begins = node.target in _GATHERS or all(source.op == "placeholder" for source in sources)
        goes_on = any(source in chain_reshards for source in sources)
        if sources and (begins or goes_on) and provenance.gathered_fqn(node) is not None:
            chain_reshards[node] = provenance.reshards_after_forward(node)
        elif _is_view_or_cast(node) and sources[0] in chain_reshards:
            chain_reshards[node] = chain_reshards[sources[0]]
    kept = _parts_for_backward(graph, chain_reshards)
    for node, reshards in chain_reshards.items():
        if node in kept if reshards else is_wait(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif reshards:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _LAST_AC_GRAPH_ID


def _parts_for_backward(graph: Graph, chains: Mapping[Node, bool]) -> set[Node]:
    """The parts of full parameters (``post_forward.py``) that are kept for backward: of those that
    it reads, or that a region reads which the user has it recompute. And of those of one dimension,
    which take little: it may compute again the loop that a bias is in. An embedding's is not kept;
    if backward reads it after all, it is gathered from the shards."""
    parts = [n for n in chains if provenance.is_post_forward_part(n) and not _is_view(n)]
    if not parts:
        return set()
    behind = set[Node]()
    for node in graph.nodes:
        begins = node.op == "placeholder" and "tangents" in str(node.target)
        if begins or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)

    def is_read(node: Node) -> bool:
        return any(
            is_read(user) if user in chains else user in behind or "recompute" in user.meta
            for user in node.users
        )

    # A whole step tells by nothing in its graph, here, where its backward begins.
    return {part for part in parts if not behind or part.meta["val"].dim() < 2 or is_read(part)}


def save_what_reads_written_inputs(graph: Graph) -> None:
    """Keep, rather than recompute, what is made of inputs that the graph writes to, such as a
    counter in a buffer: when backward comes to it, the input has its new value. Torch itself (2.11
    to 2.15) recomputes it, and gives gradients that are wrong (pull request 197039, open)."""
    copy = torch.ops.aten.copy_.default
    targets = [write.args[0] for write in graph.find_nodes(op="call_function", target=copy)]
    left = [node for node in targets if isinstance(node, Node) and node.op == "placeholder"]
    while left:
        for user in left.pop().users:
            if _is_view(user):
                left.append(user)
            elif user.op == "call_function" and user.target is not copy:
                _must_save(user)


def save_copies_of_inputs(graph: Graph) -> None:
    """Keep the copies that the model makes of inputs: the inputs may be written to before backward,
    as the queue of a contrastive loss is. Inductor would remove such a copy as useless, and save
    the input instead. So each copy becomes a ``rev`` over no dimensions, which copies, too."""
    inputs = graph.find_nodes(op="placeholder")
    left = [node for node in inputs if "tangents" not in str(node.target)]
    if len(left) == len(inputs):  # there is no backward
        return
    while left:
        source = left.pop()
        for user in list(source.users):
            if provenance.gathered_fqn(user) is not None:
                continue  # a parameter: see written.py
            if _is_view(user):
                left.append(user)
            elif _is_copy(user, source):
                user.target, user.args, user.kwargs = torch.ops.prims.rev.default, (source, []), {}
                if "recompute" not in user.meta:  # else the user has said what becomes of it
                    _must_save(user)


def _is_copy(node: Node, source: Node) -> bool:
    """Whether a node copies ``source``, with the same layout, on the same device."""
    if node.target not in _COPIES or node.args[_COPIES[node.target]] is not source:
        return False
    new, old = node.meta["val"], source.meta["val"]
    return [layout_text(new), new.device] == [layout_text(old), old.device]


def save_cpu_random_ops(graph: Graph) -> None:
    """Keep, rather than recompute, the random CPU ops of regions that the user checkpoints;
    attention counts as one, for its dropout. To recompute one, torch 2.12 and 2.13 stash the state
    of the CPU's generator where the forward graph's output order has the mesh of a DTensor, and
    fail ("expected all tensors_saved_with_vc_check to be Tensors")."""
    for node in graph.nodes:
        if is_random(node) and "recompute" in node.meta and is_on_cpu(node):
            _must_save(node)


def _must_save(node: Node) -> None:
    """Tag ``node`` to be saved, and nodes that take one of its results."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for user in node.users:
        if user.target is operator.getitem:
            _must_save(user)


def _is_view_or_cast(node: Node) -> bool:
    return len(node.all_input_nodes) == 1 and (_is_view(node) or node.target in _COPIES)


def _is_view(node: Node) -> bool:
    """Whether a node is a view, or takes one of several results."""
    return node.target is operator.getitem or is_view(node)
