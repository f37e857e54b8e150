"""An optimizer's step as a graph, and where to find the tensors that the graph reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim.optimizer import Optimizer

from simplefsdp._torch import updates
from simplefsdp.step.hyperparameters import RATE, hyperparameters, unchanged

Owner = tuple[int, int]  # a parameter, as the index of its group and its index in that group


class Site(NamedTuple):
    """The place where an optimizer has a tensor."""

    # The tensor is a parameter, its gradient, a state of it, or an option of its group.
    kind: Literal["param", "grad", "state", "option"]
    group: int  # index of the parameter group
    number: int = -1  # index of the parameter in its group; -1 for an option
    key: str = ""  # name of the state or of the option

    @property
    def owner(self) -> Owner | None:
        """The parameter that the tensor belongs to; None for an option."""
        return None if self.kind == "option" else (self.group, self.number)


class Update(NamedTuple):
    """What an optimizer's step computes."""

    graph: Graph  # a Dynamo graph without results
    sites: dict[Node, Site]  # the tensors that its placeholders and attributes stand for
    hyperparameters: dict[str, Any]  # of the optimizer for which the graph is valid
    # Its parameters: kept alive, since ``hyperparameters`` identifies them by ``id``.
    params: list[nn.Parameter]


def tensor_at(optimizer: Optimizer, site: Site) -> Tensor:
    """The tensor that is at ``site`` now. An option that is a Python number is given as a 0-d
    float64 tensor on the CPU, which holds it exactly."""
    group = optimizer.param_groups[site.group]
    if site.kind == "option":
        value = group[site.key]
        if isinstance(value, Tensor):
            return value
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    param = group["params"][site.number]
    return optimizer.state[param][site.key] if site.kind == "state" else param


def params_of(optimizer: Optimizer) -> dict[Owner, nn.Parameter]:
    """All parameters of an optimizer, by their indices."""
    return {
        (g, i): param
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
    }


def capture(optimizer: Optimizer, without_gradient: Container[Owner] = ()) -> Update:
    """Trace the update of the parameters that are trained, as if each had a gradient.

    Each parameter is updated by operators of its own, whatever ``foreach`` and ``fused`` say, so
    that an update can run as soon as its gradient is ready. Learning rates are read from tensors.

    Args:
        optimizer: is left unchanged, except that parameters without state get their initial state.
        without_gradient: parameters that are known to get no gradient.

    Raises:
        MakesState: the optimizer makes its state from the first gradients; run one step before.
        ValueError: the step cannot be traced; or it uses a tensor that is no parameter, gradient,
            state or option, or it changes Python numbers.
    """
    name = type(optimizer).__name__
    params = params_of(optimizer)
    trained = {o: p for o, p in params.items() if p.requires_grad and o not in without_gradient}
    with unchanged(optimizer), _changed_options(optimizer), _zero_gradients(trained.values()):
        known_state = {(param, key) for param, of in optimizer.state.items() for key in of}
        try:
            graph, tensors = updates.captured_step(optimizer)
        except updates.MakesState:
            raise
        except Exception as error:
            raise ValueError(
                f"optimizer: {name}.step() cannot be compiled into the training step: "
                f"{_reason(error)}; compile the model alone"
            ) from error
        known = {id(tensor): site for site, tensor in _all_tensors(optimizer)}
    unknown = [node.name for node, tensor in tensors.items() if id(tensor) not in known]
    if unknown:
        raise ValueError(
            f"optimizer: {name}.step() reads or writes tensors that are neither parameters, "
            f"gradients, their state nor options of their groups ({unknown[0]}, and "
            f"{len(unknown) - 1} more); compile the model alone"
        )
    _move_counts(optimizer, known_state)
    sites = {node: known[id(tensor)] for node, tensor in tensors.items()}
    return Update(graph, sites, hyperparameters(optimizer), list(params.values()))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation:")]
    return ": ".join([*lines[:1], *told[:1]]).removesuffix(".")


# Numbers that torch's optimizers keep on the CPU unless their kernels read them on the device;
# except ASGD's, which are always on the device. Other 0-d states are moments of 0-d parameters.
_COUNTS = ("step", "mu_product")


def _move_counts(optimizer: Optimizer, before: Container[tuple[Tensor, str]]) -> None:
    """Move newly made counts to the device on which the optimizer itself would make them: the trace
    changes ``fused`` and ``capturable``, and makes counts on the device of the parameters."""
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        if not (on_device or "capturable" in group) or isinstance(optimizer, torch.optim.ASGD):
            continue
        for param in group["params"]:
            of_param = optimizer.state.get(param, {})
            for key in [k for k in _COUNTS if k in of_param and (param, k) not in before]:
                if isinstance(of_param[key], Tensor):
                    device = param.device if on_device else torch.device("cpu")
                    of_param[key] = of_param[key].to(device)


def owners_of(update: Update) -> dict[Node, set[Owner]]:
    """For each node of an update, the parameters whose tensors it is computed from."""
    owners: dict[Node, set[Owner]] = {}
    for node in update.graph.nodes:
        found = set().union(*(owners[n] for n in node.all_input_nodes))
        site = update.sites.get(node)
        owners[node] = found | ({site.owner} if site and site.owner else set())
    return owners


def _all_tensors(optimizer: Optimizer) -> Iterator[tuple[Site, Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        options = ((k, v) for k, v in group.items() if isinstance(v, Tensor))
        yield from ((Site("option", g, key=key), value) for key, value in options)
    for (g, i), param in params_of(optimizer).items():
        yield Site("param", g, i), param
        if param.grad is not None:
            yield Site("grad", g, i), param.grad
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                yield Site("state", g, i, key), value


@contextmanager
def _zero_gradients(params: Collection[nn.Parameter]) -> Iterator[None]:
    for param in params:
        param.grad = torch.zeros_like(param)
    try:
        yield
    finally:
        for param in params:
            param.grad = None


@contextmanager
def _changed_options(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the optimizer updates each parameter by itself, and each group's learning rate is a
    tensor of its own. The options are restored at the end, also ``capturable``: before 2.15 Dynamo
    sets it where parameters are on a GPU, and leaves it so."""
    keys = ("foreach", "fused", "capturable", RATE)
    before = [{k: group[k] for k in keys if k in group} for group in optimizer.param_groups]
    for g, group in enumerate(optimizer.param_groups):
        for key in before[g]:
            rate = key == RATE and tensor_at(optimizer, Site("option", g, key=key)).detach().clone()
            group[key] = rate
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)
