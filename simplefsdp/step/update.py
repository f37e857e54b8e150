"""An optimizer's step as a graph, and where the tensors that it reads and writes are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim.optimizer import Optimizer

from simplefsdp._torch import updates

Owner = tuple[int, int]  # of a parameter, its group's number and its own in that


class Site(NamedTuple):
    """Where an optimizer has a tensor.

    Attributes:
        kind: what it is: a parameter, its gradient, a state of it, or an option of its group.
        group: number of its parameter group.
        number: of the parameter in it; -1 of an option.
        key: name of the state or of the option.
    """

    kind: Literal["param", "grad", "state", "option"]
    group: int
    number: int = -1
    key: str = ""

    @property
    def owner(self) -> Owner | None:
        """The parameter that it belongs to."""
        return None if self.kind == "option" else (self.group, self.number)


class Update(NamedTuple):
    """What an optimizer's step computes.

    Attributes:
        graph: of Dynamo's; without results.
        sites: what its placeholders and attributes stand for.
        hyperparameters: the numbers that the graph has in it.
    """

    graph: Graph
    sites: dict[Node, Site]
    hyperparameters: object


RATE = "lr"  # the option that changes from step to step


def tensor_at(optimizer: Optimizer, site: Site) -> Tensor:
    """The tensor that is there now; of a number, one that holds it, as exactly as Python does."""
    group = optimizer.param_groups[site.group]
    if site.kind == "option":
        return torch.as_tensor(group[site.key], dtype=torch.float64)
    param = group["params"][site.number]
    return optimizer.state[param][site.key] if site.kind == "state" else param


def capture(optimizer: Optimizer) -> Update:
    """The update of all parameters that are trained, as if each had a gradient.

    Each parameter is updated by operators of its own, whatever ``foreach`` and ``fused`` say: an
    update can run as soon as its gradient is there. Learning rates are read from tensors.

    Raises:
        MakesState: the optimizer makes state of its first gradients; step once before.
        ValueError: the step cannot be followed, or uses what is no parameter, gradient, state or
            option.
    """
    name = type(optimizer).__name__
    before = {param: dict(state) for param, state in optimizer.state.items()}
    with _changed_options(optimizer), _zero_gradients(optimizer):
        try:
            graph, tensors = updates.captured_step(optimizer)
        except updates.MakesState:
            optimizer.state.clear()
            optimizer.state.update(before)
            raise
        except Exception as error:
            raise ValueError(
                f"optimizer: {name}.step() cannot be compiled into the training step: "
                f"{str(error).splitlines()[0]}; compile the model alone"
            ) from error
        known = {id(tensor): site for site, tensor in _all_tensors(optimizer)}
    unknown = [node.name for node, tensor in tensors.items() if id(tensor) not in known]
    if unknown:
        raise ValueError(
            f"optimizer: {name}.step() reads or writes tensors that are neither parameters, "
            f"gradients, their state nor options of their groups ({unknown[0]}, and "
            f"{len(unknown) - 1} more); compile the model alone"
        )
    sites = {node: known[id(tensor)] for node, tensor in tensors.items()}
    return Update(graph, sites, hyperparameters(optimizer))


def hyperparameters(optimizer: Optimizer) -> object:
    """What a graph of the step has in it as numbers: all options that are no tensors, but for the
    learning rate, and which parameters are trained."""
    skipped = ("params", RATE)
    return [
        (
            {k: v for k, v in group.items() if k not in skipped and not isinstance(v, Tensor)},
            [param.requires_grad for param in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def owners_of(update: Update) -> dict[Node, set[Owner]]:
    """The parameters that each node of an update belongs to: what it is made of is theirs."""
    owners: dict[Node, set[Owner]] = {}
    for node in update.graph.nodes:
        found = set().union(*(owners[n] for n in node.all_input_nodes))
        site = update.sites.get(node)
        owners[node] = found | ({site.owner} if site and site.owner else set())
    return owners


def _trained(optimizer: Optimizer) -> Iterator[tuple[Site, nn.Parameter]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param.requires_grad:
                yield Site("param", g, i), param


def _all_tensors(optimizer: Optimizer) -> Iterator[tuple[Site, Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        options = ((k, v) for k, v in group.items() if isinstance(v, Tensor))
        yield from ((Site("option", g, key=key), value) for key, value in options)
    for site, param in _trained(optimizer):
        yield site, param
        if param.grad is not None:
            yield site._replace(kind="grad"), param.grad
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                yield site._replace(kind="state", key=key), value


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
def _changed_options(optimizer: Optimizer) -> Iterator[None]:
    """Have the optimizer update each parameter by itself, at rates that are tensors."""
    keys = ("foreach", "fused", RATE)
    before = [{k: group[k] for k in keys if k in group} for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, before, strict=True):
        changed = {key: torch.tensor(v) if key == RATE else False for key, v in own.items()}
        group.update(changed | {k: v for k, v in own.items() if isinstance(v, Tensor)})
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)
