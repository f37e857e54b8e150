"""A plain model's tensors, loaded by ``load_state_dict``: each rank keeps its own part of them.

Nothing is sent, so every rank must load the same. If one does not, parameters would be put together
of two models: new rows on rank 0, and old ones on rank 1. Ranks may load at different times, and in
different pieces, so nothing is compared then: each notes what it was given, and they compare that
when they compute with it, through the process group's store. Other names are an error. Other values
are a warning, since a few elements are looked at, which may differ by what each rank has rounded.
"""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp._torch import dispatch_mode
from simplefsdp.frontend.wrapped import LAYOUTS, fqn_of
from simplefsdp.rank_guard import agree, decided, ranks_of, waiting_s

log = logging.getLogger("simplefsdp")

_ELEMENTS = 8  # of a tensor that are looked at
_TOLERANCE, _ROUNDED = (
    1e-3,
    2.0**-7,
)  # of float32, and of what may have been bfloat16, by its eighth
_WHAT = "what load_state_dict was given"
_LATE = (
    "Each rank keeps its part of a plain model's tensors, so every rank must load them before the "
    "next forward. With the tensors on rank 0 only, use torch.distributed.checkpoint.state_dict."
    "set_model_state_dict(..., options=StateDictOptions(full_state_dict=True, "
    "broadcast_from_rank0=True)) on all ranks"
)

# What was loaded since ranks compared last: by the default process group, and the ranks that share
# it, the names with some elements of each.
_given: WeakKeyDictionary[Any, dict[tuple[int, ...], dict[str, Tensor]]] = WeakKeyDictionary()


def shard_plain_values(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the values in ``state_dict`` for the own parameters of ``module`` by DTensors of this
    rank's part, as far as they are plain and whole; and note them, to be compared."""
    for name in module.__dict__.get(LAYOUTS, ()):
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(value, Tensor) or not isinstance(param, DTensor):
            continue
        is_whole = not isinstance(value, DTensor) and value.shape == param.shape
        note(fqn_of(module, name), param, value.detach() if is_whole else None)
        if is_whole:
            state_dict[prefix + name] = distribute_tensor(
                value.detach(), param.device_mesh, param.placements, src_data_rank=None
            )


def note(name: str, param: DTensor, value: Tensor | None) -> None:
    """Note that ``param`` was given a plain ``value``, under a name that is the same on all ranks;
    or, if that is None, a shard."""
    ranks = ranks_of([param.device_mesh])
    if len(ranks) < 2 or dispatch_mode() is not None:  # fake tensors have no values
        return
    given = _given.setdefault(dist.group.WORLD, {}).setdefault(ranks, {})
    given.pop(name, None)
    if value is not None:
        given[name] = _some_of(value)


def compare_given() -> None:
    """Compare with the other ranks what plain tensors this one was given, if it was since the last
    call; to be called where all ranks are about to communicate.

    Raises:
        RankMismatchError: others were given other names, or nothing, or do not come.
    """
    if not _given or not dist.is_initialized():
        return
    for ranks, some in sorted(_given.pop(dist.group.WORLD, {}).items()):
        if some:
            _compare(ranks, {name: some[name] for name in sorted(some)})


def _compare(ranks: tuple[int, ...], some: dict[str, Tensor]) -> None:
    # Not only names: a rank that was given nothing has other lines here, and tells these.
    lines = [f"load_state_dict was given {name}" for name in some]
    agree(_WHAT, lines, ranks, remember=False, late=_LATE)
    own = [values.tolist() for values in some.values()]
    told = decided(_WHAT, lines, ranks, partial(json.dumps, own), waiting_s(), _LATE)
    others = zip(some, own, json.loads(told), strict=True)
    if apart := [name for name, one, other in others if not _are_close(one, other)]:
        log.warning(
            "%s: load_state_dict was given other values on rank %d than on rank %d%s. Each rank "
            "keeps its part of a plain model's tensors, so all must load the same ones, unless "
            "each has filled in its own rows only",
            apart[0],
            dist.get_rank(),
            min(ranks),
            f", and for {len(apart) - 1} more parameters" if len(apart) > 1 else "",
        )


def _some_of(value: Tensor) -> Tensor:
    """Some elements, from the first to the last: ``[n]``, in float64; in front of them, how close
    they must be to those of another rank. Empty for a tensor whose class or dtype hides them."""
    tolerance = _TOLERANCE if value.dtype.itemsize > 2 else _ROUNDED
    nothing = torch.empty(0, dtype=torch.float64, device="cpu")
    if type(value) is not Tensor or value.is_meta or not value.numel():
        return nothing
    value = value.reshape(1) if value.dim() == 0 else value
    places = torch.arange(_ELEMENTS, device="cpu") * (value.numel() - 1) // (_ELEMENTS - 1)
    try:
        some = value[torch.unravel_index(places.to(value.device), value.shape)]
        some = some.resolve_conj().abs() if some.is_complex() else some
        some = some.to(torch.float32).to(torch.float64).cpu()  # not all dtypes have the second cast
    except RuntimeError:
        return nothing
    return torch.cat([torch.tensor([tolerance], dtype=torch.float64, device="cpu"), some])


def _are_close(one: list[float], other: list[float]) -> bool:
    """Whether elements, each behind a tolerance, are equal but for it, of the largest of them."""
    if not one or not other or one[1:] == other[1:]:
        return True
    if not all(map(math.isfinite, (*one, *other))):
        return str(one[1:]) == str(other[1:])
    least = max(one[0], other[0]) * max(map(abs, (*one[1:], *other[1:])))
    return all(abs(a - b) <= least for a, b in zip(one[1:], other[1:], strict=True))
