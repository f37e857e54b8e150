"""The part of an update that computes with 0-d numbers only, such as Adam's bias corrections.

Each parameter has a step count of its own, and most counts are equal. As operators of the graph,
these computations would be a third of the graph: once per parameter, and in single precision. So
they are done before each step, once for all counts that are equal, and in doubles, as Python does.
The results are inputs of the graph; the new counts are written when the step is done::

    lr, step ─ scalars ─┬─▶ results, into the graph
                        └─▶ step + 1, when it has run
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.optim.optimizer import Optimizer

from simplefsdp._torch.updates import IN_PLACE, is_in_place
from simplefsdp.step.update import Owner, Site, Update, params_of, tensor_at


class Scalars(NamedTuple):
    """The numbers of an update."""

    # One list per input of ``gm``: sites with equal values, any of which can be that input.
    sources: list[list[Site]]
    gm: GraphModule  # computes the results, and then the values that are only written to state
    results: list[Node]  # the node of the update that each result replaces
    examples: list[Tensor]  # the value of each result now
    nodes: frozenset[Node]  # all nodes of the update that are numbers
    # For each state that changes, the index of its new value among all outputs of ``gm``.
    written: dict[Site, int]


class CountsDiffer(Exception):
    """Counts that were equal when a step was compiled are no longer equal."""


def _counts(optimizer: Optimizer) -> dict[Site, Tensor]:
    return {
        Site("state", *owner, key): value
        for owner, param in params_of(optimizer).items()
        for key, value in optimizer.state.get(param, {}).items()
        if _is_number(value) and not _is_number(param)  # a 0-d parameter has 0-d moments, too
    }


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0


def scalars_of(optimizer: Optimizer, update: Update) -> Scalars:
    """The part of ``update`` that computes with counts and options alone.

    Raises:
        ValueError: the update writes to a number in a way that is not supported here.
    """
    counts = _counts(optimizer)
    builder = _Builder({s: (s.group, s.key, float(tensor)) for s, tensor in counts.items()})
    wanted: dict[Node, None] = {}
    for node in update.graph.nodes:
        site = update.sites.get(node)
        if site is not None:
            if site in counts or site.kind == "option":
                builder.source(node, site)
        elif node.op != "output":
            of_numbers = [n for n in node.all_input_nodes if n in builder.value]
            if of_numbers and len(of_numbers) == len(node.all_input_nodes):
                builder.compute(node)
            else:
                builder.refuse_written(node)
                wanted.update(dict.fromkeys(of_numbers))
    return builder.done(list(wanted), optimizer)


class _Builder:
    """Copies the number nodes of an update into a new graph, in which equal ones occur once."""

    def __init__(self, value_of: Mapping[Site, object]) -> None:
        self.value_of = value_of  # of counts: its group, key and number; equal ones share an input
        self.graph = Graph()
        self.sources: dict[object, list[Site]] = {}
        self.known: dict[object, Node] = {}
        self.value: dict[Node, Node] = {}  # for each number node, the new node of its current value
        self.sites: dict[Node, Site] = {}
        self.written: dict[Site, Node] = {}

    def source(self, node: Node, site: Site) -> None:
        key = self.value_of.get(site, site)
        if key not in self.known:
            given = self.graph.placeholder(f"source_{len(self.sources)}")
            self.known[key] = self.graph.call_method("double", (given,))
        self.sources.setdefault(key, []).append(site)
        self.value[node], self.sites[node] = self.known[key], site

    def compute(self, node: Node) -> None:
        method = str(node.target) if node.op == "call_method" else ""
        target: Any = IN_PLACE.get(node.target, node.target)
        if method == "copy_":
            target = "clone"
        elif method and is_in_place(node) and hasattr(Tensor, method[:-1]):
            target = method[:-1]
        elif node.target not in IN_PLACE:
            self.refuse_written(node)
        args = map_arg(node.args, self.value.__getitem__)
        kwargs = map_arg(node.kwargs, self.value.__getitem__)
        args = args[1:2] if method == "copy_" else args
        key = (node.op, target, args, tuple(sorted(kwargs.items())))
        if key not in self.known:
            self.known[key] = self.graph.create_node(node.op, target, args, kwargs)
        self.value[node] = self.known[key]
        if target != node.target:
            self._write(node, cast(Node, node.args[0]))

    def refuse_written(self, node: Node) -> None:
        """Refuse a node that writes to a number in a way that :meth:`compute` does not handle."""
        writes = is_in_place(node) or node.target is operator.setitem
        written: Any = node.args[:1] if writes else node.kwargs.get("out")
        left = [written]
        while left:
            value = left.pop()
            left += value if isinstance(value, (list, tuple)) else ()
            if isinstance(value, Node) and value in self.value:
                self._refuse(value)

    def _refuse(self, node: Node) -> None:
        site = self.sites.get(node)
        raise ValueError(
            f"optimizer: its step writes to {site.key if site else node.name!r}, a tensor of one "
            "number, in a way that is not compiled; compile the model alone"
        )

    def _write(self, node: Node, target: Node) -> None:
        """Give ``target``, and all nodes of the same tensor, the value of ``node`` from here on."""
        site = self.sites.get(target)
        if site is None:  # made in this step
            self.value[target] = self.value[node]
            return
        if site.kind != "state":
            self._refuse(target)
        self.sites[node] = site
        for other, its in self.sites.items():
            if its == site:
                self.value[other] = self.value[node]
        self.written[site] = self.value[node]

    def done(self, wanted: list[Node], optimizer: Optimizer) -> Scalars:
        values = [self.value[node] for node in wanted]
        values += [v for v in dict.fromkeys(self.written.values()) if v not in values]
        self.graph.output(tuple(values))
        number = {value: i for i, value in enumerate(values)}
        written = {site: number[value] for site, value in self.written.items()}
        gm = GraphModule(nn.Module(), self.graph)
        sources = [*self.sources.values()]
        with torch.no_grad():
            # Results may be views of one tensor; the inputs of a graph should not share storage.
            made = gm(*(tensor_at(optimizer, sites[0]) for sites in sources))
            examples = [example.clone() for example in made]
        return Scalars(sources, gm, wanted, examples[: len(wanted)], frozenset(self.value), written)


class Numbers:
    """The numbers of a step, for the parameters that one graph trains.

    Parameters that it does not train keep their counts, which then differ from the others.
    """

    def __init__(self, scalars: Scalars, trained: Container[Owner]) -> None:
        self.scalars = scalars
        mine = [
            [p for p in sites if p.owner is None or p.owner in trained] for sites in scalars.sources
        ]
        self.equal = [sites for sites in mine if len(sites) > 1]
        both = zip(mine, scalars.sources, strict=True)
        self.sources = [(own or every)[0] for own, every in both]
        self.written = {p: i for p, i in scalars.written.items() if p.owner in trained}
        self.left: list[tuple[Tensor, int]] = []  # counts that were checked, with their versions

    def compute(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """All values, for the step of ``optimizer`` that is about to run.

        Raises:
            CountsDiffer: counts differ that the graph takes to be equal.
        """
        if not self._as_left(optimizer):  # somebody else wrote to a count
            for sites in self.equal:
                if len({float(tensor_at(optimizer, site)) for site in sites}) > 1:
                    raise CountsDiffer
            self._leave(self._counts(optimizer))
        with torch.no_grad():
            sources = [tensor_at(optimizer, site) for site in self.sources]
            return self.scalars.gm(*sources)  # type: ignore[no-any-return]

    def write(self, optimizer: Optimizer, values: tuple[Tensor, ...]) -> None:
        """Write the new counts, when the step has run."""
        if not self.written:
            return
        tensors = [tensor_at(optimizer, site) for site in self.written]
        with torch.no_grad():
            torch._foreach_copy_(tensors, [values[i] for i in self.written.values()])
        self._leave([tensor for tensor, _ in self.left])

    def _counts(self, optimizer: Optimizer) -> list[Tensor]:
        return [tensor_at(optimizer, site) for sites in self.equal for site in sites]

    def _leave(self, counts: list[Tensor]) -> None:
        self.left = [(tensor, tensor._version) for tensor in counts]

    def _as_left(self, optimizer: Optimizer) -> bool:
        now = self._counts(optimizer)
        return len(now) == len(self.left) and all(
            tensor is before and tensor._version == version
            for tensor, (before, version) in zip(now, self.left, strict=True)
        )
