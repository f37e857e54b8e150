"""What a graph writes to its inputs, as regions: of a whole training step, a parameter's update.

Functionalization leaves a write to an input as a copy of what was made for it. Inductor writes
there at once, if it sees the copy. So the copy is part of a region; and where several inputs are
updated one after the other, each update is a region, which is compiled once for all parameters of a
shape::

    clipped gradient ─┐
    momentum ─ times ─┴─ plus ─┬─ copy to momentum           one kernel, one region
    parameter ─ times ─────────┴─ minus ─ copy to parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch.fx import Node

from inductor_passes.adapters import _torch
from inductor_passes.executor.rematerialize import Facts, root_of

Run = list[Node]


def is_write_to_input(node: Node) -> bool:
    """Whether a node only copies what the graph made to one of its inputs. Not if there are views
    of that: a region that is given one, too, does not know that it is written to."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    target, value = node.args[:2]
    if not isinstance(value, Node) or not isinstance(target, Node) or target.op != "placeholder":
        return False
    return not any(map(_torch.is_view, target.users))


def moved_down(runs: Sequence[Node | Run], facts: Facts) -> list[Node | Run]:
    """``runs`` with that moved into an update which only it reads, and which takes nothing but
    inputs: a momentum times its factor, say, that a plan has put in front of a wait. It would be
    stored till then, of all parameters."""
    found = [run if isinstance(run, Node) else list(run) for run in runs]
    at = {n: i for i, run in enumerate(found) for n in ([run] if isinstance(run, Node) else run)}
    updates = {at[n] for n in at if is_write_to_input(n) and isinstance(found[at[n]], list)}
    written: dict[Node, float] = {}  # the first place
    for node in facts.writes & at.keys():
        for target in map(root_of, _torch.mutated_arguments(node)):
            written[target] = min(at[node], written.get(target, inf))
    sources = _sources(at, facts)
    for node in reversed(sources):
        places = {at.get(user, -1) for user in node.users}
        place = max(places, default=-1)
        in_time = all(place <= written.get(source, inf) for source in sources[node])
        if len(places) == 1 and place in updates and place > at[node] and in_time:
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
    """The loops and views that take nothing but inputs of the graph, with these inputs."""
    found: dict[Node, set[Node]] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        is_loop = node in facts.loops or node in facts.views
        is_given = all(n.op == "placeholder" or n in found for n in inputs)
        if is_loop and is_given and not _torch.draws_from_seed(node):
            found[node] = set().union(*(found.get(n, {n}) for n in inputs))
    return found


def apart(run: Run, facts: Facts) -> list[Run]:
    """A run that updates inputs, cut into what has nothing to do with each other; constants, which
    each can make for itself, first. What reads an input has to do with what writes there."""
    if not any(map(is_write_to_input, run)):
        return [run]
    constants = [node for node in run if node in facts.cheap and not node.all_input_nodes]
    others = [node for node in run if node.all_input_nodes or node not in facts.cheap]
    written = {node.args[0]: node for node in run if is_write_to_input(node)}
    joined = {node: node for node in others}

    def part_of(node: Node) -> Node:
        while joined[node] is not node:
            joined[node] = node = joined[joined[node]]
        return node

    for node in others:
        for source in node.all_input_nodes:
            if (other := written.get(source, source)) in joined:
                joined[part_of(other)] = part_of(node)
    parts: dict[Node, Run] = {}
    for node in others:
        parts.setdefault(part_of(node), []).append(node)
    return [constants, *parts.values()] if constants else list(parts.values())
