"""Values that regions compute again where they are read, rather than handing them on.

Inductor fuses a loop with those that read its result, wherever they stand in a graph. With a cut
between them the result would be written, kept while collectives run, and read: ``silu`` in fp32 in
SwiGLU's backward, for example. So a region repeats loops whose inputs take fewer bytes than their
results do, or are handed to it anyway::

    g --> silu --> h |cut| silu --> gradient        g --> silu --> h |cut| g --> silu --> gradient

Before that, loops are moved up into the run that makes what they read, if no more bytes are handed
on then: see :func:`moved_up`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters.loops import loop_of, nbytes_of

_aten = torch.ops.aten
_CONSTANTS = {_aten.full.default, torch.ops.prims.iota.default}
MOST = 16  # nodes that are repeated for one value, at most


class _Made(NamedTuple):
    """How a value comes to be in a region."""

    again: frozenset[Node]  # nodes that are repeated there; none if the value is handed to it
    given: frozenset[Node]  # values that are handed to it instead

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.given))


class Facts:
    """What this module needs to know of the nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self.writes = {node for node in calls if _torch.mutated_arguments(node)}
        single = [
            node
            for node in calls
            if isinstance(node.meta.get("val"), torch.Tensor) and node not in self.writes
        ]
        # Loops, of one result, that Inductor can fuse, and views.
        self.loops = {node: loop for node in single if (loop := loop_of(node)) is not None}
        self.views = {node for node in single if _torch.is_view(node)}
        self.roots: dict[Node, Node] = {}  # what :func:`root_of` has found
        # Values that are written to in place, directly or through a view.
        self.written = {self.root(n) for w in self.writes for n in _torch.mutated_arguments(w)}
        # What may be repeated: constants, views, and elementwise loops of few instructions; but
        # nothing that is, or reads, a value that is written to in place.
        self.cheap = {n for n in single if self._is_cheap(n) and not self.is_written(n)}

    def _is_cheap(self, node: Node) -> bool:
        loop = self.loops.get(node)
        if loop is not None and loop.elementwise and not loop.heavy:
            return True
        is_constant = node.target in _CONSTANTS and not node.all_input_nodes
        return is_constant or node in self.views

    def is_written(self, *nodes: Node) -> bool:
        """Whether one of ``nodes`` is, or reads, a value that is written to in place."""
        return bool(self.written) and any(
            self.root(n) in self.written for node in nodes for n in (node, *node.all_input_nodes)
        )

    def root(self, node: Node) -> Node:
        """See :func:`root_of`."""
        if node not in self.roots:
            self.roots[node] = root_of(node)
        return self.roots[node]

    def is_kernel(self, node: Node) -> bool:
        """Whether a node is an op by itself, such as a matrix product."""
        others = node in self.loops or node in self.views or node in self.writes
        return _torch.is_op(node) and not others


def moved_up(pieces: Sequence[Node | list[Node]], facts: Facts) -> list[Node | list[Node]]:
    """``pieces`` with loops moved up into the run that makes what they read, if their results take
    no more bytes than the values that need not be handed on any more::

        grad --> a |cut| a --> b --> product            grad --> a --> b |cut| b --> product
    """
    found = [piece if isinstance(piece, Node) else list(piece) for piece in pieces]
    at = {n: i for i, p in enumerate(pieces) for n in ([p] if isinstance(p, Node) else p)}
    for i, piece in enumerate(pieces):
        # Only out of runs with a kernel, which stays: else all that hides a collective might go.
        if isinstance(piece, Node) or not any(map(facts.is_kernel, piece)):
            continue
        for group in _groups(piece, facts):
            target = _where(group, at, facts)
            own, run = found[i], found[target]
            if target < i and isinstance(own, list) and isinstance(run, list):
                run += group
                found[i] = [node for node in own if node not in group]
                at |= dict.fromkeys(group, target)
    return found


def _groups(run: Iterable[Node], facts: Facts) -> list[list[Node]]:
    """The loops of a run that read one another, with the views between and behind them."""
    group_of: dict[Node, list[Node]] = {}
    for node in run:
        if node not in facts.loops and node not in facts.views:
            continue
        own = [node]
        for other in {id(g): g for n in node.all_input_nodes if (g := group_of.get(n))}.values():
            own = [*other, *own]
        group_of |= dict.fromkeys(own, own)
    groups = {id(group): group for group in group_of.values()}.values()
    return [g for g in groups if not any(map(_torch.draws_from_seed, g))]


def _where(group: Sequence[Node], at: Mapping[Node, int], facts: Facts) -> int:
    """The piece that a group is best in: its own, or the one that makes what it reads."""
    own, members = at[group[0]], set(group)
    inputs = {n for node in group for n in node.all_input_nodes} - members
    target = max((at.get(n, -1) for n in inputs), default=own)
    made_there = [n for n in inputs if at.get(n) == target]
    if target < 0 or facts.is_written(*group):
        return own
    if any(facts.root(n) not in facts.loops for n in made_there):
        return own
    made = [node for node in group if not members.issuperset(node.users)]
    ends = [n for n in inputs if all(at.get(u, own) <= target or u in members for u in n.users)]
    # Inputs of the graph do not count as freed, because the caller may keep them.
    freed = sum(
        min(nbytes_of(n), nbytes_of(facts.root(n))) for n in ends if n.op == "call_function"
    )
    return target if sum(map(nbytes_of, made)) <= freed else own


def made_again(inputs: Set[Node], needed: Set[Node], cheap: Set[Node]) -> list[Node]:
    """The ``cheap`` nodes that a region repeats, in the order of the graph, so that fewer bytes of
    its ``inputs`` are handed to it. An input that is ``needed`` later, too, is live anyway: it is
    repeated only from values that are handed to the region anyway."""
    there = set(inputs)  # values that are handed to the region, or repeated in it
    again: set[Node] = set()
    known = -1
    while known < len(again):  # a value that is handed over for one node can make others cheaper
        known = len(again)
        for node in sorted((inputs & cheap) - again):
            made = _made(node, there - {node}, cheap, {}, MOST)
            if node in needed and made.given:
                continue
            again |= made.again
            there |= made.again | made.given
    return sorted(again)


def _made(
    node: Node, there: Set[Node], cheap: Set[Node], known: dict[Node, _Made], most: int
) -> _Made:
    """How a region gets ``node``, handed over or repeated, if it is to be handed the fewest bytes
    beside what is ``there``."""
    if node in there:
        return _Made(frozenset(), frozenset())
    if node not in known:
        known[node] = handed = _Made(frozenset(), frozenset({node}))
        if most and node in cheap:
            inputs = [_made(n, there, cheap, known, most - 1) for n in node.all_input_nodes]
            again = frozenset({node}).union(*(made.again for made in inputs))
            made = _Made(again, frozenset().union(*(made.given for made in inputs)))
            if made.nbytes < handed.nbytes and len(again) <= MOST:
                known[node] = made
    return known[node]


def root_of(node: Node) -> Node:
    """The node that made the memory of ``node``, which may be a view of it, one of its parts, a
    wait for it, or a write to it."""
    while node.op == "call_function":
        same = _torch.is_view(node) or _torch.is_wait(node) or node.target is operator.getitem
        before = node.all_input_nodes if same else _torch.mutated_arguments(node)
        if not before:
            break
        node = before[0]
    return node


def live(nodes: Iterable[Node], needed: Set[Node], facts: Facts) -> list[Node]:
    """Those of ``nodes`` that lead to what is ``needed``, and those that are no loops or views."""
    found: list[Node] = []
    wanted = set(needed)
    for node in reversed(list(nodes)):
        if node in wanted or (node not in facts.loops and node not in facts.views):
            found.append(node)
            wanted.update(node.all_input_nodes)
    return found[::-1]
