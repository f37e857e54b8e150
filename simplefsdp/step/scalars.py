"""What an update computes of numbers alone, such as bias corrections of a step count.

Each parameter has a step count of its own, and most are equal. As operators of the graph they would
be a third of it, once per parameter, in single precision. So they are computed before each step,
once for all counts that are equal, as Python would: in doubles. The results are inputs of the
graph; the new counts are written when the step is done::

    lr, step ─ scalars ─┬─▶ results, into the graph
                        └─▶ step + 1, when it has run
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.optim.optimizer import Optimizer

from simplefsdp.step.update import Owner, Place, Update, tensor_at

_IN_PLACE: dict[object, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


class Scalars(NamedTuple):
    """The numbers of an update.

    Attributes:
        sources: what ``gm`` is called with; of counts that are equal the first.
        gm: computes the results.
        results: the nodes of the update that they stand for.
        nodes: all nodes of the update that are numbers.
        written: the state that changes, with the number of its new value among all that ``gm``
            gives: the results, and then those that are only written.
        equal: which counts were taken to be equal, see :func:`equal_counts`.
    """

    sources: list[Place]
    gm: GraphModule
    results: list[Node]
    nodes: frozenset[Node]
    written: dict[Place, int]
    equal: object


def equal_counts(optimizer: Optimizer) -> object:
    """The step counts of an optimizer by what they are now, in as far as they are equal.

    Of each group and state, a number for each parameter: counts with one number are equal.
    """
    numbers: dict[object, int] = {}
    return {
        place: numbers.setdefault((place.group, place.key, float(tensor)), len(numbers))
        for place, tensor in _counts(optimizer)
    }


def versions(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Changes where a count was written to, or has another tensor; at no cost."""
    return [(id(tensor), tensor._version) for _, tensor in _counts(optimizer)]


def _counts(optimizer: Optimizer) -> list[tuple[Place, Tensor]]:
    return [
        (Place("state", g, i, key), value)
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        for key, value in optimizer.state.get(param, {}).items()
        if _is_number(value) and not _is_number(param)  # whose moments are numbers, too
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0


def scalars_of(optimizer: Optimizer, update: Update) -> Scalars:
    """What ``update`` computes of counts and options alone."""
    equal: Any = equal_counts(optimizer)
    builder = _Builder(equal)
    wanted: dict[Node, None] = {}
    for node in update.graph.nodes:
        place = update.places.get(node)
        if place is not None:
            if place in equal or (place.kind == "option" and place.key):
                builder.source(node, place)
        elif node.op != "output" and all(n in builder.value for n in node.all_input_nodes):
            if node.all_input_nodes:
                builder.compute(node)
        else:
            wanted.update(dict.fromkeys(n for n in node.all_input_nodes if n in builder.value))
    return builder.done(list(wanted))


class _Builder:
    """Makes a graph without repetitions of the nodes of another."""

    def __init__(self, equal: Mapping[Place, int]) -> None:
        self.equal = equal
        self.graph = Graph()
        self.sources: list[Place] = []
        self.known: dict[object, Node] = {}
        self.value: dict[Node, Node] = {}  # of each node that is a number, what it is now
        self.places: dict[Node, Place] = {}
        self.written: dict[Place, Node] = {}

    def source(self, node: Node, place: Place) -> None:
        key = ("count", self.equal[place]) if place in self.equal else place
        if key not in self.known:
            given = self.graph.placeholder(f"source_{len(self.sources)}")
            self.known[key] = self.graph.call_method("double", (given,))
            self.sources.append(place)
        self.value[node], self.places[node] = self.known[key], place

    def compute(self, node: Node) -> None:
        method = node.op == "call_method" and str(node.target)
        in_place = node.target in _IN_PLACE or (method and method.endswith("_"))
        target = _IN_PLACE.get(node.target, node.target)
        if method and in_place:
            target = method[:-1]
        args = map_arg(node.args, self.value.__getitem__)
        kwargs = map_arg(node.kwargs, self.value.__getitem__)
        key = (node.op, target, args, tuple(sorted(kwargs.items())))
        if key not in self.known:
            self.known[key] = self.graph.create_node(node.op, target, args, kwargs)
        self.value[node] = self.known[key]
        if in_place:
            self._write(node.args[0], self.known[key])
            self.places[node] = self.places[node.args[0]]  # type: ignore[index]

    def _write(self, target: Any, value: Node) -> None:
        place = self.places[target]
        for node, its in self.places.items():
            if its == place:
                self.value[node] = value
        self.written[place] = value

    def done(self, wanted: list[Node]) -> Scalars:
        values = [self.value[node] for node in wanted]
        values += [v for v in dict.fromkeys(self.written.values()) if v not in values]
        self.graph.output(tuple(values))
        number = {value: i for i, value in enumerate(values)}
        written = {place: number[value] for place, value in self.written.items()}
        gm = GraphModule(nn.Module(), self.graph)
        return Scalars(self.sources, gm, wanted, frozenset(self.value), written, self.equal)


def compute(optimizer: Optimizer, scalars: Scalars) -> tuple[Tensor, ...]:
    """All values, for the step that is about to run."""
    with torch.no_grad():
        sources = [tensor_at(optimizer, place) for place in scalars.sources]
        return scalars.gm(*sources)  # type: ignore[no-any-return]


def write(
    optimizer: Optimizer, scalars: Scalars, values: tuple[Tensor, ...], trained: Container[Owner]
) -> None:
    """Write the new counts of the parameters that were trained, when the step has run."""
    written = {place: i for place, i in scalars.written.items() if place.owner in trained}
    if written:
        tensors = [tensor_at(optimizer, place) for place in written]
        with torch.no_grad():
            torch._foreach_copy_(tensors, [values[i] for i in written.values()])
