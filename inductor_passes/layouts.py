"""How the members of a bucket travel together: the nodes that a merge writes into an FX graph.

*coalesced*: one call that takes and returns lists. Nothing is copied; the backend sends the
tensors back to back.

*flat*: one buffer. Members are copied in (a cast before is fused with the copy), sent in one
piece and copied out; reduced shards are views of the result.

Each rank's part of a gathered or scattered tensor lies together on the wire, so the flat buffer
is ``[ranks, elements of all members per rank]``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from inductor_passes import _torch
from inductor_passes.fx import Reading, mark, place
from inductor_passes.program import Bucket, Program

BucketLayout = Literal["coalesced", "flat"]

_aten, _ops = torch.ops.aten, torch.ops._c10d_functional
_COALESCED = {
    _ops.all_gather_into_tensor.default: _ops.all_gather_into_tensor_coalesced.default,
    _ops.reduce_scatter_tensor.default: _ops.reduce_scatter_tensor_coalesced.default,
    _ops.all_reduce.default: _ops.all_reduce_coalesced.default,
}


def write_buckets(
    graph: Graph, reading: Reading, merged: Program, buckets: Sequence[Bucket], layout: BucketLayout
) -> None:
    """Replace the collectives of each bucket by one, in the order of ``merged``.

    Args:
        graph: changed in place.
        reading: of ``graph``.
        merged: :func:`inductor_passes.merge.merge` of the reading and the buckets.
        buckets: each is marked on its start, those of one member too.
        layout: see the module.
    """
    write = _write_flat if layout == "flat" else _write_coalesced
    program = reading.program
    # What stands in the place of an op: for a start the nodes that launch, for a wait those
    # that hand out what arrived.
    instead: dict[str, list[Node]] = {}
    for bucket in buckets:
        starts = [reading.nodes[name][0] for name in bucket.starts]
        if len(starts) > 1:
            waits = [
                reading.nodes[program.ops[w].name][0]
                for name in bucket.starts
                for w in program.waits_of[program.index[name]]
            ]
            wait_names = [wait.name for wait in waits]
            # Erasing a node that others are inserted at would lose the place; the output stays.
            with graph.inserting_before(next(iter(reversed(graph.nodes)))):
                launch, arrive = write(graph, starts, waits)
            instead[bucket.starts[0]] = launch
            instead.update(_spread(wait_names, arrive, merged))
            starts = [n for n in launch if n.target is not operator.getitem][-1:]
        collective = merged.ops[merged.index[bucket.starts[0]]].collective
        for start in starts:
            mark(start, bucket.label, collective.fqns if collective else (), bucket.window)
    place(graph, [n for op in merged.ops for n in instead.get(op.name, reading.nodes[op.name])])


def _spread(
    wait_names: Sequence[str], arrive: Sequence[Node], merged: Program
) -> dict[str, list[Node]]:
    """The arrival of a bucket stands where the first of its waits stood."""
    first = min(wait_names, key=merged.index.__getitem__)
    return {name: list(arrive) if name == first else [] for name in wait_names}


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with _torch.fake_mode_of(node.all_input_nodes[0].meta["val"]):
        node.meta["val"] = target(*values)
    return node


def _erase(graph: Graph, nodes: Sequence[Node]) -> None:
    for node in nodes:
        graph.erase_node(node)


def _write_coalesced(
    graph: Graph, starts: list[Node], waits: list[Node]
) -> tuple[list[Node], list[Node]]:
    first = starts[0]
    inputs = [start.all_input_nodes[0] for start in starts]
    launch = _call(graph, _COALESCED[first.target], inputs, *first.args[1:])  # type: ignore[index]
    items = [_call(graph, operator.getitem, launch, i) for i in range(len(starts))]
    for item, wait in zip(items, waits, strict=True):
        wait.args = (item,)
    _erase(graph, starts)
    return [launch, *items], waits


def _write_flat(
    graph: Graph, starts: list[Node], waits: list[Node]
) -> tuple[list[Node], list[Node]]:
    first = starts[0]
    made: list[Node] = []

    def call(target: Any, *args: Any) -> Node:
        made.append(_call(graph, target, *args))
        return made[-1]

    inputs = [start.all_input_nodes[0] for start in starts]
    # Rows on the wire before and after: a gather makes of one row many, a reduce of many one.
    ranks_in, ranks_out = _rows(first)
    widths = [n.meta["val"].numel() // ranks_in for n in inputs]
    rows = [
        call(_aten.view.default, n, [ranks_in, width])
        for n, width in zip(inputs, widths, strict=True)
    ]
    flat = call(_aten.view.default, call(_aten.cat.default, rows, 1), [ranks_in * sum(widths)])
    call(first.target, flat, *first.args[1:])
    launch, made = made, []
    full = call(_aten.view.default, call(_torch.WAIT, launch[-1]), [ranks_out, sum(widths)])
    at = 0
    for start, wait, width in zip(starts, waits, widths, strict=True):
        shape = list(start.meta["val"].shape)
        part = call(_aten.slice.Tensor, full, 1, at, at + width)
        if ranks_out > 1:
            part = call(_aten.clone.default, part)
        out = call(_aten.view.default, part, shape)
        out.meta = {**wait.meta, "val": out.meta["val"]}
        wait.replace_all_uses_with(out)
        at += width
    _erase(graph, waits)
    _erase(graph, starts)
    return launch, made


def _rows(start: Node) -> tuple[int, int]:
    if start.target is _ops.all_reduce.default:
        return 1, 1
    ranks = next(a for a in start.args if isinstance(a, int))
    return (1, ranks) if start.target is _ops.all_gather_into_tensor.default else (ranks, 1)
