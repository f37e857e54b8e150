"""The state of a plain model's optimizer, in the optimizer of a wrapped model.

``model.load_state_dict`` takes a plain model's tensors, of which each rank keeps its own part. So
does ``optimizer.load_state_dict``, of state that has the shape of its parameter; ranks compare
that as they do a model's tensors (``loaded.py``). What was loaded before an optimizer's first
step is put in its place then: until a step, nothing tells which optimizers there are.

Only torch's optimizers, and torchao's, are known to keep state that is sharded as its parameter is.
Others may keep full plain tensors, as a Muon that gathers each gradient does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.optimizer import Optimizer

from simplefsdp._torch import local_tensor
from simplefsdp.frontend import living
from simplefsdp.frontend.loaded import note
from simplefsdp.frontend.placement import dtensor_like
from simplefsdp.frontend.wrapped import check_own_rows, fqn_of

_KNOWN = ("torch", "torchao")
_WATCHED = "_simple_fsdp_watched"  # on an optimizer: what it loads is sharded


def shard_plain_state(optimizer: Optimizer) -> None:
    """Shard what ``optimizer`` has loaded, and will load, of the whole shape of a parameter as that
    parameter is; and refuse shards of other ranks."""
    if _WATCHED not in optimizer.__dict__:
        optimizer.__dict__[_WATCHED] = True
        _shard_loaded(optimizer)
        with suppress(AttributeError):  # timm's Lookahead wraps another, and has no hooks itself
            optimizer.register_load_state_dict_post_hook(_shard_loaded)


def _shard_loaded(optimizer: Optimizer) -> None:
    states = list(_states_of(optimizer))
    for what, param, name, state, _ in states:
        if isinstance(state[name], DTensor):
            check_own_rows(what, state[name], param)
    classes = [cls for cls in type(optimizer).__mro__ if cls is not Optimizer]
    if any(cls.__module__.partition(".")[0] in _KNOWN for cls in classes):
        _shard_plain(states)


def _shard_plain(states: Sequence[_State]) -> None:
    shown: dict[str, set[bool]] = {}  # by key: whether what is kept of split parameters is local
    for _, param, name, state, _ in states:
        if _is_split(param):
            is_local = _is_plain(state[name]) and state[name].shape == local_tensor(param).shape
            shown.setdefault(name, set()).add(is_local)
    for what, param, name, state, (owner, its) in states:
        is_split, value = _is_split(param), state[name]
        is_plain = _is_plain_of(param, name, value) and (is_split or shown.get(name) != {True})
        if is_split:
            note(owner, its, what, value if is_plain else None)
        if is_plain:
            own = distribute_tensor(
                value, param.device_mesh, param.placements, src_data_rank=None
            ).to_local()
            # A copy: else the whole, of which this may be a view, would stay in memory.
            state[name] = dtensor_like(param, own.clone())


# What it is called, the parameter, the key in its state, that state, and the parameter's module and
# its name there.
_State = tuple[str, DTensor, str, dict[str, Any], tuple[nn.Module, str]]


def _states_of(optimizer: Optimizer) -> Iterator[_State]:
    """All that ``optimizer`` keeps of sharded parameters."""
    owners = living.owners()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state, owner = optimizer.state.get(param), owners.get(id(param))
        if isinstance(state, dict) and owner is not None:
            for name in list(state):
                yield f"{name} of {fqn_of(*owner)}", param, name, state, owner


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _is_split(param: DTensor) -> bool:
    """Else what has the shape of all of it may be what an optimizer keeps of this rank's shard."""
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(n > 1 and isinstance(p, Shard) and param.shape[p.dim] > 1 for p, n in sizes)


def _is_plain_of(param: DTensor, name: str, value: Any) -> bool:
    is_count = name == "step" and not param.dim()  # which has the shape of a scalar, too
    return _is_plain(value) and value.shape == param.shape and not is_count
