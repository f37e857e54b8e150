"""How the members of a bucket travel together: the nodes that a merge writes into an FX graph.

*coalesced*: one call that takes and returns lists. Nothing is copied; the backend sends the
tensors back to back.

*flat*: one buffer. Members are copied in (a cast before is fused with the copy), sent in one
piece and copied out; reduced shards are views of the result.

*packed*: some members share a buffer, which is one tensor of a coalesced call.

Each rank's part of a gathered or scattered tensor lies together on the wire, so the flat buffer
is ``[ranks, elements of all members per rank]``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters.copies import (
    Calls,
    cast_together,
    copied_in,
    copied_out,
    erase_unused,
)
from inductor_passes.adapters.fx import KIND_OF, Reading, mark, place
from inductor_passes.ir.program import Bucket, Collective, Program

BucketLayout = Literal["coalesced", "flat"]

# Gives the places of those members of a coalesced bucket that share a buffer.
Packs = Callable[[Sequence[Collective]], Collection[int]]

_ops = torch.ops._c10d_functional
_COALESCED = {
    _ops.all_gather_into_tensor.default: _ops.all_gather_into_tensor_coalesced.default,
    _ops.reduce_scatter_tensor.default: _ops.reduce_scatter_tensor_coalesced.default,
    _ops.all_reduce.default: _ops.all_reduce_coalesced.default,
}


def write_buckets(
    graph: Graph,
    reading: Reading,
    merged: Program,
    buckets: Sequence[Bucket],
    layout: BucketLayout,
    packs: Packs = lambda members: (),
) -> None:
    """Replace the collectives of each bucket by one, in the order of ``merged``.

    Args:
        graph: changed in place.
        reading: of ``graph``.
        merged: :func:`inductor_passes.transform.merge.merge` of the reading and the buckets.
        buckets: each is marked on its start, those of one member too.
        layout: see the module.
        packs: which members of a coalesced bucket share a buffer.
    """
    program = reading.program
    # What stands in the place of an op: for a start the nodes that launch, for a wait those
    # that hand out what arrived; for what was only copied from, nothing.
    instead: dict[str, list[Node]] = {}
    arrivals: defaultdict[str, list[Node]] = defaultdict(list)  # nodes to place before each op
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for op in merged.ops:
        for name in op.reads:
            readers[name].append(op.name)
    for bucket in buckets:
        starts = [reading.nodes[name][0] for name in bucket.starts]
        if len(starts) > 1:
            waits = [
                reading.nodes[program.ops[w].name][0]
                for name in bucket.starts
                for w in program.waits_of[program.index[name]]
            ]
            wait_names = [wait.name for wait in waits]
            sent = [program.sent[name] for name in bucket.starts]
            together = range(len(starts)) if layout == "flat" else sorted(packs(sent))
            inputs = _inputs(starts)
            # Erasing a node that others are inserted at would lose the place; the output stays.
            with graph.inserting_before(graph.output_node()):
                launch, arrive = _write(graph, starts, waits, together)
            instead.update((name, []) for name in erase_unused(graph, inputs))
            instead[bucket.starts[0]] = launch
            at, views = _arrival(merged.index[bucket.starts[0]], merged, readers)
            instead.update((name, []) for name in (*wait_names, *views))
            arrivals[at] += [*arrive, *(n for name in views for n in reading.nodes[name])]
            starts = [n for n in launch if _torch.is_collective_start(n)]
        fqns = merged.sent[bucket.starts[0]].fqns
        for start in starts:
            mark(start, bucket.label, fqns, bucket.window)
    place(
        graph,
        [
            node
            for op in merged.ops
            for node in (*arrivals[op.name], *instead.get(op.name, reading.nodes[op.name]))
        ],
    )


def _arrival(
    start: int, merged: Program, readers: Mapping[str, Sequence[str]]
) -> tuple[str, list[str]]:
    """The op before which a bucket is waited for and copied out, and the views that come with it.

    It is the first op, other than a view, that reads a member. It is not the first wait: a
    recomputed region gathers all of its parameters where it begins, so the copy out of the bucket,
    which counts as their first use, would be made there. Only where what is sent or received is
    written in place, it is the first wait.
    """
    op, waits = merged.ops[start], [merged.ops[i] for i in merged.waits_of[start]]
    first_wait = waits[0].name
    if merged.storages((*op.reads, *op.writes)) & merged.in_place:
        return first_wait, []
    views: list[str] = []
    used: list[str] = []
    arrived = [name for wait in waits for name in wait.writes]
    while arrived:
        for name in readers.get(arrived.pop(), ()):
            op = merged.ops[merged.index[name]]
            if op.kind != "view":
                used.append(name)
            elif name not in views:
                views.append(name)
                arrived += op.writes
    if not used:
        return first_wait, []
    at = min(used, key=merged.index.__getitem__)
    before = merged.index[at]
    return at, sorted((v for v in views if merged.index[v] < before), key=merged.index.__getitem__)


def _write(
    graph: Graph, starts: Sequence[Node], waits: Sequence[Node], together: Collection[int]
) -> tuple[list[Node], list[Node]]:
    """The nodes that launch all members, those ``together`` in one buffer; and those that wait for
    the members and hand them out."""
    together = together if len(together) > 1 else ()
    shared = [starts[i] for i in together]
    alone = [start for i, start in enumerate(starts) if i not in together]
    # Rows on the wire before and after: a gather makes of one row many, a reduce of many one.
    ranks_in, ranks_out = _rows(starts[0])
    launch, arrive = Calls(graph), Calls(graph)
    if KIND_OF[starts[0].target] == "gather":
        rest, buffer = cast_together(launch, _inputs(alone), _inputs(shared))
    else:
        rest = _inputs(alone)
        buffer = [copied_in(launch, _inputs(shared), ranks_in)] if shared else []
    received = _launch(launch, starts[0], [*buffer, *rest])
    if shared:
        shapes = [start.meta["val"].shape for start in shared]
        full = arrive(_torch.WAIT, received.pop(0))
        parts = copied_out(arrive, full, ranks_out, shapes)
        for i, part in zip(together, parts, strict=True):
            part.meta = {**waits[i].meta, "val": part.meta["val"]}
            waits[i].replace_all_uses_with(part)
            graph.erase_node(waits[i])
    left = [wait for i, wait in enumerate(waits) if i not in together]
    for item, wait in zip(received, left, strict=True):
        wait.args = (item,)
    for start in starts:
        graph.erase_node(start)
    return launch.made, [*arrive.made, *left]


def _inputs(starts: Sequence[Node]) -> list[Node]:
    return [start.all_input_nodes[0] for start in starts]


def _launch(call: Calls, like: Node, sent: list[Node]) -> list[Node]:
    """Send tensors as ``like`` sends one; returns what arrives of each."""
    if len(sent) == 1:
        return [call(like.target, sent[0], *like.args[1:])]
    start = call(_COALESCED[like.target], sent, *like.args[1:])  # type: ignore[index]
    return [call(operator.getitem, start, i) for i in range(len(sent))]


def _rows(start: Node) -> tuple[int, int]:
    if start.target is _ops.all_reduce.default:
        return 1, 1
    ranks = next(a for a in start.args if isinstance(a, int))
    return (1, ranks) if start.target is _ops.all_gather_into_tensor.default else (ranks, 1)
