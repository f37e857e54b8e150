"""The graph of a whole training step: the loss, its gradients, their norm, and the update."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.optim.optimizer import Optimizer

from simplefsdp._torch.updates import add_input, copied_graph
from simplefsdp.compiler.dedupe import gathers_of
from simplefsdp.frontend.grad_norm import clipped
from simplefsdp.step.scalars import Scalars
from simplefsdp.step.update import Owner, Site, Update, owners_of, tensor_at


@torch.compiler.allow_in_graph
def note_loss(loss: Tensor | None, kind: str) -> Tensor:
    """Gives ``loss``. Its node in a graph marks which value the loss is; ``kind`` names the class
    of a loss that is no tensor."""
    return loss  # type: ignore[return-value]


class WholeStep(NamedTuple):
    """A graph that trains.

    Its first inputs and results are those of the graph of the loss; the results are detached. The
    last result is the norm of the gradients, if they are clipped.
    """

    gm: GraphModule
    inputs: list[Any]  # all inputs, to compile it with; those that were added are fake tensors
    sites: list[Site]  # where the optimizer has the inputs that follow those of the loss
    numbers: list[int]  # the results of ``scalars`` that are the next inputs, by index
    seed: Tensor  # its last input: the gradient of the loss, which is one
    trained: frozenset[Owner]  # the parameters that are updated


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
    """Append gradients, clipping and update to the graph of a loss.

    Args:
        gm: the graph, in which :func:`note_loss` is called once. It is not changed.
        inputs: the graph's inputs; parameters among them are the model's own tensors.
        optimizer: those of its parameters that the graph reads are updated.
        update: the optimizer's step.
        scalars: the part of the update that is computed outside of the graph.
        max_norm: of the gradients, see :func:`simplefsdp.clip_grad_norm_`; None: no clipping.
        fqns: names of parameters, by ``id``, for error messages.

    Raises:
        TypeError: the loss is no tensor.
        ValueError: the loss is not one number, or depends on no parameter that is trained; a
            gradient is to be deferred, or belongs to a tensor that is not trained; or the optimizer
            updates a parameter that the loss reads together with one that it does not read.
    """
    gm = copied_graph(gm)
    (loss,) = gm.graph.find_nodes(op="call_function", target=note_loss)
    _check(gm, loss)
    like: Tensor = loss.meta["example_value"]
    nodes = _params_read(gm, inputs, optimizer, update)
    _refuse_others(gm, inputs, nodes.values(), fqns)
    trained = frozenset(site.owner for site in nodes if site.owner)
    of_update = _nodes_of(update, scalars, trained)
    sites = [
        site
        for site in dict.fromkeys(update.sites[n] for n in of_update if n in update.sites)
        if site.kind != "grad" and site not in nodes
    ]
    used = {n for node in of_update for n in node.all_input_nodes}
    numbers = [i for i, node in enumerate(scalars.results) if node in used]
    seed = torch.ones(like.shape, dtype=like.dtype, device=like.device)
    fakes: list[Any] = []

    def added(name: str, tensor: Tensor) -> Node:
        node, fake = add_input(gm, name, tensor, like)
        fakes.append(fake)
        return node

    known = nodes | {s: added(f"{s.kind}_{s.key}", tensor_at(optimizer, s)) for s in sites}
    values = {scalars.results[i]: added(f"number_{i}", scalars.examples[i]) for i in numbers}
    of_loss = added("gradient_of_loss", seed)
    names = [fqns.get(id(tensor_at(optimizer, s)), f"parameter {s.number}") for s in nodes]
    norm, grads = _gradients(gm, loss, of_loss, list(nodes.values()), names, max_norm)
    known |= {s._replace(kind="grad"): grad for s, grad in zip(nodes, grads, strict=True)}
    _append(gm, of_update, values, {n: known[s] for n, s in update.sites.items() if s in known})
    _finish(gm, loss, norm)
    return WholeStep(gm, [*inputs, *fakes], sites, numbers, seed, trained)


def _check(gm: GraphModule, loss: Node) -> None:
    value = loss.meta.get("example_value")
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        raise TypeError(
            f"loss: expected a tensor, got {loss.args[1] or type(value).__name__}; return the loss "
            "alone; where it reads a parameter by itself, take full_tensor() of that term, as in "
            "weight.square().sum().full_tensor()"
        )
    if value.shape and max(value.shape) > 1:
        raise ValueError(f"loss: expected one number, got a tensor of shape {tuple(value.shape)}")
    if not value.requires_grad:
        raise ValueError(
            "loss: it depends on no parameter that wants a gradient; compute it in floating point, "
            "from parameters that are not frozen, and not under no_grad"
        )
    for node in gathers_of(gm):
        if node.kwargs.get("until", "all") != "all":
            raise ValueError(
                f"{node.args[1]}: its gradient is to be deferred, but a step updates parameters: "
                "call it for the last micro-batch, outside of microbatch(model, is_last=False), or "
                "after set_requires_gradient_sync(True)"
            )


def _refuse_others(
    gm: GraphModule, inputs: Sequence[Any], trained: Collection[Node], fqns: Mapping[int, str]
) -> None:
    """Refuse inputs that require a gradient but are not trained: an eager backward would put that
    gradient into ``.grad``, or go on behind what was computed outside, and this graph does not."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False):
        wants = isinstance(value, Tensor) and value.requires_grad and node not in trained
        if wants and not value.is_leaf:
            raise ValueError(
                f"{node.name}: the loss reads what was computed outside and wants a gradient, and "
                "this step has no backward there: compute it in the loss, detach() it, or "
                "compile the model alone"
            )
        if wants:
            raise ValueError(
                f"{fqns.get(id(value), node.name)}: the loss reads it, it wants a gradient, and "
                "the optimizer does not train it, or did not as it made its state: freeze it "
                "(requires_grad_(False)), give it to the optimizer, or compile the model alone"
            )


def _params_read(
    gm: GraphModule, inputs: Sequence[Any], optimizer: Optimizer, update: Update
) -> dict[Site, Node]:
    """The placeholders of parameters that the optimizer trains, by their sites."""
    given = dict(zip(map(id, inputs), gm.graph.find_nodes(op="placeholder"), strict=False))
    sites = [site for site in dict.fromkeys(update.sites.values()) if site.kind == "param"]
    ids = {site: id(tensor_at(optimizer, site)) for site in sites}
    if not any(key in given for key in ids.values()):
        raise ValueError(
            "the loss reads no parameter that the optimizer trains: make the optimizer after "
            "simple_fsdp, and steps outside of simplefsdp.unsharded"
        )
    return {site: given[key] for site, key in ids.items() if key in given}


def _nodes_of(update: Update, scalars: Scalars, trained: frozenset[Owner]) -> list[Node]:
    """The nodes of an update that go into the graph: all except numbers, which are inputs, and
    except those of parameters that the loss does not read, which get no gradient."""
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


def _gradients(
    gm: GraphModule,
    loss: Node,
    seed: Node,
    params: list[Node],
    names: Sequence[str],
    max_norm: float | None,
) -> tuple[Node | None, list[Node]]:
    """Append the gradients, and their norm if they are clipped; then turn grad mode off."""
    graph = gm.graph
    norm = None
    with graph.inserting_before(graph.output_node()):
        found = graph.call_function(gradients, (tuple(names), loss.args[0], seed, *params))
        graph.call_function(torch._C._set_grad_enabled, (False,))
        if max_norm is not None:
            both = graph.call_function(clipped, (params, found, max_norm))
            norm, found = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
        each = [graph.call_function(operator.getitem, (found, i)) for i in range(len(params))]
    return norm, each


def _append(
    gm: GraphModule, nodes: Iterable[Node], values: dict[Node, Node], known: Mapping[Node, Node]
) -> None:
    """Append copies of the ``nodes`` of an update. ``known`` has the nodes that replace its
    tensors; ``values`` those that replace its numbers, and each copy is added to it."""
    with gm.graph.inserting_before(gm.graph.output_node()):
        for node in nodes:
            if node in known:
                values[node] = known[node]
            else:
                values[node] = gm.graph.node_copy(node, values.__getitem__)
                values[node].meta.pop("example_value", None)  # a tensor of another fake mode


def _finish(gm: GraphModule, loss: Node, norm: Node | None) -> None:
    graph = gm.graph
    output = graph.output_node()
    with graph.inserting_before(output):
        graph.call_function(torch._C._set_grad_enabled, (True,))
        results = [
            graph.call_method("detach", (r,)) if isinstance(r, Node) else r
            for r in cast(Sequence[Any], output.args[0])
        ]
    output.args = ((*results, *([] if norm is None else [norm])),)
    loss.replace_all_uses_with(cast(Node, loss.args[0]))
    graph.erase_node(loss)
    gm.recompile()


def gradients(
    fqns: Sequence[str], loss: Tensor, seed: Tensor, *params: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of ``params``, whose names are ``fqns``; AOTAutograd traces through this call.

    This is no closure, because the key of a graph on disk holds what it calls, with all arguments.
    """
    found = torch.autograd.grad(loss, params, seed, allow_unused=True)
    without = [fqn for fqn, grad in zip(fqns, found, strict=True) if grad is None]
    if without:
        raise ValueError(
            f"no gradient reaches {without[0]} ({len(without)} such parameters), which the loss "
            "reads: freeze it (requires_grad_(False)), or give the optimizer the others"
        )
    return found
