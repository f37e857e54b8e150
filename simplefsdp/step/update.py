"""An optimizer's step as a graph, and where the tensors that it reads and writes are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim.optimizer import Optimizer

from simplefsdp import _torch
from simplefsdp._torch import updates


Owner = tuple[int, int]  # of a parameter, its group's number and its own in that


class Place(NamedTuple):
    """Where an optimizer has a tensor.

    Attributes:
        kind: what it is: a parameter, its gradient, a state of it, or an option of its group.
        group: number of the parameter group.
        index: number of the parameter in it; -1 of an option.
        key: name of the state or of the option.
    """

    kind: Literal["param", "grad", "state", "option"]
    group: int
    index: int = -1
    key: str = ""

    @property
    def owner(self) -> Owner | None:
        """The parameter that it belongs to."""
        return None if self.kind == "option" else (self.group, self.index)


class Update(NamedTuple):
    """What an optimizer's step computes.

    Attributes:
        graph: of Dynamo's; without results.
        places: what its placeholders and attributes stand for.
        hyperparameters: the numbers that the graph has in it.
    """

    graph: Graph
    places: dict[Node, Place]
    hyperparameters: object


def tensor_at(optimizer: Optimizer, place: Place) -> Tensor:
    """The tensor that is there now."""
    group = optimizer.param_groups[place.group]
    if place.kind == "option":
        return group[place.key]  # type: ignore[no-any-return]
    param = group["params"][place.index]
    return optimizer.state[param][place.key] if place.kind == "state" else param


def capture(optimizer: Optimizer) -> Update:
    """The update of all parameters that are trained, as if each had a gradient.

    Each parameter is updated by operators of its own, whatever ``foreach`` and ``fused`` say: an
    update can run as soon as its gradient is there. Learning rates must be tensors.

    Raises:
        ValueError: the step cannot be followed, or uses what is no parameter, gradient, state or
            option.
    """
    name = type(optimizer).__name__
    with _one_by_one(optimizer), _zero_gradients(optimizer):
        try:
            graph, tensors = updates.captured_step(optimizer)
        except Exception as error:
            raise ValueError(
                f"optimizer: {name}.step() cannot be compiled into the training step: "
                f"{str(error).splitlines()[0]}; compile the model alone"
            ) from error
        known = {id(tensor): place for place, tensor in _all_tensors(optimizer)}
    unknown = [node.name for node, tensor in tensors.items() if id(tensor) not in known]
    if unknown:
        raise ValueError(
            f"optimizer: {name}.step() reads or writes tensors that are neither parameters, "
            f"gradients, their state nor options of their groups ({unknown[0]}, and "
            f"{len(unknown) - 1} more); compile the model alone"
        )
    places = {node: known[id(tensor)] for node, tensor in tensors.items()}
    return Update(graph, places, hyperparameters(optimizer))


def hyperparameters(optimizer: Optimizer) -> object:
    """What a graph of the step has in it as numbers: all options that are no tensors, and which
    parameters are trained."""
    return [
        (
            {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)},
            [param.requires_grad for param in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def owners_of(update: Update) -> dict[Node, set[Owner]]:
    """The parameters that each node of an update belongs to: what it is made of is theirs."""
    owners: dict[Node, set[Owner]] = {}
    for node in update.graph.nodes:
        found = set().union(*(owners[n] for n in node.all_input_nodes))
        place = update.places.get(node)
        owners[node] = found | ({place.owner} if place and place.owner else set())
    return owners


def _trained(optimizer: Optimizer) -> Iterator[tuple[Place, nn.Parameter]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param.requires_grad:
                yield Place("param", g, i), param


def _all_tensors(optimizer: Optimizer) -> Iterator[tuple[Place, Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        options = ((k, v) for k, v in group.items() if isinstance(v, Tensor))
        yield from ((Place("option", g, key=key), value) for key, value in options)
    for place, param in _trained(optimizer):
        yield place, param
        if param.grad is not None:
            yield place._replace(kind="grad"), param.grad
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                yield place._replace(kind="state", key=key), value


@contextmanager
def _zero_gradients(optimizer: Optimizer) -> Iterator[None]:
    params = [param for _, param in _trained(optimizer)]
    for param in params:
        param.grad = torch.zeros_like(param)
    try:
        yield
    finally:
        for param in params:
            param.grad = None


@contextmanager
def _one_by_one(optimizer: Optimizer) -> Iterator[None]:
    """Have the optimizer update each parameter by itself."""
    before: list[dict[str, Any]] = [
        {key: group[key] for key in ("foreach", "fused") if key in group}
        for group in optimizer.param_groups
    ]
    for group, own in zip(optimizer.param_groups, before, strict=True):
        group |= dict.fromkeys(own, False)
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group |= own
