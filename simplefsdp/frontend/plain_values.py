"""A plain model's tensors, loaded by ``load_state_dict``: each rank keeps its own part of them.

Nothing is sent, so every rank must load the same. If one does not, parameters would be put together
of two models: new rows on rank 0, and old ones on rank 1. So ranks compare what they were given,
through the process group's store: the names, and two means of some elements of each.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp.frontend.wrapped import LAYOUTS, fqn_of
from simplefsdp.rank_guard import RankMismatchError, agree, decided, ranks_of, waiting_s

_SAMPLES = 512  # elements of a tensor that are looked at
# Other seeds differ by some 7 % in the mean of so many elements. Files that were converted, or
# merged, on each rank by itself may differ by what is rounded.
_TOLERANCE = 1e-3
_WHAT = "what load_state_dict was given"
_LATE = (
    "Each rank keeps its part of a plain model's tensors, so every rank must load them. With the "
    "tensors on rank 0 only, use torch.distributed.checkpoint.state_dict.set_model_state_dict(..., "
    "options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)) on all ranks"
)

# Of a load that goes on: by the ranks that share it, the names and what was seen of each.
_given: dict[tuple[int, ...], dict[str, Tensor]] = {}
_loads: list[nn.Module] = []  # that go on, within one another


def shard_plain_values(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the values in ``state_dict`` for the own parameters of ``module`` by DTensors of this
    rank's part, as far as they are plain and whole."""
    for name in module.__dict__.get(LAYOUTS, ()):
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_plain and isinstance(param, DTensor) and value.shape == param.shape:
            value = value.detach()
            ranks = ranks_of([param.device_mesh])
            if len(ranks) > 1:
                _given.setdefault(ranks, {})[fqn_of(module, name)] = _means(value)
            state_dict[prefix + name] = distribute_tensor(
                value, param.device_mesh, param.placements, src_data_rank=None
            )


def members(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For the subclass of ``cls``: a ``load_state_dict`` after which ranks compare what they were
    given. It raises :class:`RankMismatchError` for different names or values, and if ranks do not
    come."""

    @functools.wraps(cls.load_state_dict)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _loads.append(self)
        try:
            result = cls.load_state_dict(self, *args, **kwargs)
        except BaseException:
            _given.clear()
            raise
        finally:
            _loads.pop()
        compare_given()
        return result

    return {"load_state_dict": load_state_dict}


def compare_given(*_: object) -> None:
    """Compare what has been given since the last call; as a hook, for a wrapped model inside a
    plain one, by which ``load_state_dict`` was called."""
    if _loads:
        return
    given = dict(_given)
    _given.clear()
    for ranks, seen in given.items():
        names, values = list(seen), torch.stack([means.cpu() for means in seen.values()]).tolist()
        agree(_WHAT, names, ranks, remember=False, late=_LATE)
        told = decided(_WHAT, names, ranks, partial(json.dumps, values), waiting_s(), _LATE)
        for name, own, lowest in zip(names, values, json.loads(told), strict=True):
            if not _are_close(own, lowest):
                raise RankMismatchError(
                    f"{name}: load_state_dict was given other values on this rank than on rank "
                    f"{min(ranks)}: of some elements, the means are {own} and {lowest}. {_LATE}"
                )


def _means(value: Tensor) -> Tensor:
    """The means of some elements, and of their sizes: ``[2]``, in float64; zeros for a tensor
    without elements, and one whose class hides them."""
    if type(value) is not Tensor or value.is_meta or not value.numel():
        return torch.zeros(2, dtype=torch.float64)
    value = torch.view_as_real(value) if value.is_complex() else value
    each = math.ceil(_SAMPLES ** (1 / max(1, value.dim())))
    some = value[tuple(slice(None, None, max(1, n // each)) for n in value.shape)]
    some = some.to(torch.float32).double()  # by float32, for not all dtypes have a cast to float64
    return torch.stack([some.mean(), some.abs().mean()])


def _are_close(one: list[float], other: list[float]) -> bool:
    if any(not math.isfinite(x) for x in (*one, *other)):
        return str(one) == str(other)
    least = _TOLERANCE * max(one[1], other[1])
    return all(abs(a - b) <= least for a, b in zip(one, other, strict=True))
