"""An optimizer's configuration: all that a graph of its step builds in, so no values of tensors."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

RATE = "lr"  # the option that changes from step to step
_NO_CONFIGURATION = (
    *("state", "param_groups"),  # looked at by themselves
    *("_opt_called", "_warned_capturable_if_run_uncaptured"),  # torch's notes of what has happened
)
_NUMBERS = (bool, int, float, complex, str, type(None), Enum, torch.dtype, torch.device)
_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


def hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """The configuration of an optimizer, keyed by names for messages: options that are no tensors,
    except the learning rate; attributes; the parameters, and which of them are trained; and the
    layout of their state."""
    found: dict[str, Any] = {}
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", RATE) and not isinstance(value, Tensor):
                found[f"param_groups[{g}][{key!r}]"] = _plain(value)
        found[f"param_groups[{g}]['params']"] = [(id(p), p.requires_grad) for p in group["params"]]
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        laid_out = [{key: _layout(value) for key, value in state.items()} for state in states]
        found[f"the state of param_groups[{g}]"] = laid_out
    attributes = _attributes(optimizer).items()
    return found | {f"optimizer.{key}": value for key, value in attributes if value is not _OPAQUE}


def fingerprint(optimizer: Optimizer) -> list[object]:
    """A cheaper substitute: it changes whenever :func:`hyperparameters` may have changed."""
    found: list[object] = []
    for group in optimizer.param_groups:
        found += [_plain(v) for k, v in group.items() if k not in ("params", RATE)]
        for param in group["params"]:
            found += [id(param), param.requires_grad]
            for key, value in optimizer.state.get(param, {}).items():
                is_tensor = isinstance(value, Tensor)
                found += [key, *((id(value), value.dtype) if is_tensor else (_plain(value),))]
    return [*found, *_attributes(optimizer).values()]


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    return {key: _plain(v) for key, v in vars(optimizer).items() if key not in _NO_CONFIGURATION}


def _layout(value: object) -> object:
    if not isinstance(value, Tensor):
        return _plain(value)
    placements = value.placements if isinstance(value, DTensor) else ()
    return type(value), value.dtype, value.device, value.shape, value.stride(), placements


_OPAQUE = "neither a number nor made of numbers"


def _plain(value: object, inside: tuple[int, ...] = ()) -> object:
    """``value`` as far as a graph may have built it in; what is ``inside`` of itself is opaque."""
    if isinstance(value, _NUMBERS):
        return value
    parts = _parts(value)
    if parts is None or id(value) in inside:
        return _OPAQUE
    plain = (_plain(part, (*inside, id(value))) for part in parts)
    return frozenset(plain) if isinstance(value, (set, frozenset)) else tuple(plain)


def _parts(value: object) -> Iterable[object] | None:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *(getattr(value, f.name) for f in fields(value))]
    return None


def _containers(value: object, inside: tuple[int, ...] = ()) -> Iterator[_Container]:
    """All that may have been changed in place in ``value``."""
    parts = _parts(value)
    if parts is None or id(value) in inside:
        return
    if isinstance(value, (dict, list, set, deque)):
        yield value
    for part in parts:
        yield from _containers(part, (*inside, id(value)))


def _restore(container: _Container, before: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(before)
    else:
        container.update(before)


def _refuse_global_state(optimizer: Optimizer) -> None:
    others = [key for key, of_param in optimizer.state.items() if not isinstance(of_param, dict)]
    if others:
        raise ValueError(
            f"optimizer: state[{others[0]!r}] is of no parameter, and a compiled step keeps the "
            "state of parameters alone: make it a tensor of each, or compile the model alone"
        )


@contextmanager
def unchanged(optimizer: Optimizer) -> Iterator[None]:
    """Restore an optimizer after its step was traced inside, even if that failed. State of
    parameters that had none before is kept if it succeeded.

    Raises:
        ValueError: the step changed a Python number, or the state holds one: a graph of the step
            would keep its first value for ever. Or there is state of no parameter.
    """
    _refuse_global_state(optimizer)
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    numbers = [{k: _plain(v) for k, v in group.items()} for group in options]
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _NO_CONFIGURATION}
    containers = [(c, copy.copy(c)) for c in _containers([options, attributes])]
    plain = _attributes(optimizer)
    state = {param: dict(of_param) for param, of_param in optimizer.state.items()}
    fine = False
    try:
        yield
        _refuse_global_state(optimizer)
        changed = [
            f"param_groups[{g}][{key!r}]"
            for g, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params" and _plain(value) != numbers[g].get(key, _OPAQUE)
        ]
        changed += [
            f"optimizer.{key}" for key, v in _attributes(optimizer).items() if v != plain.get(key)
        ]
        changed += [
            f"state[{key!r}]"
            for of_param in optimizer.state.values()
            for key, value in of_param.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if changed:
            raise ValueError(
                f"optimizer: {changed[0]} is a number of Python's that "
                f"{type(optimizer).__name__}.step() changes, which a compiled step cannot: make it "
                "a tensor, or compile the model alone"
            )
        fine = True
    finally:
        for container, before in containers:
            _restore(container, before)
        for group, before in zip(optimizer.param_groups, options, strict=False):
            group.update(before)
        vars(optimizer).update(attributes)
        for param in [p for p in optimizer.state if not fine and p not in state]:
            del optimizer.state[param]
        for param, before in state.items():
            if not fine:
                optimizer.state[param].clear()
            optimizer.state[param].update(before)
