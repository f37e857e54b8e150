"""Cut an ordered graph into regions, which are compiled once for all that are alike.

Launches and waits stay where the plan has put them, as calls of a straight-line program; the
computes between two of them are a region. Layers that compute the same are one structure: the
126th layer runs the code of the first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from inductor_passes.adapters import _torch
from inductor_passes.adapters.fx import piece_of, place_of
from inductor_passes.adapters.submodules import attribute_of, is_submodule, submodule_text
from inductor_passes.adapters.units import Piece
from inductor_passes.executor.rematerialize import Facts, live, made_again, moved_up
from inductor_passes.executor.updates import apart, is_write_to_input, moved_down, nodes_of_updates


class Region(NamedTuple):
    """Computes that are compiled together."""

    # In an order that does not depend on the plan; first nodes that other pieces compute, too.
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]  # values from outside, in the order of their first use
    outputs: tuple[Node, ...]  # nodes whose values are used outside


def cut(graph: Graph) -> list[Node | Region]:
    """What runs one after the other: nodes that are called as they are, and regions."""
    facts = Facts(graph)
    pieces: list[Node | list[Node]] = []
    updates = nodes_of_updates(graph)
    for run in moved_down(_runs(graph, updates), facts, updates):
        parts = [run] if isinstance(run, Node) else apart(run, facts)
        for part in parts:
            pieces += [part] if isinstance(part, Node) else _without_views_of_others(part)
    return _needed(graph, moved_up(pieces, facts), facts)


def _runs(graph: Graph, updates: Set[Node]) -> list[Node | list[Node]]:
    """Each launch, wait and op that writes in place by itself; between these, runs of the computes
    of one stretch, or of updates, with copies to inputs."""
    items = list(_items_behind_their_sources(graph))
    alone = {node for node in items if _is_alone(node)}
    stretches = _stretches(items, updates, alone)
    runs: list[Node | list[Node]] = []
    open_run: list[Node] | None = None
    stretch: object = None
    for node in items:
        if node in alone:
            runs.append(node)
            open_run = None
            continue
        own = _stretch_of(node, stretches, updates)
        if open_run is None or (own is not None and stretch is not None and own != stretch):
            open_run, stretch = [], None
            runs.append(open_run)
        open_run.append(node)
        stretch = own if own is not None else stretch
    return runs


def _stretch_of(node: Node, stretches: Mapping[Piece | None, object], updates: Set[Node]) -> object:
    """The stretch that a node must run in; None if it may run in any."""
    if _is_free(node):
        return None
    if node in updates:
        return "updates"
    return None if is_write_to_input(node) else stretches.get(piece_of(node), "none")


def _stretches(
    items: Sequence[Node], updates: Set[Node], alone: Set[Node]
) -> dict[Piece | None, tuple[int, int]]:
    """For each piece of a layer, the stretch of its half that it runs in.

    A half is cut before a piece if a launch, wait or write in place stands there in any half with
    the same pieces. So halves that are alike are cut alike, wherever launches and waits are.
    """
    others = [n in alone or n in updates or _is_free(n) or is_write_to_input(n) for n in items]
    pieces = [None if other else piece_of(n) for n, other in zip(items, others, strict=True)]
    of_half: dict[int, list[int]] = {}
    for piece in dict.fromkeys(pieces):
        if piece is not None:
            of_half.setdefault(piece.half, []).append(piece.at)
    cuts: set[tuple[tuple[int, ...], int]] = set()
    last, interrupted = None, False
    for node, piece in zip(items, pieces, strict=True):
        interrupted = interrupted or node in alone
        if piece is None:
            continue
        if interrupted and last is not None and last.half == piece.half:
            cuts.add((tuple(of_half[piece.half]), piece.at))
        last, interrupted = piece, False
    return {
        Piece(half, at): (half, sum((tuple(ats), cut) in cuts for cut in ats if cut <= at))
        for half, ats in of_half.items()
        for at in ats
    }


def _items_behind_their_sources(graph: Graph) -> Iterator[Node]:
    """The calls of a graph, with each ``getitem`` directly behind the call whose results it takes
    from, so that nothing but tensors goes from one region to another."""
    for node in graph.nodes:
        if node.op == "call_function" and not _is_item(node):
            yield from _with_items(node)


def _with_items(node: Node) -> Iterator[Node]:
    """A call, and the ``getitem`` nodes that take from its results, or from each other."""
    left = [node]
    while left:
        yield (current := left.pop(0))
        left += [user for user in current.users if _is_item(user, of=current)]


def _is_item(node: Node, of: Node | None = None) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return node.args[0].op == "call_function" and of in (None, node.args[0])


def _is_alone(node: Node) -> bool:
    if _is_item(node):
        return _is_alone(node.args[0])  # type: ignore[arg-type]
    if _torch.is_collective_start(node) or _torch.is_wait(node):
        return True
    if is_write_to_input(node):
        return False
    return _torch.is_op(node) and bool(_torch.mutated_arguments(node))


def _is_free(node: Node) -> bool:
    """Whether a node costs no kernel: a view, or a function of numbers and containers."""
    return _torch.is_view(node) or _torch.is_pure_python(node) or _torch.is_lookup_of_seed(node)


def _without_views_of_others(run: Sequence[Node]) -> list[Node | list[Node]]:
    """A run as a list, behind single nodes: its views of values of other runs, if other runs need
    these views, too."""
    here = set(run)
    before: set[Node] = set()
    for node in run:
        if _is_free(node) and all(n not in here or n in before for n in node.all_input_nodes):
            before.add(node)
    for node in (node for node in reversed(run) if not _is_item(node)):
        own = set(_with_items(node))
        users = {user for item in own for user in item.users} - own
        only_here = all(user in here and user not in before for user in users)
        # A lookup of a seed stays before the run: with it, each layer would be another structure.
        if only_here and not _torch.is_lookup_of_seed(node):
            before -= own
    rest = [node for node in run if node not in before]
    return [*(node for node in run if node in before), rest]


def _is_worth_compiling(nodes: Sequence[Node]) -> bool:
    """Whether there is something to fuse (a node reads what another made), or a node that needs a
    compiler."""
    made: set[Node] = set()
    for node in nodes:
        if _torch.draws_from_seed(node):
            return True
        if not (_torch.is_op(node) or _torch.is_pure_python(node)):
            return True
        reads = any(n in made for n in node.all_input_nodes)
        if reads and not _is_free(node):
            return True
        if reads or not _is_free(node):
            made.add(node)
    return False


def _needed(graph: Graph, pieces: Sequence[Node | list[Node]], facts: Facts) -> list[Node | Region]:
    """The pieces with runs as regions, without nodes that all of their readers repeat.

    A run with nothing to fuse becomes single nodes: their kernels are as good as compiled code.
    """
    needed: set[Node] = set(graph.output_node().all_input_nodes)
    found: list[Node | Region] = []
    for piece in reversed(pieces):
        if isinstance(piece, Node):
            nodes = [piece] if piece in needed or piece not in facts.cheap else []
        else:
            nodes = live(piece, needed, facts)
        if isinstance(piece, list) and _is_worth_compiling(nodes):
            region = _region(nodes, needed, facts)
            needed.update(region.inputs)
            found.append(region)
        else:
            needed.update(n for node in nodes for n in node.all_input_nodes)
            found += reversed(nodes)
    return found[::-1]


def _region(nodes: Sequence[Node], needed: Set[Node], facts: Facts) -> Region:
    own = _in_place(nodes)
    again = _in_place(made_again(set(_inputs(own)), needed, facts.cheap))
    inputs = [node for node in _inputs([*again, *own]) if not is_submodule(node)]
    outputs = [node for node in own if node in needed]
    return Region((*again, *own), tuple(inputs), tuple(outputs))


def _in_place(nodes: Sequence[Node]) -> Sequence[Node]:
    """``nodes`` in the order that they had before the graph was planned, if all were there then."""
    if any(place_of(node) is None for node in nodes):
        return nodes
    return sorted(nodes, key=place_of)  # type: ignore[arg-type,type-var]


def _inputs(nodes: Sequence[Node]) -> list[Node]:
    """Nodes that ``nodes`` read and that are not among them, in the order of first use."""
    here = set(nodes)
    return list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in here))


def structure_of(region: Region) -> str:
    """A text, equal for regions that share code: operators, wiring, constants, layouts."""
    number = {n: i for i, n in enumerate((*region.inputs, *region.nodes))}

    def named(node: Node) -> Any:
        return _Name(f"%{number[node]}" if node in number else submodule_text(node))

    lines = [_torch.layout_text(node.meta["val"]) for node in region.inputs]
    lines += [
        f"{node.target} {map_arg((node.args, node.kwargs), named)!r} {_torch.is_stored(node)}"
        for node in region.nodes
    ]
    return "\n".join([*lines, repr([number[node] for node in region.outputs])])


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def graph_of(region: Region) -> GraphModule:
    """The region as a graph by itself."""
    root, graph = torch.nn.Module(), Graph()
    made: dict[Node, Node] = {}
    for node in region.inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = {"val": node.meta["val"]}

    def own(node: Node) -> Node:
        if node not in made:  # a submodule
            name = str(node.target).replace(".", "_")
            setattr(root, name, attribute_of(node))
            made[node] = graph.get_attr(name)
            made[node].meta = dict(node.meta)
        return made[node]

    for node in region.nodes:
        made[node] = graph.node_copy(node, own)
    output = graph.output(tuple(made[node] for node in region.outputs))
    output.meta["user_visible_output_idxs"] = list(range(len(region.outputs)))
    return GraphModule(root, graph)
