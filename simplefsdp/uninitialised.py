"""Parameters that ``to_empty`` gave memory but nobody gave values.

Their memory is filled with NaN and they carry a mark. A parameter that is read in forward while
it is marked and still has a NaN raises by name, where training would go on with whatever the
memory held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp._torch import is_to_empty
from simplefsdp.wrapped import shards_of

_MARK = "_simple_fsdp_uninitialised"


def is_marked(param: Tensor) -> bool:
    """Whether ``param`` was emptied and has not been seen with values since."""
    return _MARK in param.__dict__


def apply_marking(
    module: nn.Module, apply: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``module._apply(fn)``, that marks those of its own parameters that ``fn`` leaves empty."""
    before = {name: param.is_meta or is_marked(param) for name, param in shards_of(module)}
    result = apply(module, fn, *args, **kwargs)
    for name, param in shards_of(module):
        if not param.is_meta and (before.get(name) or is_to_empty(fn)):
            _poison(param)
    return result


@torch.no_grad()
def _poison(param: DTensor) -> None:
    if can_hold_nan(param):
        param.to_local().fill_(float("nan"))
        setattr(param, _MARK, True)


def can_hold_nan(param: Tensor) -> bool:
    """Whether an empty ``param`` can be told from one with values; integers and float8 cannot."""
    floats = param.dtype.is_floating_point or param.dtype.is_complex
    return floats and param.dtype.itemsize > 1


def blank(param: DTensor) -> Tensor:
    """A full tensor, without values, for an initialiser to write to."""
    full = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return full.fill_(float("nan")) if can_hold_nan(param) else full


def check_again(param: Tensor) -> bool:
    """Take the mark off ``param`` if it has values by now; whether it has."""
    if not is_marked(param):
        return True
    local = param.to_local() if isinstance(param, DTensor) else param
    if bool(torch.isnan(local.detach()).any()):
        return False
    delattr(param, _MARK)
    return True


def refuse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if any of these parameters was never given values.

    Raises:
        ValueError: names up to five of them.
    """
    missing = [fqn for fqn, param in named if not check_again(param)]
    if missing:
        raise ValueError(
            f"{', '.join(missing[:5])}{f' and {len(missing) - 5} more' if missing[5:] else ''}: "
            "to_empty() gave memory but nothing gave values; initialise the model "
            "(simplefsdp.init_weights(model), or the model's own reset_parameters() or "
            "init_weights()), or load a checkpoint"
        )
