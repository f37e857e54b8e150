"""The graph of a whole training step: a loss, its gradients, their norm, and the update."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim.optimizer import Optimizer

from simplefsdp._torch.updates import add_input, copied_graph
from simplefsdp.frontend.grad_norm import clipped
from simplefsdp.step.scalars import Scalars
from simplefsdp.step.update import Owner, Place, Update, owners_of, tensor_at


@torch.compiler.allow_in_graph
def note_loss(loss: Tensor) -> Tensor:
    """``loss``; in a graph, the node that says which value it is."""
    return loss


class WholeStep(NamedTuple):
    """A graph that trains.

    Its first inputs and results are those of the graph of the loss; the results have no gradients.
    A last result is the norm of the gradients, if they are clipped.

    Attributes:
        gm: it.
        inputs: (fake) ones to compile it with.
        places: where the optimizer has its further inputs.
        numbers: which of the optimizer's numbers come behind them.
        seed: its last input: the gradient of the loss, one.
        trained: the parameters that are updated.
    """

    gm: GraphModule
    inputs: list[Any]
    places: list[Place]
    numbers: list[int]
    seed: Tensor
    trained: frozenset[Owner]


class _Inputs:
    """The inputs of a graph that is extended, in order.

    Attributes:
        fakes: of those that were added.
    """

    def __init__(self, gm: GraphModule, like: Tensor) -> None:
        self.gm, self.like = gm, like
        self.fakes: list[Any] = []

    def add(self, name: str, tensor: Tensor) -> Node:
        node, fake = add_input(self.gm, name, tensor, self.like)
        self.fakes.append(fake)
        return node


def whole_step(
    gm: GraphModule,
    inputs: Sequence[Any],
    optimizer: Optimizer,
    update: Update,
    scalars: Scalars,
    *,
    max_norm: float | None,
    fqns: Mapping[int, str],
) -> WholeStep:
    """Put gradients, clipping and update behind the graph of a loss.

    Args:
        gm: the graph, in which :func:`note_loss` is called once. It stays as it is.
        inputs: of it; parameters are the model's own.
        optimizer: whose parameters are updated, as far as the graph reads them.
        update: what it does.
        scalars: what of that is done outside of the graph.
        max_norm: of the gradients, see :func:`simplefsdp.clip_grad_norm_`; None: no clipping.
        fqns: of parameters, by ``id``, for errors.

    Raises:
        ValueError: the graph reads no parameter that is trained, or the optimizer updates one that
            is read together with one that is not.
    """
    gm = copied_graph(gm)
    graph = gm.graph
    (loss,) = graph.find_nodes(op="call_function", target=note_loss)
    given = dict(zip(map(id, inputs), graph.find_nodes(op="placeholder"), strict=False))
    known = {
        place: given[key]
        for place in dict.fromkeys(update.places.values())
        if place.kind == "param" and (key := id(tensor_at(optimizer, place))) in given
    }
    if not known:
        raise ValueError("the loss reads no parameter that the optimizer trains")
    trained = list(known)
    names = [fqns.get(id(tensor_at(optimizer, p)), f"parameter {p.index}") for p in trained]
    owners = frozenset(place.owner for place in trained if place.owner)
    nodes = _nodes_of(update, scalars, owners)
    added = _Inputs(gm, loss.meta["example_value"])
    places = [
        place
        for place in dict.fromkeys(update.places[n] for n in nodes if n in update.places)
        if place.kind != "grad" and place not in known
    ]
    known |= {p: added.add(f"{p.kind}_{p.key}", tensor_at(optimizer, p)) for p in places}
    used = {n for node in nodes for n in node.all_input_nodes}
    numbers = [i for i, node in enumerate(scalars.results) if node in used]
    values = {scalars.results[i]: added.add(f"number_{i}", _NUMBER) for i in numbers}
    one = torch.ones((), dtype=added.like.dtype, device=added.like.device)
    seed = added.add("gradient_of_loss", one)
    params = [known[place] for place in trained]
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        found = graph.call_function(_gradients_of(names), (loss.args[0], seed, *params))
        graph.call_function(torch._C._set_grad_enabled, (False,))
        norm: list[Node] = []
        if max_norm is not None:
            both = graph.call_function(clipped, (params, found, max_norm))
            found = graph.call_function(operator.getitem, (both, 1))
            norm = [graph.call_function(operator.getitem, (both, 0))]
        for i, place in enumerate(trained):
            known[place._replace(kind="grad")] = graph.call_function(operator.getitem, (found, i))
        for node in nodes:
            if node in update.places:
                values[node] = known[update.places[node]]
            else:
                values[node] = graph.node_copy(node, values.__getitem__)
                values[node].meta.pop("example_value", None)  # fake, of another mode
        graph.call_function(torch._C._set_grad_enabled, (True,))
        results = [
            graph.call_method("detach", (r,)) if isinstance(r, Node) else r
            for r in cast(Sequence[Any], output.args[0])
        ]
    output.args = ((*results, *norm),)
    loss.replace_all_uses_with(cast(Node, loss.args[0]))
    graph.erase_node(loss)
    gm.recompile()
    return WholeStep(gm, [*inputs, *added.fakes], places, numbers, one, owners)


_NUMBER = torch.zeros((), dtype=torch.float64)  # as what comes from outside of the graph


def _nodes_of(update: Update, scalars: Scalars, trained: frozenset[Owner]) -> list[Node]:
    """The nodes of an update but for numbers, and those of parameters that are not trained: these
    have no gradient, and are left alone."""
    found = []
    for node, owners in owners_of(update).items():
        if node in scalars.nodes or node.op == "output":
            continue
        if owners <= trained:
            found.append(node)
        elif owners & trained:
            raise ValueError(
                "optimizer: it updates several parameters together, of which the loss does not "
                "read all; give it those that the loss reads, or compile the model alone"
            )
    return found


def _gradients_of(fqns: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Computes the gradients of the parameters with these names; AOTAutograd traces through it."""

    def gradients(loss: Tensor, seed: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(loss, params, seed, allow_unused=True)
        without = [fqn for fqn, grad in zip(fqns, found, strict=True) if grad is None]
        if without:
            raise ValueError(
                f"no gradient reaches {without[0]} ({len(without)} such parameters), which the "
                "loss reads: freeze it (requires_grad_(False)), or give the optimizer the others"
            )
        return found

    return gradients
