"""A layer of a Dynamo graph, described so that it can be compared with others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from inductor_passes.adapters.submodules import attribute_of
from simplefsdp._torch import has_policy, layout_of
from simplefsdp.compiler.repeated_layers import Numbering
from simplefsdp.frontend.gather import gather


class DynamoLayer:
    """The nodes of a layer, from its first gather to that of the next layer, and the inputs that
    only this layer reads, in the order of first use."""

    def __init__(self, nodes: Sequence[Node], number: int) -> None:
        self.nodes, self.number = nodes, number
        self.at = {node: i for i, node in enumerate(nodes)}
        used = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        here = [n for n in used if n.op == "placeholder" and all(u in self.at for u in n.users)]
        self.own = {node: i for i, node in enumerate(here)}

    def taken(self, before: DynamoLayer) -> list[Node]:
        """The nodes of ``before``, the layer ahead, that this layer reads, in their order there."""
        used = {n for node in self.nodes for n in node.all_input_nodes if n in before.at}
        return sorted(used, key=before.at.__getitem__)

    def reads_its_own_parameters(self, numbering: Numbering) -> bool:
        """Whether each parameter that is first read here is of this layer, or of none."""
        fqns = [str(node.args[1]) for node in self.nodes if node.target is gather]
        return {numbering.of(fqn) for fqn in fqns} <= {None, self.number}

    def described(self, before: DynamoLayer | None, numbering: Numbering) -> list[Hashable]:
        """Node by node, what is equal for layers that are alike. A node of ``before`` is described
        by its place there, any other node outside of the layer by itself."""
        known = before.at if before is not None else {}

        def elsewhere(node: Node) -> Hashable:
            return ("before", known[node]) if node in known else node

        return self._lines(numbering, elsewhere)

    def done(self, numbering: Numbering) -> list[Hashable]:
        """As :meth:`described`, but of nodes outside of the layer only their values matter."""
        return self._lines(numbering, value_of)

    def _lines(self, numbering: Numbering, elsewhere: Callable[[Node], Hashable]) -> list[Hashable]:
        def refer(node: Node) -> Any:
            if node in self.at:
                return "here", self.at[node]
            if node in self.own:
                return "own", self.own[node], value_of(node)
            if node.op == "get_attr":
                return "attribute", _submodule(node)
            return elsewhere(node)

        lines: list[Hashable] = []
        for node in self.nodes:
            args, kwargs = node.args, node.kwargs
            if node.target is gather:
                args = (args[0], numbering.moved(str(args[1]), -self.number), *args[2:])
            referring = map_arg((args, kwargs), refer)
            marks = _hashable(node.meta.get("custom"))
            lines.append((node.op, node.target, _hashable(referring), value_of(node), marks))
        return lines


def _submodule(node: Node) -> Hashable:
    """What a submodule computes, without the names of its nodes. Any other attribute equals only
    itself; so does a checkpointed region where the user has a policy of what to save, since a
    policy may count layers."""
    module = attribute_of(node)
    if not isinstance(module, GraphModule) or has_policy(module):
        return id(module)
    number = {n: i for i, n in enumerate(module.graph.nodes)}
    lines: list[Hashable] = []
    for inner in module.graph.nodes:
        target: Any = inner.target
        if inner.op == "get_attr":
            target = _submodule(inner)
        elif inner.op == "placeholder":
            target = None
        referring = map_arg((inner.args, inner.kwargs), lambda n: ("here", number[n]))
        lines.append((inner.op, target, _hashable(referring), value_of(inner)))
    return tuple(lines)


def _hashable(value: Any) -> Hashable:
    """``value`` as something hashable to compare; what cannot be hashed equals only itself."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return "mapping", *((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", *(_hashable(item) for item in (value.start, value.stop, value.step))
    if isinstance(value, float):
        return "float", value.hex()  # 0.0 and -0.0 are equal, and not the same
    # With the type: 1, True and 1.0 are equal, and not the same.
    return type(value).__name__, value if isinstance(value, Hashable) else id(value)


def value_of(node: Node) -> Hashable:
    """What matters of the value that Dynamo saw: tensors' layouts, and other leaves' types."""
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return tuple(layout_of(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
