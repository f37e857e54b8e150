"""A plain model's tensors, loaded by ``load_state_dict``: each rank keeps its own part of them.

Nothing is sent, so every rank must load the same; ``given.py`` compares that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp._torch import has_memory
from simplefsdp.frontend.given import note
from simplefsdp.frontend.wrapped import fqn_of, layouts_of

# While a state dict is loaded, and others by its hooks: the first one is for all of them. By memory
# and layout, a value and the shard that was made of it.
_made: list[dict[tuple[Any, ...], tuple[Tensor, DTensor]]] = []


@contextmanager
def one_load() -> Iterator[None]:
    """Inside, tied parameters that get the same value by ``assign=True`` get the same shard."""
    _made.append({})
    try:
        yield
    finally:
        _made.pop()


def members(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For the subclass of ``cls``: its ``load_state_dict``."""

    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with one_load():
            return cls.load_state_dict(self, *args, **kwargs)

    return {load_state_dict.__name__: load_state_dict}


def load(
    module: nn.Module,
    load_it: Callable[..., None],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Have ``load_it``, torch's method, put ``state_dict`` into the own parameters of ``module``.
    Plain values of the whole shape become DTensors of this rank's part, and are noted."""
    given: dict[str, Tensor | None] = {}

    def shard(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        assigns = bool(local_metadata.get("assign_to_params_buffers"))
        _shard_plain(module, state_dict, prefix, assigns, given)

    shard(module, state_dict, prefix)
    # And behind the user's hooks, which may give values other names.
    handle = module.register_load_state_dict_pre_hook(shard)
    try:
        load_it(module, state_dict, prefix, local_metadata, *args, **kwargs)
    finally:
        handle.remove()
    for name, value in given.items():
        note(module, name, fqn_of(module, name), value)


def _shard_plain(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    assigns: bool,
    given: dict[str, Tensor | None],
) -> None:
    """Replace values in ``state_dict``; ``given`` gets the plain ones, and None for shards."""
    for name in layouts_of(module):
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(value, Tensor) or not isinstance(param, DTensor):
            continue
        if isinstance(value, DTensor):
            given.setdefault(name, None)
        elif value.shape == param.shape:
            given[name] = value.detach()
            state_dict[prefix + name] = _shard_of(given[name], param, assigns)


def _shard_of(value: Tensor, param: DTensor, assigns: bool) -> DTensor:
    """This rank's part of ``value``; what is assigned is made once of each value of a load."""
    where = param.device_mesh, param.placements
    if not (assigns and _made and has_memory(value) and value.numel()):
        return distribute_tensor(value, *where, src_data_rank=None)
    key = (value.data_ptr(), value.shape, value.stride(), value.dtype, *where)
    if key not in _made[0]:  # with the value, lest another one gets its memory
        _made[0][key] = value, distribute_tensor(value, *where, src_data_rank=None)
    return _made[0][key][1]
