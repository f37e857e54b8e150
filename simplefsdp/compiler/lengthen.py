"""Takes the stand-in out of a joint graph, and puts the layers into its forward and backward.

``shorten.py`` has AOTAutograd trace a model with a stand-in for most layers. Before anything else
looks at the joint graph, the stand-in, its inputs and their gradients are taken out, which leaves
the joint graph of a shallow model. When that has been cut in two, forward and backward get the
missing layers, as copies of a traced layer's nodes. Every input and output is put where AOTAutograd
expects it, since AOTAutograd does not know that anything was left out.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from inductor_passes.adapters._torch import is_view
from simplefsdp import _torch
from simplefsdp.compiler.deep_graph import Deep
from simplefsdp.compiler.repeated_layers import LayeredGraph, laid_out
from simplefsdp.compiler.seeds import of_both
from simplefsdp.compiler.shorten import Shortened, shorten
from simplefsdp.compiler.stand_in import layers, layers_backward
from simplefsdp.rank_guard import RankMismatchError

CompiledFunction = Callable[..., Any]

log = logging.getLogger("simplefsdp")


class LeftOut(NamedTuple):
    """What a joint graph had before anything was taken out, and its two parts must have."""

    short: Shortened  # of the Dynamo graph
    inputs: list[Node]  # all inputs of the joint graph but the tangents, in order
    # By the number of a layer in the whole model, the names of its inputs: of the layers that were
    # not traced, and of the template.
    inputs_of: dict[int, list[str]]
    # By the name of an input that nothing reads, the name of what was returned as its gradient, or
    # None.
    unread: dict[str, str | None]

    @property
    def example(self) -> list[str]:
        """Names of the template's inputs."""
        return self.inputs_of[self.short.template + self.short.more]

    @property
    def kept(self) -> list[int]:
        """Places of the inputs that the joint graph still has."""
        own = {name for names in self.inputs_of.values() for name in names} - {*self.example}
        gone = own | self.unread.keys()
        return [i for i, node in enumerate(self.inputs) if node.name not in gone]


def few_layers_traced(
    gm: GraphModule, compiled: Callable[[GraphModule, _torch.Cut | None], CompiledFunction]
) -> CompiledFunction:
    """``gm`` compiled, with few of the layers that are alike traced; with all, if that fails."""
    for short in shorten(gm) if _torch.can_cut() else ():
        layers_of, graphs = short.numbering.layers, _Graphs(short)
        cut = _torch.Cut(graphs.take_out, graphs.lengthen, graphs.kept)
        try:
            code = compiled(short.gm, cut)
        except RankMismatchError:
            raise
        except Exception as error:
            if graphs.are_long:  # the layers are back: what failed has nothing to do with them
                raise
            log.debug("%s: more layers are traced, since they differ: %s", layers_of, error)
        else:
            if graphs.are_long:
                count = short.more * short.numbering.period
                log.debug("%s: %d layers were not traced", layers_of, count)
                return code
            log.debug("%s: all layers are traced, for there is no backward", layers_of)
            break
    return compiled(gm, None)


class _Graphs:
    """The graphs of one attempt: what was left out of the joint graph (an empty list before that is
    known), and whether forward and backward have all layers by now."""

    def __init__(self, short: Shortened) -> None:
        self.short, self.left_out, self.are_long = short, list[LeftOut](), False

    @property
    def last(self) -> LeftOut:
        if not self.left_out:
            raise ValueError("the joint graph does not call the layers that are left out")
        return self.left_out[-1]

    def kept(self) -> Sequence[int]:
        """Places of the inputs that the joint graph still has."""
        return self.last.kept

    def take_out(self, graph: Graph) -> None:
        """Take the stand-in out of ``graph`` if it is a joint graph. Inductor also calls this with
        graphs that operators take as arguments, which have none."""
        if graph.find_nodes(op="call_function", target=layers.default):
            self.left_out.append(take_out(graph, self.short))

    def lengthen(
        self, forward: GraphModule, backward: GraphModule, outputs: int
    ) -> tuple[GraphModule, GraphModule]:
        found = lengthen(forward, backward, self.last, outputs)
        self.are_long = True
        return found


def take_out(graph: Graph, short: Shortened) -> LeftOut:
    """Take the stand-in out of a joint graph, and then the inputs that nothing reads. ValueError if
    the layers' own tensors, which the stand-in takes, are no inputs of the graph, or if anything
    changes its gradients."""
    inputs = [n for n in graph.find_nodes(op="placeholder") if "tangents" not in str(n.target)]
    (forward,) = graph.find_nodes(op="call_function", target=layers.default)
    _, own, example = ([_source(n) for n in some] for some in forward.args)
    theirs = set(own)
    of_layers = [own[i : i + short.own] for i in range(0, len(own), short.own)]
    names = [[node.name for node in some] for some in (*of_layers, example)]

    output: Any = graph.output_node()
    values = list(output.args[0])
    ahead = len(values) - len(inputs)
    calls = [forward, *graph.find_nodes(op="call_function", target=layers_backward.default)]
    if not {*own, *example} <= {*inputs} or not _are_grads(calls[1:], inputs, values[ahead:]):
        raise ValueError("a layer's inputs or gradients are changed")
    for call in calls:
        _bypass(call)
    returned = dict(zip(inputs, values[ahead:], strict=True))
    grads = [None if node in theirs else returned[node] for node in inputs]
    output.args = ([*values[:ahead], *grads],)
    _erase_unused(graph)
    unread = [node for node in inputs if not node.users and node not in theirs]
    unread_names = {n.name: v.name if (v := returned[n]) is not None else None for n in unread}

    left_out = LeftOut(short, inputs, dict(enumerate(names, short.template)), unread_names)
    places = [*range(ahead), *(ahead + i for i in left_out.kept)]
    output.args = ([values[i] for i in places],)
    descriptions = output.meta.get("desc")
    if isinstance(descriptions, list) and len(descriptions) == len(values):
        output.meta["desc"] = [descriptions[i] for i in places]
    for node in (*own, *unread):
        graph.erase_node(node)
    graph.set_codegen(CodeGen())  # the former one nests inputs and outputs, some of which are gone
    return left_out


def _source(node: Node) -> Node:
    """What ``node`` is a view of."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _are_grads(calls: Sequence[Node], inputs: Sequence[Node], values: Sequence[Any]) -> bool:
    """Whether the stand-in has one backward, and each gradient that it gives is returned for its
    input, unchanged. ``values`` are the gradients that are returned for ``inputs``, one by one."""
    if len(calls) != 1 or len(inputs) != len(values):
        return False
    passed, wanted = calls[0].args
    given = {_source(n): i for i, n in enumerate(wanted, len(passed))}  # type: ignore[arg-type,union-attr]
    found = {
        node: (_source(value).args if isinstance(value, Node) else None)
        for node, value in zip(inputs, values, strict=True)
        if node in given
    }
    return found == {node: (calls[0], i) for node, i in given.items()}


def _bypass(call: Node) -> None:
    """Have readers of the results that the stand-in passes on read what it takes instead, and have
    fake values on the storages of these results lie on the storages of what it takes."""
    passed: Sequence[Node] = call.args[0]  # type: ignore[assignment]
    owner: dict[int | None, Any] = {}  # by the storage of a result, the value in its place
    for item in list(call.users):
        at: int = item.args[1]  # type: ignore[assignment]
        if at < len(passed):
            item.replace_all_uses_with(passed[at])
            owner[_torch.storage_of(item.meta["val"])] = passed[at].meta["val"]
    if any(v.storage_offset() or not v.is_contiguous() for v in owner.values()):
        raise ValueError("what goes from layer to layer is a part of something")

    def moved(value: Tensor) -> Tensor:
        home = owner.get(_torch.storage_of(value))
        return value if home is None else _torch.fake_again(value, home)

    for node in call.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _torch.tree_map_only(Tensor, moved, node.meta["val"])


def _erase_unused(graph: Graph) -> None:
    """Erase the stand-in, and views that nothing reads."""
    ours = {operator.getitem, layers.default, layers_backward.default}
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and (node.target in ours or is_view(node)):
            graph.erase_node(node)


def lengthen(
    forward: GraphModule, backward: GraphModule, left_out: LeftOut, outputs: int
) -> tuple[GraphModule, GraphModule]:
    """The forward and backward graph with all layers, made from the two that the joint graph was
    cut into. The first ``outputs`` outputs of forward are not for backward."""
    short = left_out.short
    own = {
        (example, number): name
        for number, names in left_out.inputs_of.items()
        for example, name in zip(left_out.example, names, strict=True)
    }
    layouts = [
        laid_out(gm.graph, short.numbering, short.template, of_one_size=True)
        for gm in (forward, backward)
    ]
    _refuse_outputs_of_layers(layouts[0], outputs)
    ahead = Deep(layouts[0], short.numbering, short.more, own=own)
    seeds = of_both(layouts[0].seeds, layouts[1].seeds)
    behind = Deep(layouts[1], short.numbering, short.more, ahead.renamed, seeds=seeds)
    _return_gradients(backward.graph, behind, left_out, _used_before_template(layouts[0]))
    saved = _saved_first(ahead.graph, behind.graph)
    output: Any = ahead.graph.output_node()
    output.args = ((*output.args[0][:outputs], *saved),)
    output.meta = {}  # it described the outputs of before
    _inputs_in_order(ahead.graph, left_out)
    return _torch.graph_module(forward, ahead.graph), _torch.graph_module(backward, behind.graph)


def _refuse_outputs_of_layers(layout: LayeredGraph, outputs: int) -> None:
    """Raise if forward returns something of each layer, such as the new value of a buffer."""
    output: Any = layout.graph.output_node()
    for value in output.args[0][:outputs]:
        if value in layout.place and layout.place[value].layer <= layout.template:
            raise ValueError(f"forward returns {value}, of a layer in the middle")


def _used_before_template(forward: LayeredGraph) -> set[str]:
    """Names of the inputs that something ahead of the template uses first."""
    ahead = [*forward.before, *itertools.chain(*forward.layers[: forward.template])]
    used = {node for one in ahead for node in one.all_input_nodes}
    return {node.name for node in used if node.op == "placeholder"}


def _return_gradients(short: Graph, behind: Deep, left_out: LeftOut, early: Set[str]) -> None:
    """Have backward return a gradient, or None, for each input that the joint graph had. ``early``
    are the names of inputs of what is ahead of the template in forward, so behind it in backward,
    though their gradients may stand among the template's nodes, or among a copy's."""
    before: Any = short.output_node()
    values = before.args[0]
    names = [left_out.inputs[i].name for i in left_out.kept]
    returned = dict(zip(names, values, strict=True))
    by_name = {node.name: node for node in behind.graph.nodes}
    found: dict[str, Any] = {name: behind.made.get(v, v) for name, v in returned.items()}
    at_end = {name: v for name, v in returned.items() if name in early and isinstance(v, Node)}
    found |= {name: behind.at_end(v) for name, v in at_end.items()}
    found |= {name: by_name[v] if v else None for name, v in left_out.unread.items()}
    for number, layer in left_out.inputs_of.items():
        for name, example in zip(layer, left_out.example, strict=True):
            value = returned[example]
            found[name] = behind.counterpart(value, number) if isinstance(value, Node) else value
    output = behind.graph.output_node()
    output.args = (tuple(found[node.name] for node in left_out.inputs),)
    output.meta = {}  # it described the outputs of before


def _saved_first(forward: Graph, backward: Graph) -> list[Node]:
    """Put the inputs that backward takes from forward ahead of its other inputs, in the order that
    AOTAutograd wants: tensors, then tensors whose versions it does not compare, then what is no
    tensor. Return the nodes of forward that give them."""
    known = {node.name: node for node in forward.nodes}
    inputs = list(backward.find_nodes(op="placeholder"))
    saved = sorted(
        (node for node in inputs if node.name in known),
        key=lambda node: _torch.order_of_saved(known[node.name]),
    )
    rest = [node for node in inputs if node.name not in known]
    _put_first(backward, [*saved, *rest])
    return [known[node.name] for node in saved]


def _inputs_in_order(graph: Graph, left_out: LeftOut) -> None:
    made = {node.name: node for node in graph.find_nodes(op="placeholder")}
    first = next(iter(graph.nodes))
    for node in left_out.inputs:
        if node.name not in made:
            with graph.inserting_before(first):
                made[node.name] = graph.placeholder(node.name)
            made[node.name].meta = dict(node.meta)
    names = dict.fromkeys(node.name for node in left_out.inputs)
    _put_first(graph, [made[name] for name in names | dict.fromkeys(made)])


def _put_first(graph: Graph, nodes: Sequence[Node]) -> None:
    for node in reversed(nodes):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
