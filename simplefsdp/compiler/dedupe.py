"""One gather per parameter and graph, however often the model reads it.

Runs on the Dynamo graph, before autograd: with one gather left, autograd itself adds up the
gradients of all reads before the one reduce, as it would on a plain parameter. Gathers inside
``torch.utils.checkpoint`` regions are moved out in front of them; whether a gather is recomputed
in backward is decided for all of them alike, later (``recompute.py``).

A write to a gathered tensor is refused: it would change a temporary, not the parameter. Where a
model writes to a parameter itself (``for p in self.teacher.parameters(): p.lerp_(...)``), reads
before the write and reads after it have a gather each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from simplefsdp import _torch
from simplefsdp.frontend.gather import gather
from simplefsdp.frontend.gather_spec import GatherSpec, spec_of
from simplefsdp.frontend.living import living_shards

log = logging.getLogger("simplefsdp")


def dedupe_gathers(gm: GraphModule, inputs: Sequence[Any]) -> list[GatherSpec]:
    """Leave one gather per distinct parameter in ``gm``, in place; return their specs in order."""
    if copies := _torch.inline_repeated_calls(gm):
        log.debug("%d layers were not followed by Dynamo: they are like others", copies)
    known = {id(param): fqn for fqn, param in living_shards()}
    placeholders = gm.graph.find_nodes(op="placeholder")
    _name_gathers(
        gm,
        {
            node: known.get(id(value)) or _torch.input_name(node) or node.name
            for node, value in zip(placeholders, inputs, strict=True)
        },
    )
    _dedupe(gm)
    return specs_of(gm)


def _name_gathers(gm: GraphModule, fqns: Mapping[Node, str]) -> None:
    """Give each gather of ``gm``, and of the bodies that it calls, the name of its parameter."""
    for node in gm.graph.nodes:
        if node.target is gather and not node.args[1]:
            param, _, fields = node.args
            node.args = (param, fqns.get(param, ""), fields)  # type: ignore[arg-type]
        elif _torch.is_checkpoint_region(node):
            attribute, *operands = node.args
            body = getattr(gm, str(attribute.target))
            inner = body.graph.find_nodes(op="placeholder")
            named = zip(inner, operands, strict=False)
            _name_gathers(body, {a: fqns[b] for a, b in named if b in fqns})


def _dedupe(gm: GraphModule) -> dict[Node, _Read]:
    """Leave one of the gathers in ``gm`` that read alike; return what each gather left reads."""
    _refuse_writes(gm)
    for node in list(gm.graph.nodes):
        if _torch.is_checkpoint_region(node):
            _hoist_gathers(gm, node)
    reads = _lift_out_of_no_grad(gm)
    first: dict[tuple[object, ...], Node] = {}
    for node in gathers_of(gm):
        kept = first.setdefault((*node.args, reads[node]), node)
        if kept is not node:
            if "until" in node.kwargs:  # a read under no_grad has no "until"
                kept.kwargs = node.kwargs
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
    gm.recompile()
    return {node: reads[node] for node in first.values()}


def reduce_in_second_group(gm: GraphModule) -> None:
    """Have gradients reduced on communicators of their own, so that they travel beside the gathers.
    The ranks of a group make its second communicator together when it is first needed."""
    for node in gathers_of(gm):
        spec = spec_of(node)
        if spec.shard_group:
            spec = spec._replace(reduce_group=_torch.second_group(spec.shard_group))
            node.args = (node.args[0], *spec.arguments())
    gm.recompile()


def _refuse_writes(gm: GraphModule) -> None:
    """Raise if the model writes to a gathered tensor, or to a view of one, by whatever operator:
    Dynamo ran each node on fake tensors, whose version counters count writes."""
    fqn_of: dict[int | None, object] = {}
    for node in gathers_of(gm):  # gathers of layers that were traced as one share a storage
        fqn_of.setdefault(_torch.storage_of(node.meta.get("example_value")), node.args[1])
    fqn_of.pop(None, None)
    aliases: dict[Node, object] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" and _torch.storage_of(value) in fqn_of:
            aliases[node] = fqn_of[_torch.storage_of(value)]
    _refuse_assigned_data(gm, aliases)
    for node, fqn in aliases.items():
        if node.meta["example_value"]._version:
            by = next((u for u in gm.graph.nodes if _writes(u, fqn, aliases)), node)
            raise ValueError(
                f"{fqn}: {_name_of(by)} in forward{_torch.line_of(by)} would change the gathered "
                "copy, not the parameter; update parameters outside the model, through "
                "named_parameters()"
            )


def _refuse_assigned_data(gm: GraphModule, aliases: Mapping[Node, object]) -> None:
    """Raise if the graph ends at ``weight.data = ...`` and hands a gathered tensor to that line."""
    cut = _torch.graph_break_of(gm)
    output = gm.graph.output_node()
    fqn = next((aliases[n] for n in output.all_input_nodes if n in aliases), None)
    if cut is not None and _torch.assigns_data(cut) and fqn is not None:
        where = f" ({cut.stack[-1].filename}:{cut.stack[-1].lineno})" if cut.stack else ""
        raise ValueError(
            f"{fqn}: assigning to .data in forward{where} would change the gathered copy, not the "
            "parameter; update parameters outside the model, through named_parameters()"
        )


def _writes(node: Node, fqn: object, aliases: Mapping[Node, object]) -> bool:
    """Whether ``node`` looks like the one that writes to the gathered ``fqn``."""
    name = _name_of(node).removesuffix("()")
    in_place = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    renormalises = any(v is not None for k, v in node.kwargs.items() if k == "max_norm")
    operand = next((a for a in node.args if isinstance(a, Node) and a in aliases), None)
    return (in_place or renormalises) and operand is not None and aliases[operand] == fqn


def _name_of(node: Node) -> str:
    return f"{getattr(node.target, '__name__', node.target)}()"


def gathers_of(gm: GraphModule) -> list[Node]:
    """The gathers of a Dynamo graph, outside of checkpointed regions."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target is gather]


def specs_of(gm: GraphModule) -> list[GatherSpec]:
    """The specs of the gathers of a Dynamo graph, outside of checkpointed regions, in order."""
    return [spec_of(node) for node in gathers_of(gm)]


class _Read(NamedTuple):
    """What a gather reads, and how: gathers of one parameter that read alike are one."""

    writes: int  # how many writes to the parameter may have come before it
    without_grad: bool  # it stays inside a no_grad block


def _lift_out_of_no_grad(gm: GraphModule) -> dict[Node, _Read]:
    """Move gathers out of no_grad blocks, in front of them: reads behind the block share the
    gather, and want its gradient. A gather stays where the block writes to the parameter before it.
    Return what each gather reads."""
    found: dict[Node, _Read] = {}
    shard_of = {node: _shards(node.args[0]) for node in gathers_of(gm)}
    known = set[int]().union(*shard_of.values())
    written, then = Counter[int](), Counter[int]()
    block: Node | None = None
    writes_of = _may_write(gm, known)
    for node in list(gm.graph.nodes):
        if _torch.sets_grad_mode(node):
            block = node if node.args == (False,) and block is None else None
            then = written.copy()
        elif node in shard_of:
            writes = sum(written[shard] for shard in shard_of[node])
            stays = block is not None and writes > sum(then[shard] for shard in shard_of[node])
            found[node] = _Read(writes, stays)
            if block is not None and not stays:
                block.prepend(node)
        else:
            written.update(writes_of[node])
    return found


def _may_write(
    gm: GraphModule, known: Set[int], given: Sequence[Set[int]] = ()
) -> dict[Node, set[int]]:
    """For each node, to which of the ``known`` storages it may write. A node that takes views of
    shards may write to them, unless it only makes another view of them. (If it only reads them,
    that costs one more gather at worst.)

    Args:
        gm: a graph, or the body of a region.
        known: storages of shards.
        given: for a body, the storages that each of its operands is a view of.
    """
    found: dict[Node, set[int]] = {}
    # What each node is a view of; a gathered tensor is none, though it may share a shard's storage.
    views: dict[Node, set[int]] = {}
    views_of_input = dict(zip(gm.graph.find_nodes(op="placeholder"), given, strict=False))
    for node in gm.graph.nodes:
        taken = set[int]().union(*(views[n] for n in node.all_input_nodes))
        views[node], found[node] = set(), set()
        if node.op in ("placeholder", "get_attr"):
            views[node] = set(views_of_input.get(node, _shards(node) & known))
        elif _torch.is_checkpoint_region(node):
            body_attr, *operands = node.args
            body = getattr(gm, str(body_attr.target))
            are_views = [views[n] if isinstance(n, Node) else set() for n in operands]
            found[node].update(*_may_write(body, known, are_views).values())
        elif taken and node.op != "output" and node.target is not gather:
            views[node] = taken & _shards(node)
            found[node] = taken if _in_place(node) or not views[node] else set()
    return found


def _in_place(node: Node) -> bool:
    """Whether a node returns one of its inputs itself, or looks like an in-place operator."""
    value = node.meta.get("example_value")
    is_itself = any(value is n.meta.get("example_value") for n in node.all_input_nodes)
    is_mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    return is_itself or is_mutable or _name_of(node).removesuffix("()").endswith("_")


def _shards(node: object) -> set[int]:
    """The storages of a node's values; for a DTensor, the storage of its shard."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {n for n in map(_torch.shard_storage_of, values) if n is not None}


def _hoist_gathers(gm: GraphModule, region: Node) -> None:
    """Gather in front of ``region``, a checkpointed call, and pass it the full parameters."""
    body_attr, *operands = region.args
    if not isinstance(body_attr, Node) or len(body_attr.users) > 1:
        return
    body = getattr(gm, str(body_attr.target))
    for inner, read in _dedupe(body).items():
        if read.writes:
            raise ValueError(
                f"{inner.args[1]}: a part of the model that is checkpointed writes to it, and then "
                "reads it: backward would write to it once more; write to it in front of "
                "torch.utils.checkpoint"
            )
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    operand_of = dict(zip(placeholders, operands, strict=False))
    for inner in gathers_of(body):
        param = operand_of.get(inner.args[0])
        if not isinstance(param, Node):
            continue
        with gm.graph.inserting_before(region):
            deferral = {key: operand_of.get(v, v) for key, v in inner.kwargs.items()}
            outer = gm.graph.call_function(gather, (param, *inner.args[1:]), deferral)
        outer.meta = inner.meta.copy()
        with body.graph.inserting_after(placeholders[-1]):
            full = body.graph.placeholder(f"full_{inner.name}")
        full.meta = inner.meta.copy()
        placeholders.append(full)
        inner.replace_all_uses_with(full)
        body.graph.erase_node(inner)
        region.args = (*region.args, outer)
    body.recompile()
