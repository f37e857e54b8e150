"""Whole parameters outside of forward: to look at, to write to, to initialise.

A *full* here is the parameter of the global shape in its own dtype, on every rank; tensor
parallelism is undone, too. What is written to it on rank 0 goes to the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp._torch import has_no_data
from simplefsdp.after_wrap import mark_full
from simplefsdp.placement import as_bytes, distribute
from simplefsdp.wrapped import is_wrapped, plain_classes, shards_of


@contextmanager
def raw_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, a parameter read anywhere is the sharded DTensor itself, and sends nothing.

    Outside of a forward that is so anyway; this is for code that calls a forward, or that a
    forward calls.

    Args:
        module: wrapped by :func:`simplefsdp.simple_fsdp`, or a part or parent of such a module.

    Raises:
        ValueError: nothing in ``module`` is wrapped.
    """
    with plain_classes(_wrapped_in(module)):
        yield


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside, ``module`` is the plain model: full, plain, writable parameters on every rank.

    What code does that knows nothing of shards works inside: ``merge_and_unload``, an orthogonal
    initialisation, ``generate``, ``save_pretrained``, any method that computes. At the end the
    values *of rank 0* go to everybody's shards. Collective at both ends: every rank must enter
    and leave. If an exception passes, nothing is written back.

    Every rank holds all full parameters of ``module`` meanwhile; for a large model go through its
    submodules one by one.

    Args:
        module: wrapped by :func:`simplefsdp.simple_fsdp`, or a part or parent of such a module.
        writeback: False if nothing is written inside: the shards stay as they are.

    Raises:
        ValueError: nothing in ``module`` is wrapped; or, at the end, a parameter has another shape
            or dtype than before, or got a gradient, which the shard would not have.
    """
    slots = [
        _Slot(owner, name, param)
        for owner in _wrapped_in(module)
        for name, param in shards_of(owner)
    ]
    full_by_id: dict[int, nn.Parameter] = {}
    for *_, param in slots:
        if id(param) not in full_by_id:
            made = nn.Parameter(full_of(param), requires_grad=param.requires_grad)
            full_by_id[id(param)] = mark_full(made)
    with plain_classes(_wrapped_in(module)):
        for owner, name, param in slots:
            owner._parameters[name] = full_by_id[id(param)]
        try:
            yield
            written = {id(slot.param): (slot.param, _full_in(slot)) for slot in slots}
        finally:
            _restore(slots)
    if writeback:
        for param, full in written.values():
            if full is not None:
                write_back(param, full)


class _Slot(NamedTuple):
    owner: nn.Module
    name: str
    param: DTensor


def _restore(slots: list[_Slot]) -> None:
    for owner, name, param in slots:
        if name in owner._parameters:
            owner._parameters[name] = cast(nn.Parameter, param)


def _full_in(slot: _Slot) -> Tensor | None:
    """The full parameter that a module ends with; None if it was taken away."""
    full = slot.owner._parameters.get(slot.name)
    if full is None:
        return None
    if full.grad is not None:
        raise ValueError(
            f"unsharded: {slot.name} of {type(slot.owner).__name__} got a gradient, which would be "
            "lost: it is that of a full parameter, on this rank alone; call backward outside"
        )
    if full.shape != slot.param.shape or full.dtype != slot.param.dtype:
        raise ValueError(
            f"unsharded: {slot.name} of {type(slot.owner).__name__} was {tuple(slot.param.shape)} "
            f"{slot.param.dtype} and is {tuple(full.shape)} {full.dtype}; shapes and dtypes are "
            "fixed by simple_fsdp: change the model before the wrap"
        )
    return full


def _wrapped_in(module: nn.Module) -> list[nn.Module]:
    found = [m for m in module.modules() if is_wrapped(m)] if isinstance(module, nn.Module) else []
    if not found:
        raise ValueError(
            f"module: expected a module wrapped by simple_fsdp, or one that holds such a module, "
            f"got {type(module).__name__}"
        )
    return found


@torch.no_grad()
def full_of(param: DTensor) -> Tensor:
    """The global tensor of ``param``, on every rank; collective over its mesh."""
    local = param.to_local()
    if has_no_data(local):
        return local.new_empty(param.shape)
    whole = DTensor.from_local(
        as_bytes(local),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    full = whole.full_tensor().view(param.dtype)
    # Of a parameter that is whole on every rank, full_tensor() is the shard itself.
    shares = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if shares else full


@torch.no_grad()
def write_back(param: DTensor, full: Tensor) -> None:
    """Give every rank its shard of rank 0's ``full``; collective over the parameter's mesh."""
    if has_no_data(full):
        return
    full = full.detach().to(param.device).contiguous()
    param.to_local().copy_(distribute(full, param.device_mesh, param.placements).to_local())
