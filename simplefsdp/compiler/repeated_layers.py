"""The layers of a traced graph: where they lie, and whether they are alike."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from inductor_passes.adapters._torch import is_collective_start, is_random, is_view
from inductor_passes.adapters.submodules import is_submodule, submodule_text
from simplefsdp import provenance
from simplefsdp._torch.exact import exactly
from simplefsdp.compiler.seeds import SeedsByName, moved_by, numbered


class Place(NamedTuple):
    """Where a node is."""

    layer: int  # index of its layer among those of the graph
    member: Hashable  # what it is there; the same for its counterparts in the other layers


@dataclass(frozen=True)
class Numbering:
    """Finds and changes the numbers of layers in FQNs, and in longer module paths.

    Where kinds of layers alternate, such as attention to a window and to all tokens, ``period``
    layers count as one.
    """

    layers: str  # FQN of the list of layers
    period: int = 1

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?:^|(?<=\.)){re.escape(self.layers)}\.(\d+)(?=\.|$)")

    def of(self, fqn: str) -> int | None:
        """The number of the layer that a parameter is in."""
        found = self._pattern.match(fqn)
        return int(found[1]) // self.period if found else None

    def moved(self, path: str, by: int, at_least: int = 0) -> str:
        """``path`` with ``by`` added to its layer's number, if that is ``at_least`` so high."""
        found = self._pattern.search(path)
        if found is None or (number := int(found[1])) // self.period < at_least:
            return path
        return f"{path[: found.start(1)]}{number + by * self.period}{path[found.end(1) :]}"

    def stack_moved(
        self, stack: Mapping[str, tuple[str, object]], by: int, at_least: int = 0
    ) -> dict[str, tuple[str, object]]:
        """A node's stack of modules, with their paths :meth:`moved`."""
        return {key: (self.moved(path, by, at_least), kind) for key, (path, kind) in stack.items()}


@dataclass(frozen=True)
class LayeredGraph:
    """A graph and where its layers lie."""

    graph: Graph
    before: list[Node]  # nodes ahead of the layers
    # The nodes of each layer between ``before`` and ``after``, in the order of the graph; each
    # layer has equally many.
    layers: list[list[Node]]
    after: list[Node]  # nodes behind them
    numbers: list[int]  # of the layers in the model; they fall in a backward graph
    template: int  # index of the layer that is to be copied
    # Places of the layers' nodes; of inputs, in the layer that uses them first, by where it does;
    # and of inputs that nothing uses, by the input ahead of them.
    place: dict[Node, Place]
    seeds: SeedsByName  # of its layers


def laid_out(
    graph: Graph, numbering: Numbering, template: int, *, of_one_size: bool = False
) -> LayeredGraph:
    """Find the layers of a graph; each begins with its first collective. ValueError if the layers
    around the one with the number ``template`` are not alike.

    A layer with the same operators but other sizes is an error, too: layers that are not in the
    graph may also differ. With ``of_one_size``, for a caller who knows all layers, such a layer and
    those beyond it are left out instead.
    """
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    begins: dict[int, Node] = {}
    for node in body:
        layer = numbering.of(provenance.carried_fqn(node) or "")
        if layer is not None:
            begins.setdefault(layer, node)
    body = _moved_to_layers(body, [*begins.values()][-1:])
    at_of = {node: at for at, node in enumerate(body)}
    cuts = [at_of[node] for node in begins.values()]
    run = _run(list(begins), [body[i:j] for i, j in pairwise(cuts)], template, of_one_size)
    layers = [body[cuts[i] : cuts[i + 1]] for i in run]
    before, after = body[: cuts[run[0]]], body[cuts[run[-1] + 1] :]
    numbers = [list(begins)[i] for i in run]
    place = _places(graph, before, layers)
    at = numbers.index(template)
    seeds = numbered(layers, numbers, at)
    found = LayeredGraph(graph, before, layers, after, numbers, at, place, seeds)
    _compare(found, numbering)
    return found


def _moved_to_layers(body: Sequence[Node], last: Sequence[Node]) -> list[Node]:
    """``body``, with some nodes moved into the layers: those that a forward graph has at its end
    for backward alone. Each is put directly behind the results of a layer that it uses. They are
    views, and a norm's ``rsqrt / size`` and ``x - mean``."""
    end = body.index(last[0]) if last else len(body)
    returned: set[Node] = set()
    for node in reversed(body[end:]):
        if node.is_impure() or is_random(node) or is_collective_start(node):
            continue  # whose order counts
        others = [user for user in node.users if user.op != "output"]
        if not others or (is_view(node) and returned.issuperset(others)):
            returned.add(node)
    home = {node: i for i, node in enumerate(body[:end])}
    moved: dict[int, list[Node]] = {}
    for node in body[end:]:
        arguments = node.all_input_nodes
        if node in returned and arguments and home.keys() >= {*arguments}:
            home[node] = max(home[argument] for argument in arguments)
            moved.setdefault(home[node], []).append(node)
    stay = [node for node in body[end:] if node not in home]
    ahead = (found for i, node in enumerate(body[:end]) for found in (node, *moved.get(i, ())))
    return [*ahead, *stay]


def _run(
    numbers: Sequence[int], layers: Sequence[Sequence[Node]], template: int, of_one_size: bool
) -> range:
    """Indices of the consecutive layers around ``template`` that have the same operators."""
    at = numbers.index(template) if template in numbers else 0
    # Subgraphs that operators take have another name in each layer; _compare compares their code.
    targets = [
        [(n.op if n.op == "get_attr" else n.target, of_one_size and _values(n)) for n in nodes]
        for nodes in layers
    ]
    if 0 < at < len(layers):
        step = numbers[at] - numbers[at - 1]

        def goes_on(i: int, j: int) -> bool:
            return numbers[j] - numbers[i] == step and targets[i] == targets[j] == targets[at]

        first = last = at
        while first and goes_on(first - 1, first):
            first -= 1
        while last + 1 < len(layers) and goes_on(last, last + 1):
            last += 1
        if first < at < last and abs(step) == 1:
            return range(first, last + 1)
    raise ValueError(
        f"layer {template} and those next to it are not one behind the other in the traced graph, "
        "with the same ops"
    )


def _shared(layers: Sequence[Sequence[Node]]) -> set[Node]:
    """Nodes that neighbouring layers refer to in the same place: they are of no layer."""
    found: set[Node] = set()
    for nodes, others in pairwise(layers):
        for node, other in zip(nodes, others, strict=True):
            pairs = zip(node.all_input_nodes, other.all_input_nodes, strict=False)
            found.update(ours for ours, theirs in pairs if ours is theirs)
    return found


def _places(
    graph: Graph, before: Sequence[Node], layers: Sequence[Sequence[Node]]
) -> dict[Node, Place]:
    outside = _shared(layers).union(*(node.all_input_nodes for node in before))
    place: dict[Node, Place] = {}
    for layer, nodes in enumerate(layers):
        used = (argument for node in nodes for argument in node.all_input_nodes)
        for member, node in enumerate((*nodes, *used)):
            if node not in outside and (member < len(nodes) or node.op == "placeholder"):
                place.setdefault(node, Place(layer, member))
    ahead: Place | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.users:
                ahead = place.get(node)
            elif ahead is not None:
                place[node] = ahead = Place(ahead.layer, ("behind", ahead.member))
    return place


def _compare(layout: LayeredGraph, numbering: Numbering) -> None:
    """Raise a ValueError unless all layers are like the template."""
    template = layout.template
    inner = {template - 1, template + 1, *range(1, len(layout.layers) - 1)} - {0}
    members = [node for nodes in layout.layers for node in nodes]
    code = {node: submodule_text(node) for node in members if is_submodule(node)}
    for k, nodes in enumerate(layout.layers):
        for ours, theirs in zip(layout.layers[template], nodes, strict=True):
            # Of outer layers references are not compared: they may lead out of the alike layers.
            one, other = (
                (code.get(node, node.target), *_described(node, layout, at, numbering, k in inner))
                for node, at in ((ours, template), (theirs, k))
            )
            if one != other:
                raise ValueError(
                    "the layers are not alike in the traced graph: "
                    f"{ours.format_node()} and {theirs.format_node()}"
                )
    inputs = [_inputs(layout, k) for k in (template - 1, template, template + 1)]
    if inputs[0] != inputs[1] or inputs[1] != inputs[2]:
        raise ValueError("the layers do not take alike inputs in the traced graph")
    for node in layout.after:
        for argument in node.all_input_nodes:
            if argument in layout.place and layout.place[argument].layer <= template:
                raise ValueError(
                    f"{node.format_node()}, behind the layers, refers to one in the middle"
                )


def _inputs(layout: LayeredGraph, layer: int) -> dict[Hashable, object]:
    """The values of a layer's inputs."""
    return {
        place.member: _values(node)
        for node, place in layout.place.items()
        if node.op == "placeholder" and place.layer == layer
    }


def _values(node: Node) -> list[object]:
    return [
        (v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else type(v)
        for v in pytree.tree_leaves(node.meta.get("val"))
    ]


def _described(
    node: Node, layout: LayeredGraph, layer: int, numbering: Numbering, references: bool
) -> tuple[object, ...]:
    """What is compared of a node beside its target: equal in layers that are alike."""

    def refer(argument: Any) -> Any:
        if not isinstance(argument, Node):
            return exactly(argument)
        if not references or argument not in layout.place:
            return argument if references else None
        other, member = layout.place[argument]
        return layer - other, member

    by = -layout.numbers[layer]
    marks = provenance.renamed(node.meta.get("custom") or {}, partial(numbering.moved, by=by))
    arguments = map_aggregate((moved_by(node, layout.seeds, by), node.kwargs), refer)
    return node.op, arguments, _values(node), marks
