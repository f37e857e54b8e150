"""Whole parameters outside of forward: to look at, to write to, to initialise.

A *full* here is the parameter of the global shape in its own dtype, on every rank; tensor
parallelism is undone, too. What is written to it on rank 0 goes to the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp import rank_guard
from simplefsdp._torch import has_no_data
from simplefsdp.frontend import loaded, uninitialised
from simplefsdp.frontend.after_wrap import mark_full
from simplefsdp.frontend.assigned import refuse_assigned_since
from simplefsdp.frontend.buffers import buffers_of, send_written
from simplefsdp.frontend.placement import (
    distribute,
    dtensor_like,
    from_first_rank,
    off_the_wire,
    on_the_wire,
    share_memory,
)
from simplefsdp.frontend.recurrent import second_lists
from simplefsdp.frontend.slots import (
    Slot,
    agree_to_leave,
    carry_over,
    ends_of,
    mesh_of,
    refuse_new_places,
    restore,
    slots_of,
)
from simplefsdp.frontend.wrapped import plain_classes, wrapped_in


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
    wrapped = wrapped_in("module", module)
    with plain_classes(wrapped), second_lists(wrapped):
        yield


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside, ``module`` is the plain model: full, plain, writable parameters on every rank.

    Code that knows nothing of shards works inside: ``merge_and_unload``, an orthogonal
    initialisation, ``generate``, ``save_pretrained``, any method that computes. At the end the
    values *of rank 0* go to everybody's shards, and what rank 0 has written to buffers goes to
    everybody's buffers. Collective at both ends: every rank must enter and leave. If an exception
    passes on any rank, nothing is written back and every rank raises. A parameter that is set to
    None or deleted stays so; ``requires_grad`` and other attributes of parameters go to the shards.

    Every rank holds all full parameters of ``module`` meanwhile; for a large model go through its
    submodules one by one.

    Args:
        module: wrapped by :func:`simplefsdp.simple_fsdp`, or a part or parent of such a module.
        writeback: False if nothing is written inside: the shards stay as they are.

    Raises:
        ValueError: nothing in ``module`` is wrapped; or, at the end, a parameter has another shape
            or dtype than before, got a gradient or a hook, which the shard would not have, is no
            longer tied to what it was tied to, or has another name; or rank 0 has written to a
            buffer that has another size on this rank.
        RankMismatchError: at the end, another rank failed, or did something else.
    """
    wrapped = wrapped_in("module", module)
    slots, buffers = slots_of(module), buffers_of(module) if writeback else []
    mesh, fulls = mesh_of(slots), _fulls_of(slots)
    with plain_classes(wrapped):
        for slot in slots:
            slot.owner._parameters[slot.name] = fulls[id(slot.param)]
        try:
            with second_lists(wrapped):
                yield
            refuse_new_places(module, slots)
            ends = ends_of(slots, fulls)
        except Exception as error:
            if writeback:
                # The other ranks raise it; this rank has an error of its own.
                with suppress(rank_guard.RankMismatchError):
                    agree_to_leave(mesh, [], [], error)
            raise
        finally:
            restore(slots)
    if writeback:
        agree_to_leave(mesh, ends, [buffer.path for buffer in buffers], None)
    carry_over(ends)
    if writeback:
        loaded.forget(end.slot.param for end in ends)
        for end in ends:
            write_back(end.slot.param, end.full, end.slot.groups_of_copies())
        if mesh is not None:
            send_written(buffers, mesh)


def _fulls_of(slots: list[Slot]) -> dict[int, nn.Parameter]:
    """The full parameter for each shard, by its ``id``; collective."""
    fulls: dict[int, nn.Parameter] = {}
    refuse_assigned_since(slot.param for slot in slots)
    for slot in slots:
        if id(slot.param) not in fulls:
            made = uninitialised.full_like(slot.param, full_of(slot.param))
            fulls[id(slot.param)] = mark_full(made, slot.fqn)
    return fulls


@torch.no_grad()
def full_of(param: DTensor) -> Tensor:
    """The global tensor of ``param``, on every rank; collective over its mesh."""
    local = param.to_local()
    if has_no_data(local):
        return local.new_empty(param.shape)
    full = off_the_wire(dtensor_like(param, on_the_wire(local)).full_tensor(), param.dtype)
    # Of a parameter that is whole on every rank, full_tensor() is the shard itself.
    return full.clone() if share_memory(full, local) else full


@torch.no_grad()
def write_back(
    param: DTensor, full: Tensor, groups_of_copies: Iterable[dist.ProcessGroup] = ()
) -> None:
    """Give every rank its shard of rank 0's ``full``; collective over the parameter's mesh, and
    over ``groups_of_copies``: groups with ranks outside of the mesh that hold copies."""
    if has_no_data(full):
        return
    full = full.detach().to(param.device).contiguous()
    from_first_rank(on_the_wire(full), groups_of_copies)
    param.to_local().copy_(distribute(full, param.device_mesh, param.placements).to_local())
