"""Initialisers that know nothing of shards: ``reset_parameters``, ``init_weights``, ``apply``.

FSDP2's users write ``model.to_empty(device=...)`` and then let the model initialise itself. Inside
such a method a parameter is read as a full, plain tensor, so that slices, orthogonal matrices and
``.data`` work; once nobody refers to it any more, rank 0's values go to everybody's shards, before
the next parameter is made whole. So no rank holds more than one full parameter, unless the
initialiser itself holds on to several.

``parameters()`` and ``state_dict()`` give the shards there as elsewhere. Before they do, what was
written to full parameters goes to the shards; so one may use both, in turn.

Everything that communicates is decided alike on all ranks: whether a full parameter is still held
is what rank 0 says, for each rank collects garbage at another time.

:func:`simplefsdp.init_weights` needs no full parameter at all, and no communication.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, ItemsView, ValuesView
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp._torch import has_hooks, has_no_data, storage_use_count
from simplefsdp.frontend import loaded, uninitialised
from simplefsdp.frontend.full_parameters import full_of, write_back
from simplefsdp.frontend.placement import bits_of, highest_of_ranks, on_the_wire, rank_0s
from simplefsdp.frontend.reading import in_forward
from simplefsdp.frontend.wrapped import shards_of
from simplefsdp.rank_guard import agree, ranks_of_params

_INITIALISERS = (
    "apply",
    "reset_parameters",
    "_reset_parameters",
    "init_weights",
    "_init_weights",
    "initialize_weights",
    "_initialize_weights",
)


class _Pending:
    """A full parameter that an initialiser was given, and the shard that it belongs to."""

    def __init__(self, param: DTensor) -> None:
        self.param = param
        # Of a parameter without values there is nothing to gather.
        made = uninitialised.blank if uninitialised.is_empty(param) else full_of
        self.full = uninitialised.full_like(param, made(param))
        self.shard = _local(param).clone()  # as it was when both were equal

    def is_held(self) -> bool:
        """Whether anyone else refers to the full parameter, or a view of it; as rank 0 says.

        A transport refers for a moment longer to what it has gathered or sent. So the references
        are compared with those to a parameter that nobody was given, not with their number at
        first; and a parameter that nobody holds may stay until the next time."""
        # Both are counted in one place, since counting takes references, too.
        alone = SimpleNamespace(full=nn.Parameter(torch.empty(1, device=self.full.device)))
        is_held = self.full.numel() > 0 and _references(self) != _references(alone)
        return bool(rank_0s(int(is_held), self.param.device_mesh))

    def bring_up_to_date(self) -> None:
        """Write to the shards what was written to the full parameter, or, if anything was written
        to the shards since, to the full one; collective."""
        full, param = self.full, self.param
        self._check()
        if param.requires_grad != full.requires_grad:
            param.requires_grad_(full.requires_grad)
        param.__dict__.update(full.__dict__)
        if has_no_data(full):
            return
        own = distribute_tensor(
            on_the_wire(full.detach()), param.device_mesh, param.placements, src_data_rank=None
        )
        changed = (_differ(_local(own), self.shard), _differ(_local(param), self.shard))
        full_changed, shard_changed = highest_of_ranks(changed, param.device_mesh)
        if full_changed and shard_changed:
            raise ValueError(
                f"{_flow.what}: writes to a parameter of shape {tuple(param.shape)} by its name "
                "and to its shard by parameters(), and one would overwrite the other; read it "
                "anew after parameters() wrote to it"
            )
        if full_changed:
            loaded.forget([param])
            write_back(param, full)
        elif shard_changed:
            full.detach().copy_(full_of(param))
        if full_changed or shard_changed:
            self.shard = _local(param).clone()

    def _check(self) -> None:
        full, param = self.full, self.param
        if full.shape != param.shape or full.dtype != param.dtype:
            raise ValueError(
                f"{_flow.what}: made a parameter of shape {tuple(param.shape)} and {param.dtype} "
                f"one of {tuple(full.shape)} and {full.dtype}; change the model before simple_fsdp"
            )
        hooks = has_hooks(full)
        if hooks or full.grad is not None:
            raise ValueError(
                f"{_flow.what}: set {'hooks' if hooks else 'a gradient'} on a parameter of shape "
                f"{tuple(param.shape)}, which is a full one for the time of the initialiser; set "
                "them outside, on the parameter itself"
            )


def _references(holder: _Pending | SimpleNamespace) -> tuple[int, int]:
    """How many references there are to the full parameter of ``holder``, and to its memory."""
    return sys.getrefcount(holder.full), storage_use_count(holder.full)


def _local(tensor: DTensor) -> Tensor:
    return on_the_wire(tensor.to_local().detach())


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(bits_of(one), bits_of(other))


class _Flow(threading.local):
    pending: list[_Pending] | None = None
    what: str = ""  # the initialiser, for messages
    is_agreed: bool = False
    shards_were_given: bool = False  # to code that may write to them


_flow = _Flow()
_numbers = itertools.count(1)


def initialising() -> bool:
    """Whether the caller runs inside an initialiser of a wrapped module."""
    return _flow.pending is not None


def full_parameter(param: DTensor) -> nn.Parameter:
    """The full parameter that an initialiser reads in the place of ``param``."""
    pending = _flow.pending
    if pending is None:
        raise RuntimeError("full_parameter: called outside of an initialiser")
    for entry in pending:
        if entry.param is param:
            if _flow.shards_were_given:
                entry.bring_up_to_date()
            return entry.full
    if not _flow.is_agreed:
        # What follows is collective. The number makes this a new agreement each time, so that a
        # rank that initialises alone is told so, here or the next time.
        lines = [f"{_flow.what}, number {next(_numbers)}"]
        late = "Call it on all ranks, or, if values are loaded afterwards, on none"
        ranks = ranks_of_params([param])
        agree(f"{_flow.what}, which reads parameters", lines, ranks, late=late)
        _flow.is_agreed = True
    _flush(pending)
    entry = _Pending(param)
    pending.append(entry)
    return entry.full


def _flush(pending: list[_Pending]) -> None:
    """Write back, and forget what nobody holds any more."""
    for entry in list(pending):
        is_held = entry.is_held()  # before a transfer holds it, too
        entry.bring_up_to_date()
        if not is_held:
            pending.remove(entry)


def sharded_original(param: Any, current: Any) -> Any:
    """What to register when ``param`` is assigned in the place of ``current``. In an initialiser:
    the shard that a full ``param`` stands for; or ``current``, if that is a shard and ``param`` a
    new tensor, whose values the shard will get. Else ``param`` itself."""
    if not initialising():
        return param
    for entry in _flow.pending or ():
        if entry.full is param:
            return entry.param
    if not isinstance(current, DTensor) or isinstance(param, DTensor) or param is None:
        return param
    full_parameter(current)
    for entry in _flow.pending or ():
        if entry.param is current:
            entry.full = param
    return current


class _Shards(dict[str, Any]):
    """A module's ``_parameters`` for the time of an initialiser: code that reads all of them gets
    shards that are up to date."""

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        _give_shards()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        _give_shards()
        return super().values()


def _give_shards() -> None:
    _flush(_flow.pending or [])
    _flow.shards_were_given = True


def members(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For the subclass of ``cls``: initialisers that are methods; ``apply`` if it is torch's."""
    own = {name: inspect.getattr_static(cls, name, None) for name in _INITIALISERS}
    if cls.apply is not nn.Module.apply:
        del own["apply"]
    return {name: _initialiser(cls, name) for name, m in own.items() if isinstance(m, FunctionType)}


def _initialiser(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """The method ``name`` of ``cls``, for its wrapped instances: it reads full parameters."""

    @functools.wraps(getattr(cls, name))
    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = getattr(cls, name)
        if torch.compiler.is_compiling() or initialising() or in_forward():
            return method(self, *args, **kwargs)
        owners = [module for module in self.modules() if shards_of(module)]
        pending: list[_Pending] = []
        for module in owners:
            module.__dict__["_parameters"] = _Shards(module._parameters)
        _flow.pending, _flow.what = pending, f"{cls.__name__}.{name}()"
        _flow.is_agreed = _flow.shards_were_given = False
        try:
            result = method(self, *args, **kwargs)
            for entry in pending:
                entry.bring_up_to_date()
        finally:
            _flow.pending = None
            for module in owners:
                module.__dict__["_parameters"] = dict(module._parameters)
        return result

    return initialise
