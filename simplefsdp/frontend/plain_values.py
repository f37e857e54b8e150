"""A plain model's tensors, loaded by ``load_state_dict``: each rank keeps its own part of them.

Nothing is sent, so every rank must load the same; ``loaded.py`` has that compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp._torch import has_memory, weak_memory_of
from simplefsdp.frontend.loaded import note
from simplefsdp.frontend.wrapped import check_own_rows, fqn_of, layouts_of


@dataclass
class _Assigning:
    """One ``load_state_dict(assign=True)``, of whatever module.

    Attributes:
        messages: the list of errors that torch makes for each load: it tells loads apart.
        owners: by the memory and layout of a value, the first parameter that gets it.
    """

    messages: list[str]
    owners: dict[tuple[Any, ...], tuple[weakref.ref[nn.Module], str]] = field(default_factory=dict)


_last = [_Assigning([])]


def load(
    module: nn.Module,
    load_it: Callable[..., None],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *args: Any,
) -> None:
    """Have ``load_it``, torch's method, put ``state_dict`` into the own parameters of ``module``.
    Plain values of the whole shape become DTensors of this rank's part, and are noted."""
    given: dict[str, Tensor | None] = {}
    assigning = None
    if local_metadata.get("assign_to_params_buffers"):
        if _last[0].messages is not args[-1]:
            _last[0] = _Assigning(args[-1])
        assigning = _last[0]

    def shard(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        _shard_plain(module, state_dict, prefix, assigning, given)

    shard(module, state_dict, prefix)
    # And behind the user's hooks, which may give values other names.
    handle = module.register_load_state_dict_pre_hook(shard)
    try:
        load_it(module, state_dict, prefix, local_metadata, *args)
    finally:
        handle.remove()
    for name, value in given.items():
        note(module, name, fqn_of(module, name), value)


def _shard_plain(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    assigning: _Assigning | None,
    given: dict[str, Tensor | None],
) -> None:
    """Replace values in ``state_dict``; ``given`` gets the plain ones, and None for shards."""
    for name in layouts_of(module):
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(value, Tensor) or not isinstance(param, DTensor):
            continue
        if isinstance(value, DTensor):
            check_own_rows(fqn_of(module, name), value, param)
            given.setdefault(name, None)
        elif value.shape == param.shape:
            given[name] = value = value.detach()
            tied = None if assigning is None else _tied(module, name, value, assigning)
            if tied is None:
                shard = distribute_tensor(
                    value, param.device_mesh, param.placements, src_data_rank=None
                )
            else:
                owner, first = tied
                shard = state_dict[prefix + first] if owner is module else owner._parameters[first]
            state_dict[prefix + name] = shard.detach()


def _tied(
    module: nn.Module, name: str, value: Tensor, assigning: _Assigning
) -> tuple[nn.Module, str] | None:
    """The parameter that gets the same ``value`` before this one, so that both have one memory, as
    in the plain model; None if this one is the first."""
    memory, param = weak_memory_of(value), module._parameters[name]
    if not has_memory(value) or not value.numel() or not isinstance(param, DTensor):
        return None
    where = param.device_mesh, param.placements
    key = (memory, value.storage_offset(), value.shape, value.stride(), value.dtype, *where)
    owner, first = assigning.owners.setdefault(key, (weakref.ref(module), name))
    found = owner()
    return None if found is None or (found is module and first == name) else (found, first)
