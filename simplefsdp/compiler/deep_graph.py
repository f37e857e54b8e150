"""The graph of a model with more layers than were traced: a traced layer is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from simplefsdp import _torch, provenance
from simplefsdp.compiler.repeated_layers import LayeredGraph, Numbering, Place
from simplefsdp.compiler.seeds import SeedsByName, check, move_outside, moved_by

# The name of an input in a deep graph, given its name in the shallow graph and the number of its
# layer there and in the deep graph; None to name it as if there were no such function.
Renamed = Callable[[str, int, int], str | None]
_Home = tuple[Place, int]  # of a storage: the first node that has it, and in which of its values


class Deep:
    """The graph of a layout, with ``more`` copies of the template, one of its layers.

    The copies have lower numbers than the template: they stand ahead of it if numbers rise along
    the graph (forward), else behind it (backward). So a copy has the same number in both graphs.
    ``at`` has the new nodes by place, where ``layer`` counts the copies, too; ``made`` has those
    that are in no copy, by the node that each was made from.

    Args:
        layout: of the shallow graph.
        numbering: of its layers.
        more: how many copies to make.
        name_of: gives names to inputs that another deep graph makes.
        own: without ``name_of``: names of the copies' inputs, by the name of the template's input
            and the number of the copy. Without both, names are made up.
        seeds: of the layers, if another deep graph draws them.
    """

    def __init__(
        self,
        layout: LayeredGraph,
        numbering: Numbering,
        more: int,
        name_of: Renamed | None = None,
        own: Mapping[tuple[str, int], str] | None = None,
        seeds: SeedsByName | None = None,
    ) -> None:
        self.layout, self.numbering, self.name_of, self.own = layout, numbering, name_of, own
        self.graph, self.at, self.made = Graph(), dict[Place, Node](), dict[Node, Node]()
        self.seeds = layout.seeds if seeds is None else seeds
        self.homes = _homes(layout.place)
        self.values: dict[Node, tuple[list[tuple[Any, _Home | None]], pytree.TreeSpec]] = {}
        self.stacks: dict[tuple[int, int, int], dict[str, Any]] = {}
        self.place_of = {node.name: place for node, place in layout.place.items()}
        template, n = layout.template, len(layout.layers)
        rises = layout.numbers[1] > layout.numbers[0]
        self.copies = range(template + (not rises), template + (not rises) + more)
        self.sources = [*range(self.copies.start), *[template] * more, *range(self.copies.start, n)]
        first = layout.numbers[0] + (0 if rises else more)
        self.numbers = [first + (k if rises else -k) for k in range(n + more)]
        self._make(0 if rises else more, more if rises else 0)

    def renamed(self, name: str, number: int, deep: int) -> str | None:
        """A :data:`Renamed` for the inputs of another deep graph that this one makes; None for an
        input that it does not make."""
        was = self.place_of.get(name)
        if was is None:
            return None
        number = self.layout.numbers[was.layer] + deep - number
        if number not in self.numbers:
            return None
        return self.at[Place(self.numbers.index(number), was.member)].name

    def counterpart(self, node: Node, number: int) -> Node:
        """The node that is to the layer with ``number`` what ``node`` is to the template."""
        layer, member = self.layout.place[node]
        deep = self.numbers.index(number)
        return self.at[Place(deep + layer - self.layout.template, member)]

    def at_end(self, node: Node) -> Node:
        """What ``node`` is to what is behind the layers: of a node of the template, for example,
        the counterpart in the last copy, if copies stand behind the template."""
        return self._referring(len(self.sources), len(self.layout.layers))(node)

    def _make(self, before: int, after: int) -> None:
        layout = self.layout
        high = layout.numbers[layout.template]
        self._inputs()
        for node in layout.before:
            self.made[node] = self._made(node, node.name, self._referring(0, 0), before, high)
        for deep, source in enumerate(self.sources):
            for node in layout.layers[source]:
                self._member(node, deep)
        for node in layout.after:
            self.made[node] = self._made(node, node.name, self.at_end, after, high)
        self._output()
        self.graph.lint()
        if self.seeds:
            check(self.graph)

    def _referring(self, deep: int, source: int) -> Callable[[Node], Node]:
        """A function that gives, for an argument of a node in the layer ``source``, the argument of
        that node's counterpart in the layer at ``deep``, which is made from ``source``."""

        def refer(argument: Node) -> Node:
            if argument not in self.layout.place:
                return self.made[argument]
            layer, member = self.layout.place[argument]
            return self.at[Place(deep - (source - layer), member)]

        return refer

    def _inputs(self) -> None:
        place, copies = self.layout.place, self.copies
        inputs = self.layout.graph.find_nodes(op="placeholder")
        for node in inputs:
            if node not in place:
                self.made[node] = self._made(node, node.name, self._referring(0, 0), by=0)
            else:
                layer = place[node].layer
                self._input(node, layer if layer < copies.start else layer + len(copies))
        for deep in copies:
            for node in place:
                if node.op == "placeholder" and place[node].layer == self.layout.template:
                    self._input(node, deep)

    def _input(self, node: Node, deep: int) -> None:
        name = None
        if self.name_of is not None:
            number = self.layout.numbers[self.layout.place[node].layer]
            name = self.name_of(node.name, number, self.numbers[deep])
        elif self.own is not None and deep in self.copies:
            name = self.own[node.name, self.numbers[deep]]
        self._member(node, deep, name)

    def _member(self, node: Node, deep: int, name: str | None = None) -> None:
        """Make the counterpart of ``node``, a node of a layer, in the layer at ``deep``."""
        layer, member = self.layout.place[node]
        is_copy, number = deep in self.copies, self.numbers[deep]
        name = name or (f"{node.name}_layer{number}" if is_copy else node.name)
        by = number - self.layout.numbers[layer]
        made = self._made(node, name, self._referring(deep, layer), by)
        self.at[Place(deep, member)] = made
        if is_copy:
            self._renew(made, node, deep)
        else:
            self.made[node] = made

    def _made(
        self, node: Node, name: str, refer: Callable[[Node], Node], by: int, at_least: int = 0
    ) -> Node:
        target = name if node.op == "placeholder" else node.target
        arguments, keywords = map_arg((node.args, node.kwargs), refer)
        made = self.graph.create_node(node.op, target, (), {}, name, node.type)
        # Not given to `create_node`, whose search for symbols takes longer than all the rest.
        made.args, made.kwargs = arguments, keywords
        made.meta = self._renumbered(node.meta, by, at_least)
        if node in self.layout.place:
            made.args = moved_by(made, self.seeds, by)
        else:
            move_outside(made, self.seeds, len(self.copies))
        return made

    def _output(self) -> None:
        """Return all that the shallow graph returns, and of each copy what the template returns."""
        output: Any = self.layout.graph.output_node()
        values = list(output.args[0])
        place, template = self.layout.place, self.layout.template
        members = [place[v].member for v in values if v in place and place[v].layer == template]
        returned = [self.made[v] if isinstance(v, Node) else v for v in values]
        returned += [self.at[Place(deep, member)] for deep in self.copies for member in members]
        self.graph.output(tuple(returned)).meta = dict(output.meta)

    def _renumbered(self, meta: dict[str, Any], by: int, at_least: int) -> dict[str, Any]:
        """A copy of ``meta`` with ``by`` added to layer numbers that are ``at_least`` so high."""
        found = dict(meta)
        if not by:
            return found
        if "custom" in meta:
            moved = partial(self.numbering.moved, by=by, at_least=at_least)
            found["custom"] = provenance.renamed(meta["custom"], moved)
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if meta.get(key):
                found[key] = self._stack_moved(meta[key], by, at_least)
        return found

    def _stack_moved(self, stack: dict[str, Any], by: int, at_least: int) -> dict[str, Any]:
        """A module stack, renumbered: nodes of a module share one stack, and so do their copies."""
        key = (id(stack), by, at_least)
        if key not in self.stacks:
            self.stacks[key] = self.numbering.stack_moved(stack, by, at_least)
        return self.stacks[key]

    def _renew(self, made: Node, node: Node, deep: int) -> None:
        """Give ``made``, a copy of ``node``, its own storages: memory is tracked by storage."""
        if "val" not in node.meta:  # a subgraph that is an operator's argument has none
            return
        values, spec = self._values_of(node)
        own = [
            value if home is None else self._renewed(value, home, made, deep)
            for value, home in values
        ]
        made.meta["val"] = own[0] if spec.is_leaf() else pytree.tree_unflatten(own, spec)

    def _renewed(self, value: Tensor, home: _Home, made: Node, deep: int) -> Tensor:
        (layer, member), leaf = home
        there = self.at.get(Place(deep - (self.sources[deep] - layer), member), made)
        if there is made:
            return _torch.fake_again(value, None)
        owner = there.meta["val"]
        owner = owner if isinstance(owner, Tensor) else pytree.tree_leaves(owner)[leaf]
        return _torch.fake_again(value, owner)

    def _values_of(self, node: Node) -> tuple[list[tuple[Any, _Home | None]], pytree.TreeSpec]:
        """The values of a node that is copied, each with its home, or None if the copies share it.
        A tensor of open sizes is shared: only formulas of sizes use it, and making one takes a
        ms."""
        if node not in self.values:
            leaves, spec = pytree.tree_flatten(node.meta["val"])
            self.values[node] = [(value, self._home_of(value)) for value in leaves], spec
        return self.values[node]

    def _home_of(self, value: Any) -> _Home | None:
        is_open = isinstance(value, Tensor) and any(isinstance(n, SymInt) for n in value.shape)
        return None if is_open else self.homes.get(_torch.storage_of(value))


def _homes(place: dict[Node, Place]) -> dict[int | None, _Home]:
    """For each storage, the place of the first node that has it, and in which of its values."""
    found: dict[int | None, _Home] = {}
    for node in sorted(place):
        for leaf, value in enumerate(pytree.tree_leaves(node.meta.get("val"))):
            found.setdefault(_torch.storage_of(value), (place[node], leaf))
    found.pop(None, None)
    return found
