"""A Dynamo graph without most of the layers that are alike, for AOTAutograd to trace.

Tracing and partitioning a layer take hundreds of milliseconds of Python, whatever its size. Here
layers that compute the same, node for node, are found in the Dynamo graph, which has all of them.
One operator (``stand_in.py``) takes the place of all but a few. Once the graph is partitioned, the
others' nodes are copied from those of a traced layer (``lengthen.py``)::

    0  1  [2 ... 28]  29  30  31     layers of a model; 29 is the template
    0  1  [stand-in]   2   3   4     as they are traced, and numbered
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from inductor_passes.adapters._torch import has_symbols
from inductor_passes.ir.buckets import repeated_modules
from simplefsdp._torch import graph_module, is_plain_tensor
from simplefsdp.compiler.dedupe import gathers_of
from simplefsdp.compiler.dynamo_layers import DynamoLayer
from simplefsdp.compiler.repeated_layers import Numbering
from simplefsdp.compiler.stand_in import stand_in
from simplefsdp.frontend.gather import gather
from simplefsdp.frontend.gather_spec import spec_of
from simplefsdp.rank_logging import speaks

log = logging.getLogger("simplefsdp")

HEAD, TAIL = 2, 2
"""How many layers are traced at least before the stand-in, and behind the template: the layer where
a graph begins or ends has other nodes, and so may the layer next to it."""

LEAST = 2
"""If fewer layers than this could be left out, all are traced."""

MOST_KINDS = 8
"""If more kinds of layers than this alternate, all layers are traced."""


@dataclass(frozen=True)
class Shortened:
    """A graph with a stand-in."""

    gm: GraphModule
    numbering: Numbering  # of the layers
    template: int  # number of the traced layer that those left out are like
    # How many layers are left out. In the model their numbers begin with ``template``; the template
    # and the layers behind it have numbers there that are higher by ``more`` than in ``gm``.
    more: int
    own: int  # how many inputs a layer has for itself


def shorten(gm: GraphModule) -> Iterator[Shortened]:
    """``gm`` with a stand-in for the layers that need not be traced; nothing if all must be traced.
    A second candidate, for when the first cannot be compiled, has one traced layer more."""
    members = repeated_modules([str(node.args[1]) for node in gathers_of(gm)])
    lists = Counter(member.rpartition(".")[0] for member in members)
    if not lists:
        return
    numbering = Numbering(lists.most_common(1)[0][0])
    if not _is_plain(gm, numbering):
        return
    body = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    layers, tail = _layers(body, numbering), TAIL
    described = _described(layers, numbering)
    runs = {period: _longest_run(described, period) for period in range(1, MOST_KINDS + 1)}
    # The shortest period of those by which most layers are like the one a period ahead of them.
    period = max(runs, key=lambda period: _length(runs[period]) - period)
    if _length(runs[period]) < (HEAD + LEAST) * period:
        return
    if period > 1:
        tail += len(layers) % period > 0  # the last ones are no whole period
        numbering = replace(numbering, period=period)
        layers = _layers(body, numbering)
        runs[1] = _longest_run(_described(layers, numbering))
    if not all(layer.reads_its_own_parameters(numbering) for layer in layers):
        return
    first, last = runs[1]
    last = min(last - 1, len(layers) - 1 - tail)  # the template; a layer like it comes behind it
    # In backward, which goes through the layers in reverse, a layer's nodes end where those of the
    # layer ahead of it begin: so there, too, a layer like the template must come behind.
    is_near = first > 0 and _does_the_same(layers[first - 1], layers[first], numbering)
    for begin in [first + 1, first + 2] if is_near else [first + 2]:
        found = _with_stand_in(gm, layers, range(max(begin, HEAD), last), numbering)
        if found is not None:
            yield found


def _with_stand_in(
    gm: GraphModule, layers: Sequence[DynamoLayer], left_out: range, numbering: Numbering
) -> Shortened | None:
    if len(left_out) < LEAST:
        return None
    first = left_out.start
    if not _passes_gradients(layers[first - 1], layers[first]):
        return None
    if any(map(_reads_what_is_written, layers[first : left_out.stop + 2])):
        return None
    return _without(gm, layers, left_out, numbering)


def _layers(body: Sequence[Node], numbering: Numbering) -> list[DynamoLayer]:
    """The layers of a graph; none if they do not stand one behind the other, by their numbers."""
    begins = _begins(body, numbering)
    if list(begins) != list(range(len(begins))):
        return []
    cuts = [*begins.values(), len(body)]
    return [DynamoLayer(body[i:j], number) for number, (i, j) in enumerate(pairwise(cuts))]


def _described(layers: Sequence[DynamoLayer], numbering: Numbering) -> list[list[Hashable]]:
    pairs = zip([None, *layers], layers, strict=False)
    return [layer.described(before, numbering) for before, layer in pairs]


def _does_the_same(layer: DynamoLayer, following: DynamoLayer, numbering: Numbering) -> bool:
    """Whether ``layer``, the first, is like the ``following`` one, but for that no layer made its
    inputs; and whether its backward begins with a gather, as that of the others does."""
    gathers = (spec_of(node) for node in layer.nodes if node.target is gather)
    if any(spec.shard_ranks == 1 for spec in gathers):
        return False
    return layer.done(numbering) == following.done(numbering)


def _is_plain(gm: GraphModule, numbering: Numbering) -> bool:
    """Whether layers of ``gm`` may be left out: all parameters want gradients, none is deferred, no
    full parameter is kept, no size is open, and names alone tell what is in the list of layers."""
    output = gm.graph.output_node()
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    if not torch.is_grad_enabled() or not any(getattr(v, "requires_grad", False) for v in values):
        return False
    gathers = gathers_of(gm)
    params: list[Any] = [node.args[0] for node in gathers]
    if not all(getattr(p.meta.get("example_value"), "requires_grad", False) for p in params):
        return False  # a frozen DTensor is two inputs of the joint graph, and one gradient
    fqns = [str(node.args[1]) for node in gathers]
    others = [fqn for fqn in fqns if numbering.of(fqn) is None]
    if any(node.kwargs for node in gathers) or any(numbering.moved(f, 1) != f for f in others):
        return False
    seen = (pytree.tree_leaves(node.meta.get("example_value")) for node in gm.graph.nodes)
    return not any(map(has_symbols, seen))


def _begins(body: Sequence[Node], numbering: Numbering) -> dict[int, int]:
    """Where each layer has its first gather, by its number, in the order of the graph."""
    begins: dict[int, int] = {}
    for at, node in enumerate(body):
        number = numbering.of(str(node.args[1])) if node.target is gather else None
        if number is not None:
            begins.setdefault(number, at)
    return begins


def _longest_run(described: Sequence[list[Hashable]], period: int = 1) -> tuple[int, int]:
    """The indices of the first and the last layer of the longest run in which each layer is like
    the one ``period`` ahead of it, except the first ``period`` layers of the run."""
    best = begin = 0, period - 1
    for i, (before, layer) in enumerate(zip(described, described[period:], strict=False), period):
        begin = (begin[0], i) if before == layer else (i - period + 1, i)
        best = max(best, begin, key=_length)
    return best


def _length(run: tuple[int, int]) -> int:
    return run[1] - run[0] + 1


def _passes_gradients(before: DynamoLayer, layer: DynamoLayer) -> bool:
    """Whether what goes from layer to layer is plain tensors, all with gradients, and what a layer
    has for itself is tensors or their shards."""
    values = [node.meta.get("example_value") for node in layer.taken(before)]
    own = [node.meta.get("example_value") for node in layer.own]
    locals_ = [v._local_tensor if isinstance(v, DTensor) else v for v in own]
    if not values or not all(map(is_plain_tensor, (*values, *locals_))):
        return False
    return all(value.requires_grad for value in values)  # type: ignore[union-attr]


def _reads_what_is_written(layer: DynamoLayer) -> bool:
    """Whether anything that a layer reads from outside is ever written to: Dynamo ran each node on
    fake tensors, whose version counters count writes."""
    used = {n for node in layer.nodes for n in node.all_input_nodes if n not in layer.at}
    values = [node.meta.get("example_value") for node in used]
    return any(isinstance(value, Tensor) and value._version for value in values)


def _without(
    gm: GraphModule, layers: Sequence[DynamoLayer], left_out: range, numbering: Numbering
) -> Shortened | None:
    """``gm`` with a stand-in for the layers ``left_out``, in front of the template."""
    template, last = layers[left_out.stop], layers[left_out.stop - 1]
    if elsewhere := _read_elsewhere([layers[i] for i in (*left_out, left_out.stop)]):
        _tell_of_outputs(elsewhere, template.taken(last), numbering.layers)
        return None
    skipped = {node for i in left_out for node in layers[i].nodes}
    skipped |= {n for n in gm.graph.find_nodes(op="get_attr") if skipped.issuperset(n.users)}
    renamed = {node for layer in layers[left_out.stop :] for node in layer.nodes}
    own = [node for i in left_out for node in layers[i].own]
    begin = layers[left_out.start].nodes[0]
    graph, made = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node is begin:
            passed = [made[n] for n in layers[left_out.start].taken(layers[left_out.start - 1])]
            inputs = [[made[n] for n in some] for some in (own, template.own)]
            found = graph.call_function(stand_in, (passed, *inputs))
            for i, value in enumerate(template.taken(last)):
                made[value] = graph.call_function(operator.getitem, (found, i))
                made[value].meta = {"example_value": value.meta.get("example_value")}
        if node not in skipped:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node in renamed:
                _renumber(made[node], numbering, -len(left_out))
    short = graph_module(gm, graph)
    short.meta = gm.meta
    return Shortened(short, numbering, left_out.start, len(left_out), len(template.own))


def _read_elsewhere(layers: Sequence[DynamoLayer]) -> list[Node]:
    """Nodes of ``layers``, without the last one, that anything reads but their own layer and the
    next one."""
    return [
        node
        for layer, following in pairwise(layers)
        for node in layer.nodes
        if any(user not in layer.at and user not in following.at for user in node.users)
    ]


def _tell_of_outputs(found: Sequence[Node], passed: Sequence[Node], layers: str) -> None:
    """Warn if forward returns activations of each layer, with gradients, as caches of keys and
    values are: tensors of at least a 16th of what passes from layer to layer, so not a loss."""
    most = max(node.meta["example_value"].numel() for node in passed)
    returned = (node for node in found if any(user.op == "output" for user in node.users))
    for value in (node.meta.get("example_value") for node in returned):
        if isinstance(value, Tensor) and value.requires_grad and 16 * value.numel() >= most:
            _warn_of_outputs(layers)


@cache
def _warn_of_outputs(layers: str) -> None:
    if speaks():
        log.warning(
            "%s: forward returns activations of each layer: they stay in memory until backward, "
            "which adds zeros for their gradients, and all layers are traced. If they are caches "
            "of keys and values, as of Hugging Face's models at their defaults, set "
            "model.config.use_cache = False to train",
            layers,
        )


def _renumber(node: Node, numbering: Numbering, by: int) -> None:
    """Have a node belong to the layer whose number is higher ``by`` so much."""
    if node.target is gather:
        node.args = (node.args[0], numbering.moved(str(node.args[1]), by), *node.args[2:])
    if stack := node.meta.get("nn_module_stack"):
        node.meta["nn_module_stack"] = numbering.stack_moved(stack, by)
