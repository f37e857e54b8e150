"""A deep model's step from a shallow one's: of layers that are alike, a few are traced.

Tracing takes seconds per layer, whatever its size. In the graphs of a model with a list of equal
layers each layer is the same sequence of nodes, and refers to the same places in the layers next
to it and outside. So the graphs of any depth are those of a few layers with one of them repeated.
That the layers are alike is not assumed: one is compared with its neighbours, node by node and in
both graphs, before it is repeated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from simplefsdp import _torch, provenance
from simplefsdp.placement import local_nbytes
from simplefsdp.trace import TracedStep

log = logging.getLogger("simplefsdp")

SHALLOW = 7
"""Layers to trace. The one in the middle is repeated and compared with those next to it, which need
neighbours of their own; the first and last ones differ, as a graph begins or ends with them."""


class Place(NamedTuple):
    """Where a node is: the ``member``-th of the layer that is ``layer``-th in its graph."""

    layer: int
    member: int


@dataclass(frozen=True)
class _Numbering:
    """The numbers of layers in FQNs and module paths."""

    layers: str

    def of(self, path: str) -> int | None:
        """The number of the layer that ``path`` is in."""
        found = self._search(path)
        return int(found[1]) if found else None

    def moved(self, path: str, by: int) -> str:
        """``path`` in a layer further on."""
        found = self._search(path)
        if found is None:
            return path
        return f"{path[: found.start(1)]}{int(found[1]) + by}{path[found.end(1) :]}"

    def _search(self, path: str) -> re.Match[str] | None:
        return re.search(rf"(?:^|(?<=\.)){re.escape(self.layers)}\.(\d+)(?=\.|$)", path)


def deepen(step: TracedStep, layers: str, depth: int) -> TracedStep:
    """The step of the same model with more layers; call this in the same process group.

    Args:
        step: of a model with at least :data:`SHALLOW` layers.
        layers: FQN of the list of layers.
        depth: how many there are to be, at least as many as there are.

    Raises:
        ValueError: the layers are not alike in the graphs, or there are too few or too many.
    """
    numbering = _Numbering(layers)
    there = len({numbering.of(fqn) for fqn in step.fqns} - {None})
    if not SHALLOW <= there <= depth:
        raise ValueError(
            f"{layers}: {there} layers with parameters were traced; to make {depth} of them, trace "
            f"{SHALLOW} to {depth}"
        )
    template, more = there // 2, depth - there
    forward = _Deep(_laid_out(step.forward.graph, numbering, template), numbering, more)
    backward = _Deep(
        _laid_out(step.backward.graph, numbering, template), numbering, more, forward.renamed
    )
    return TracedStep(
        GraphModule(step.forward, forward.graph),
        GraphModule(step.backward, backward.graph),
        tuple(_deep_fqns(step.fqns, numbering, template, more)),
    )


def _deep_fqns(
    fqns: Sequence[str], numbering: _Numbering, template: int, more: int
) -> Iterator[str]:
    repeated = [fqn for fqn in fqns if numbering.of(fqn) == template]
    for fqn in fqns:
        layer = numbering.of(fqn)
        if fqn in repeated[:1]:
            yield from (numbering.moved(f, by) for by in range(more + 1) for f in repeated)
        elif layer != template:
            yield numbering.moved(fqn, more if layer is not None and layer > template else 0)


def trace_deep(
    traced: Callable[[int], tuple[TracedStep, nn.Module]], layers: str, depth: int
) -> tuple[TracedStep, int]:
    """Trace a step, layers that are alike once.

    Args:
        traced: traces the model with that many layers; returns the step and the wrapped model.
        layers: FQN of the list of layers.
        depth: how many there are.

    Returns:
        The step, and the bytes of this rank's shards.
    """
    step, model = traced(min(depth, SHALLOW))
    nbytes = local_nbytes(model.parameters())
    if depth <= SHALLOW:
        return step, nbytes
    numbering = _Numbering(layers)
    try:
        deep = deepen(step, layers, depth)
    except ValueError as error:
        log.warning("%s; tracing all %d layers", error, depth)
        step, model = traced(depth)
        return step, local_nbytes(model.parameters())
    one = (p for fqn, p in model.named_parameters() if numbering.of(fqn) == SHALLOW // 2)
    return deep, nbytes + (depth - SHALLOW) * local_nbytes(one)


@dataclass(frozen=True)
class _Layout:
    """A graph and where its layers lie.

    Attributes:
        graph: it.
        before: nodes ahead of the layers.
        layers: nodes of those in the middle, all of one length, in their order in the graph.
        after: nodes behind them.
        numbers: of the layers in the model; they fall in a backward graph.
        template: index of the one that is to be repeated.
        shared: what layers next to each other refer to at the same place.
        place: of the layers' nodes, and of inputs that a layer is the first to use: these come
            behind its nodes, by where they are used.
    """

    graph: Graph
    before: list[Node]
    layers: list[list[Node]]
    after: list[Node]
    numbers: list[int]
    template: int
    shared: set[Node]
    place: dict[Node, Place]

    def reference(self, node: Node, layer: int) -> Any:
        """``node`` as a layer sees it: the same for all layers that are alike."""
        if node not in self.place:
            return node
        return layer - self.place[node].layer, self.place[node].member


def _laid_out(graph: Graph, numbering: _Numbering, template: int) -> _Layout:
    """Find the layers of a graph; each begins with its first collective.

    Raises:
        ValueError: there are no three in a row that are alike, with ``template`` in the middle.
    """
    body = _aliases_moved([n for n in graph.nodes if n.op not in ("placeholder", "output")])
    begins: dict[int, int] = {}
    for at, node in enumerate(body):
        layer = numbering.of(provenance.carried_fqn(node) or "")
        if layer is not None:
            begins.setdefault(layer, at)
    numbers, cuts = list(begins), list(begins.values())
    lengths = [end - begin for begin, end in pairwise(cuts)]
    at = numbers.index(template) if template in numbers else len(numbers)
    if not 0 < at < len(lengths) - 1 or abs(numbers[at + 1] - numbers[at - 1]) != 2:
        raise ValueError("the layers are not one behind the other in the traced graph")
    first, last = at, at
    while first and lengths[first - 1] == lengths[at]:
        first -= 1
    while last + 1 < len(lengths) and lengths[last + 1] == lengths[at]:
        last += 1
    layers = [body[cuts[i] : cuts[i + 1]] for i in range(first, last + 1)]
    before, after = body[: cuts[first]], body[cuts[last + 1] :]
    shared = _shared(layers)
    place = _places(before, layers, shared)
    found = _Layout(
        graph, before, layers, after, numbers[first : last + 1], at - first, shared, place
    )
    _compare(found)
    return found


def _aliases_moved(body: Sequence[Node]) -> list[Node]:
    """``body`` with aliases directly behind what they are of: of what attention keeps for backward
    there are some at the end of forward, of all layers."""
    aliases: dict[Node, list[Node]] = {}
    inside = set(body)
    for node in body:
        if node.target is torch.ops.aten.alias.default and _arguments(node)[0] in inside:
            aliases.setdefault(_arguments(node)[0], []).append(node)

    def behind(node: Node) -> Iterator[Node]:
        yield node
        for alias in aliases.get(node, ()):
            yield from behind(alias)

    moved = {alias for nodes in aliases.values() for alias in nodes}
    return [node for root in body if root not in moved for node in behind(root)]


def _shared(layers: Sequence[Sequence[Node]]) -> set[Node]:
    found: set[Node] = set()
    for nodes, others in pairwise(layers):
        for node, other in zip(nodes, others, strict=True):
            pairs = zip(_arguments(node), _arguments(other), strict=False)
            found.update(ours for ours, theirs in pairs if ours is theirs)
    return found


def _places(
    before: Sequence[Node], layers: Sequence[Sequence[Node]], shared: set[Node]
) -> dict[Node, Place]:
    outside = shared.union(*map(_arguments, before))
    place: dict[Node, Place] = {}
    for layer, nodes in enumerate(layers):
        used = (argument for node in nodes for argument in _arguments(node))
        for member, node in enumerate((*nodes, *used)):
            if node not in outside and (member < len(nodes) or node.op == "placeholder"):
                place.setdefault(node, Place(layer, member))
    return place


def _arguments(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _compare(layout: _Layout) -> None:
    template = layout.template
    for other in (template - 1, template + 1):
        if not 0 <= other < len(layout.layers):
            raise ValueError("the layers have not the same number of nodes in the traced graph")
        pairs = zip(layout.layers[template], layout.layers[other], strict=True)
        for ours, theirs in pairs:
            if _described(ours, layout, template) != _described(theirs, layout, other):
                raise ValueError(
                    "the layers are not alike in the traced graph: "
                    f"{ours.format_node()} and {theirs.format_node()}"
                )
    for node in layout.after:
        for argument in _arguments(node):
            if argument in layout.place and layout.place[argument].layer <= template:
                raise ValueError(
                    f"{node.format_node()}, behind the layers, refers to one in the middle"
                )


def _described(node: Node, layout: _Layout, layer: int) -> object:
    """All that matters of a node, the same in layers that are alike."""
    arguments = map_arg((node.args, node.kwargs), lambda n: layout.reference(n, layer))
    values = [
        (v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v
        for v in pytree.tree_leaves(node.meta.get("val"))
    ]
    return node.op, node.target, arguments, values


# What an input is called now: by its name, and the number of its layer as it was and as it is.
Renamed = Callable[[str, int, int], str | None]


class _Deep:
    """The graph of a layout with ``more`` copies of a layer.

    The copies come where numbers are lower: ahead of the layer if they rise, else behind it. So in
    forward and backward they have the same numbers.

    Attributes:
        graph: it.
        at: its nodes by place, where ``layer`` counts the copies.
        made: the others, and those that are no copies, by what they were made of.
    """

    def __init__(
        self, layout: _Layout, numbering: _Numbering, more: int, name_of: Renamed | None = None
    ) -> None:
        self.layout, self.numbering, self.name_of = layout, numbering, name_of
        self.graph, self.at, self.made = Graph(), dict[Place, Node](), dict[Node, Node]()
        self.homes = _homes(layout.place)
        self.place_of = {node.name: place for node, place in layout.place.items()}
        template, n = layout.template, len(layout.layers)
        rises = layout.numbers[1] > layout.numbers[0]
        self.copies = range(template + (not rises), template + (not rises) + more)
        self.sources = [*range(self.copies.start), *[template] * more, *range(self.copies.start, n)]
        first = layout.numbers[0] + (0 if rises else more)
        self.numbers = [first + (k if rises else -k) for k in range(n + more)]
        self._make(0 if rises else more, more if rises else 0)

    def renamed(self, name: str, number: int, deep: int) -> str | None:
        """See :data:`Renamed`: what is the input of another graph is made in this one."""
        was = self.place_of.get(name)
        if was is None:
            return None
        number = self.layout.numbers[was.layer] + deep - number
        if number not in self.numbers:
            return None
        return self.at[Place(self.numbers.index(number), was.member)].name

    def _make(self, before: int, after: int) -> None:
        layout = self.layout
        self._inputs()
        for node in layout.before:
            self.made[node] = self._made(node, node.name, self.made.__getitem__, before)
        for deep, source in enumerate(self.sources):
            for node in layout.layers[source]:
                self._member(node, deep)
        ends = len(self.sources), len(layout.layers)
        for node in layout.after:
            refer = self._referring(*ends)
            self.made[node] = self._made(node, node.name, refer, after)
        self._output()
        self.graph.lint()

    def _deep(self, layer: int) -> int:
        """Index that a layer of the layout has now."""
        return layer if layer < self.copies.start else layer + len(self.copies)

    def _referring(self, deep: int, source: int) -> Callable[[Node], Node]:
        """What a node refers to if its layer is a copy of ``source``, at ``deep``."""

        def refer(argument: Node) -> Node:
            if argument not in self.layout.place:
                return self.made[argument]
            layer, member = self.layout.place[argument]
            return self.at[Place(deep - (source - layer), member)]

        return refer

    def _inputs(self) -> None:
        place = self.layout.place
        for node in self.layout.graph.nodes:
            if node.op != "placeholder":
                continue
            if node not in place:
                self.made[node] = self._input(node, node.name)
            else:
                self.made[node] = self._placed_input(node, self._deep(place[node].layer))
        for deep in self.copies:
            for node, (layer, _) in place.items():
                if node.op == "placeholder" and layer == self.layout.template:
                    self._placed_input(node, deep)

    def _placed_input(self, node: Node, deep: int) -> Node:
        layer, member = self.layout.place[node]
        name = None
        if self.name_of is not None:
            name = self.name_of(node.name, self.layout.numbers[layer], self.numbers[deep])
        made = self._input(node, name or self._name(node, deep))
        self.at[Place(deep, member)] = made
        if deep in self.copies:
            self._renew(made, deep)
        return made

    def _input(self, node: Node, name: str) -> Node:
        made = self.graph.create_node("placeholder", name, node.args, {}, name, node.type)
        made.meta = dict(node.meta)
        return made

    def _name(self, node: Node, deep: int) -> str:
        return f"{node.name}_layer{self.numbers[deep]}" if deep in self.copies else node.name

    def _member(self, node: Node, deep: int) -> None:
        source = self.sources[deep]
        by = self.numbers[deep] - self.layout.numbers[source]
        made = self._made(node, self._name(node, deep), self._referring(deep, source), by)
        if node in self.layout.shared:
            self.made.setdefault(node, made)
        else:
            self.at[Place(deep, self.layout.place[node].member)] = made
        if deep in self.copies:
            self._renew(made, deep)
        else:
            self.made[node] = made

    def _made(self, node: Node, name: str, refer: Callable[[Node], Node], by: int) -> Node:
        arguments, keywords = map_arg((node.args, node.kwargs), refer)
        made = self.graph.create_node(node.op, node.target, arguments, keywords, name, node.type)
        made.meta = self._renumbered(node.meta, by)
        return made

    def _output(self) -> None:
        """All that was returned, and of each copy what its layer returned."""
        (output,) = (node for node in self.layout.graph.nodes if node.op == "output")
        values: list[Any] = list(output.args[0])  # type: ignore[call-overload]
        place, template = self.layout.place, self.layout.template
        members = [place[v].member for v in values if v in place and place[v].layer == template]
        returned = [self.made[v] if isinstance(v, Node) else v for v in values]
        returned += [self.at[Place(deep, member)] for deep in self.copies for member in members]
        self.graph.output(tuple(returned)).meta = dict(output.meta)

    def _renumbered(self, meta: dict[str, Any], by: int) -> dict[str, Any]:
        """What is noted on a node, for a layer further on."""
        found = dict(meta)

        def moved(path: str) -> str:
            return self.numbering.moved(path, by)

        if by and "custom" in meta:
            found["custom"] = provenance.renamed(meta["custom"], moved)
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if by and meta.get(key):
                found[key] = {k: (moved(path), kind) for k, (path, kind) in meta[key].items()}
        return found

    def _renew(self, made: Node, deep: int) -> None:
        """Give a copy values of its own: who tracks memory goes by their storages."""
        source = self.sources[deep]

        def renewed(value: object) -> object:
            home = self.homes.get(_torch.storage_of(value))
            if home is None:
                return value
            (layer, member), leaf = home
            there = self.at.get(Place(deep - (source - layer), member), made)
            owner = None if there is made else pytree.tree_leaves(there.meta["val"])[leaf]
            return _torch.fake_again(value, owner)

        made.meta["val"] = pytree.tree_map(renewed, made.meta.get("val"))


def _homes(place: dict[Node, Place]) -> dict[int | None, tuple[Place, int]]:
    """The first of the placed nodes that has each storage, and where in its value."""
    found: dict[int | None, tuple[Place, int]] = {}
    for node in sorted(place):
        for leaf, value in enumerate(pytree.tree_leaves(node.meta.get("val"))):
            found.setdefault(_torch.storage_of(value), (place[node], leaf))
    found.pop(None, None)
    return found
