"""Initialisers that know nothing of shards: ``reset_parameters``, ``init_weights``, ``apply``.

FSDP2's users write ``model.to_empty(device=...)`` and then let the model initialise itself. Inside
such a method a parameter is read as a full, plain tensor, so that slices, orthogonal matrices and
``.data`` work; once nobody refers to it any more, rank 0's values go to everybody's shards, before
the next parameter is made whole. So no rank holds more than one full parameter, unless the
initialiser itself holds on to several.

:func:`simplefsdp.init_weights` needs no full parameter at all, and no communication.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from simplefsdp import uninitialised
from simplefsdp._torch import storage_use_count
from simplefsdp.placement import on_any_rank
from simplefsdp.rank_guard import agree, ranks_of
from simplefsdp.unsharded import full_of, write_back

INITIALISERS = (
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
        self.full = _full_parameter_of(param)
        self.alone = self._references()

    def _references(self) -> tuple[int, int]:
        return sys.getrefcount(self.full), storage_use_count(self.full)

    def is_held(self) -> bool:
        """Whether anyone on any rank refers to the full parameter, or to a view of it; collective.

        Ranks may differ: what one of them holds by a cycle, another's collector has freed.
        """
        here = self._references() != self.alone
        return on_any_rank([here], self.param.device_mesh)[0]

    def finish(self) -> None:
        if self.full.shape != self.param.shape:
            raise ValueError(
                f"an initialiser replaced a parameter of shape {tuple(self.param.shape)} by one of "
                f"shape {tuple(self.full.shape)}; change the model before simple_fsdp"
            )
        write_back(self.param, self.full)


def _full_parameter_of(param: DTensor) -> nn.Parameter:
    # Of an empty one there is nothing to gather.
    full = uninitialised.blank(param) if uninitialised.is_empty(param) else full_of(param)
    return nn.Parameter(full, requires_grad=param.requires_grad)


class _Flow(threading.local):
    pending: list[_Pending] | None = None
    what: str = ""  # the initialiser, for messages


_flow = _Flow()


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
            return entry.full
    for entry in [e for e in pending if not e.is_held()]:
        pending.remove(entry)
        entry.finish()
    # What follows is collective. A rank that initialises alone is told so, the first time.
    agree(f"{_flow.what}, which reads parameters", [_flow.what], ranks_of([param.device_mesh]))
    entry = _Pending(param)
    pending.append(entry)
    return entry.full


def sharded_original(param: Any) -> Any:
    """The shard whose full parameter ``param`` is, if an initialiser assigns it; else itself."""
    for entry in _flow.pending or ():
        if entry.full is param:
            return entry.param
    return param


def initialiser(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """The method ``name`` of ``cls``, for its wrapped instances: it reads full parameters."""

    @functools.wraps(getattr(cls, name))
    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = getattr(cls, name)
        if torch.compiler.is_compiling() or initialising():
            return method(self, *args, **kwargs)
        pending = _flow.pending = []
        _flow.what = f"{cls.__name__}.{name}()"
        try:
            result = method(self, *args, **kwargs)
            for entry in pending:
                entry.finish()
        finally:
            _flow.pending = None
        return result

    return initialise
