"""One gather per parameter and graph, however often the model reads it.

Runs on the Dynamo graph, before autograd: with one gather left, autograd itself adds up the
gradients of all reads before the one reduce, as it would on a plain parameter. Gathers inside
``torch.utils.checkpoint`` regions are moved out in front of them; whether a gather is recomputed
in backward is decided for all of them alike, later (``recompute.py``).
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from simplefsdp._torch import is_checkpoint_region
from simplefsdp.gather import gather


def dedupe_gathers(gm: GraphModule) -> None:
    """Leave one gather per distinct parameter in ``gm``, in place."""
    for node in list(gm.graph.nodes):
        if is_checkpoint_region(node):
            _hoist_gathers(gm, node)
    first: dict[tuple[object, ...], Node] = {}
    for node in _gathers(gm):
        kept = first.setdefault(node.args, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
    gm.recompile()


def _gathers(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target is gather]


def _hoist_gathers(gm: GraphModule, region: Node) -> None:
    """Gather in front of ``region``, a checkpointed call, and pass it the full parameters."""
    body_attr, *operands = region.args
    if not isinstance(body_attr, Node) or len(body_attr.users) > 1:
        return
    body = getattr(gm, str(body_attr.target))
    dedupe_gathers(body)
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    operand_of = dict(zip(placeholders, operands, strict=False))
    for inner in _gathers(body):
        param = operand_of.get(inner.args[0])
        if not isinstance(param, Node):
            continue
        with gm.graph.inserting_before(region):
            outer = gm.graph.call_function(gather, (param, *inner.args[1:]))
        outer.meta = inner.meta.copy()
        with body.graph.inserting_after(placeholders[-1]):
            full = body.graph.placeholder(f"full_{inner.name}")
        full.meta = inner.meta.copy()
        placeholders.append(full)
        inner.replace_all_uses_with(full)
        body.graph.erase_node(inner)
        region.args = (*region.args, outer)
    body.recompile()
