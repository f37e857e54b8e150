"""Parameters that ``to_empty`` gave memory but nobody gave values.

Their memory is filled with NaN and they carry a mark. A parameter that is read in forward while
it is marked and still has a NaN raises by name, where training would go on with whatever the
memory held.

The mark is the same on every rank, because an initialiser communicates, or not, by it: so only
what all ranks agreed on takes it off. What a rank found out by itself is noted beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp._torch import has_no_data, is_to_empty
from simplefsdp.frontend.placement import highest_of_ranks, parameter_like
from simplefsdp.frontend.wrapped import shards_of
from simplefsdp.words import few

_MARK = "_simple_fsdp_uninitialised"
_SEEN = "_simple_fsdp_has_values"  # on this rank
_emptied: deque[object] = deque([object()], maxlen=1)


def last_emptied() -> object:
    """An object that is another one after each time that a parameter was emptied."""
    return _emptied[0]


def apply_marking(
    module: nn.Module, apply: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``module._apply(fn)``, which then marks own parameters of it that ``fn`` leaves empty."""
    # Now, because ``fn`` may swap what is in the parameters.
    before = {n: (param.is_meta, _MARK in param.__dict__) for n, param in shards_of(module)}
    try:
        result = apply(module, fn, *args, **kwargs)
    except RuntimeError as error:
        if "swap" in str(error) and not hasattr(error, "__notes__"):
            # torch's Dynamo refers to what an optimizer updates, for ever.
            error.add_note(
                "A compiled step, or a compiled optimizer, goes on with these parameters: cast or "
                "move the model before it, or a copy: copy.deepcopy(model).to(...)"
            )
        raise
    for name, param in shards_of(module):
        was_meta, was_marked = before[name]
        if param.is_meta:
            continue
        if is_to_empty(fn) or was_meta:
            _poison(param)
        elif was_marked:  # ``to(dtype)``, say: values and NaNs are kept
            setattr(param, _MARK, True)
    return result


@torch.no_grad()
def _poison(param: DTensor) -> None:
    if can_hold_nan(param):
        _emptied.append(object())
        param.to_local().fill_(float("nan"))
        setattr(param, _MARK, True)
        param.__dict__.pop(_SEEN, None)


def can_hold_nan(param: Tensor) -> bool:
    """Whether an empty ``param`` can be told from one with values; integers and float8 cannot."""
    floats = param.dtype.is_floating_point or param.dtype.is_complex
    return floats and param.dtype.itemsize > 1


def blank(param: DTensor) -> Tensor:
    """A full tensor, without values, for an initialiser to write to."""
    full = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return full.fill_(float("nan")) if can_hold_nan(param) else full


def full_like(param: DTensor, full: Tensor) -> nn.Parameter:
    """``full`` as a parameter in the place of ``param``: as trainable, with the user's marks."""
    made = parameter_like(param, full)
    for mark in (_MARK, _SEEN):
        made.__dict__.pop(mark, None)
    return made


def is_empty(param: DTensor) -> bool:
    """Whether ``param`` was emptied and no rank has a value of it, the same on every rank;
    collective if it was emptied. A parameter that got all its values loses its mark."""
    if _MARK not in param.__dict__:
        return False
    missing = torch.isnan(param.to_local().detach())
    # An empty shard says neither that a value is missing nor that there is one.
    here = (bool(missing.any()), bool((~missing).any()))
    some_missing, some_there = highest_of_ranks(here, param.device_mesh)
    if not some_missing:
        delattr(param, _MARK)
    return some_missing and not some_there


def was_emptied(param: Tensor) -> bool:
    """Whether ``param`` carries the mark, which is the same on every rank."""
    return _MARK in param.__dict__


def without_values(named: Iterable[tuple[str, Tensor, Tensor]]) -> list[str]:
    """FQNs of the parameters that were emptied and have got no values since. Each is given as its
    FQN, the parameter, and the tensor to look for values in: the full one, or the shard, by which
    only this rank can judge."""
    return [fqn for fqn, param, values in named if not _has_values(param, values)]


def _has_values(param: Tensor, values: Tensor) -> bool:
    if _MARK not in param.__dict__ or _SEEN in param.__dict__:
        return True
    missing = torch.isnan(values.detach()).any()
    if has_no_data(missing):  # inside a FakeTensorMode there is nothing to look at
        return True
    if bool(missing):
        return False
    setattr(param, _SEEN, True)
    return True


def refuse(missing: Sequence[str]) -> None:
    """Raise if any parameter was never given values."""
    if missing:
        raise ValueError(
            f"{few(missing)}: to_empty() gave memory but nothing gave values; initialise the "
            "model (simplefsdp.init_weights(model), or the model's own reset_parameters() or "
            "init_weights()), or load a checkpoint"
        )
