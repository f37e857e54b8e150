"""Writes to a graph's inputs, as regions; in a whole training step, the updates of parameters.

Functionalization turns a write to an input into a copy of a new value to that input. Inductor
writes the value there directly, if it sees the copy. So the copy is part of a region; and where
several inputs are updated one after the other, each update is a region, which is compiled once for
all parameters of a shape::

    clipped gradient ─┐
    momentum ─ times ─┴─ plus ─┬─ copy to momentum           one kernel, one region
    parameter ─ times ─────────┴─ minus ─ copy to parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import inf

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.executor.rematerialize import Facts, root_of

Run = list[Node]


def is_write_to_input(node: Node) -> bool:
    """Whether a node only copies a value to an input of the graph. Not if views of the input exist:
    a region that is given such a view, too, would not know that it is written to."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    target, value = node.args[:2]
    if not isinstance(value, Node) or not isinstance(target, Node) or target.op != "placeholder":
        return False
    return not any(_torch.is_view(user) or _torch.is_wait(user) for user in target.users)


def nodes_of_updates(graph: Graph) -> set[Node]:
    """Nodes that lead only to writes to inputs, and belong to no module. (The statistics of a norm
    belong to that norm, so they are not among them.)"""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        leads = bool(node.users) and all(user in found for user in node.users)
        is_call = node.op == "call_function" and _torch.module_path(node) is None
        if is_call and (leads or is_write_to_input(node)):
            found.add(node)
    return found


def moved_down(runs: Sequence[Node | Run], facts: Facts, updates: Set[Node]) -> list[Node | Run]:
    """``runs`` with nodes of updates moved down into the run that alone reads them, if they depend
    only on inputs of the graph: a momentum times its factor, say, that a plan has put in front of a
    wait. Such products would be stored until then, for all parameters at once.

    Args:
        runs: of a graph.
        facts: of the same graph.
        updates: the :func:`nodes_of_updates` of the graph.
    """
    found = [run if isinstance(run, Node) else list(run) for run in runs]
    at = {n: i for i, run in enumerate(found) for n in ([run] if isinstance(run, Node) else run)}
    written: dict[Node, float] = {}  # by value: the first run that writes to it
    for node in facts.writes & at.keys():
        for target in map(root_of, _torch.mutated_arguments(node)):
            written[target] = min(at[node], written.get(target, inf))
    sources = _sources((node for node in at if node in updates), facts)
    for node in reversed(sources):
        places = {at[user] for user in node.users}
        place = max(places)
        in_time = all(place <= written.get(source, inf) for source in sources[node])
        if len(places) == 1 and isinstance(found[place], list) and place > at[node] and in_time:
            at[node] = place
    moved: dict[int, Run] = {}
    for i, run in enumerate(found):
        for node in run if isinstance(run, list) else ():
            if at[node] != i:
                moved.setdefault(at[node], []).append(node)
    return [
        run
        if isinstance(run, Node)
        else [*moved.get(i, ()), *(node for node in run if at[node] == i)]
        for i, run in enumerate(found)
    ]


def _sources(nodes: Iterable[Node], facts: Facts) -> dict[Node, set[Node]]:
    """The elementwise loops and views that depend only on inputs of the graph, each with them."""
    found: dict[Node, set[Node]] = {}
    for node in nodes:
        loop, inputs = facts.loops.get(node), node.all_input_nodes
        is_cheap = node in facts.views or (loop is not None and loop.elementwise)
        is_given = all(n.op == "placeholder" or n in found for n in inputs)
        if is_cheap and is_given and not _torch.is_random(node):
            found[node] = set().union(*(found.get(n, {n}) for n in inputs))
    return found


def apart(run: Run, facts: Facts) -> list[Run]:
    """A run that updates inputs, cut into independent parts: none reads a value of another, or an
    input that another writes. Constants, which each part can repeat, come first, then numbers that
    several parts share. A run with an op that is random, or may do more than make a value, is not
    cut."""
    if not any(map(is_write_to_input, run)) or not all(_only_makes(n, facts) for n in run):
        return [run]
    constants = [node for node in run if node in facts.cheap and not node.all_input_nodes]
    others = [node for node in run if node.all_input_nodes or node not in facts.cheap]
    shared = _shared(others)
    front = [node for node in others if node in shared]
    parts = _joined([node for node in others if node not in shared])
    return [part for part in (constants, front, *parts) if part]


def _only_makes(node: Node, facts: Facts) -> bool:
    """Whether a node makes a value, the same each time, or copies one to an input."""
    if _torch.is_random(node):
        return False
    known = node in facts.loops or node in facts.views or is_write_to_input(node)
    return known or _torch.is_pure_python(node) or _torch.multiplies_matrices(node)


def _shared(run: Run) -> set[Node]:
    """Numbers that several parts of a run read, as a factor that clips all gradients, and the nodes
    that they are made of. Empty if one of these reads an input that the run writes."""
    numbers = {node for node in run if _is_number(node)}
    parts = _joined([node for node in run if node not in numbers])
    part_of = {node: i for i, part in enumerate(parts) for node in part}
    found = {n for n in numbers if len({part_of[u] for u in n.users if u in part_of}) > 1}
    here = set(run)
    left = list(found)
    while left:
        needed = {n for n in left.pop().all_input_nodes if n in here} - found
        found |= needed
        left += needed
    written = {node.args[0] for node in run if is_write_to_input(node)}
    return set() if any(written.intersection(n.all_input_nodes) for n in found) else found


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _joined(run: Run) -> list[Run]:
    """The parts of a run, in order: none reads a value of another, or an input another writes."""
    written = {node.args[0]: node for node in run if is_write_to_input(node)}
    joined = {node: node for node in run}

    def part_of(node: Node) -> Node:
        while joined[node] is not node:
            joined[node] = node = joined[joined[node]]
        return node

    for node in run:
        for source in node.all_input_nodes:
            if (other := written.get(source, source)) in joined:
                joined[part_of(other)] = part_of(node)
    parts: dict[Node, Run] = {}
    for node in run:
        parts.setdefault(part_of(node), []).append(node)
    return list(parts.values())
