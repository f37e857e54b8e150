"""Where full parameters stand for shards inside ``unsharded``, and what becomes of them at its end.

Whatever code did to a full parameter is done to its shard, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simplefsdp import rank_guard
from simplefsdp._torch import has_hooks
from simplefsdp.frontend.after_wrap import stands_for_shard
from simplefsdp.frontend.placement import joined
from simplefsdp.frontend.wrapped import (
    SPLIT_BESIDE,
    fqn_of,
    is_wrapped,
    layouts_of,
    set_layouts,
    shards_of,
)


class Slot(NamedTuple):
    """A place of a sharded parameter in a module; a tied parameter has several."""

    owner: nn.Module
    name: str
    param: DTensor
    fqn: str  # the same for all places of a tied one
    path: str  # from the module that was made whole

    def groups_of_copies(self) -> list[dist.ProcessGroup]:
        """Groups with ranks outside of the parameter's mesh that hold copies of it: those of tensor
        parallelism, if it has split other parameters of the model, but not this one."""
        split = self.owner.__dict__.get(SPLIT_BESIDE)
        layout = layouts_of(self.owner).get(self.name)
        if split is None or layout is None or layout.tensor_parallel is not None:
            return []
        return list(split.mesh.get_all_groups())


def slots_of(module: nn.Module) -> list[Slot]:
    """The places of all sharded parameters of ``module`` and what is in it."""
    found = []
    for prefix, owner in module.named_modules():
        for name, param in shards_of(owner) if is_wrapped(owner) else ():
            path = f"{prefix}.{name}" if prefix else name
            found.append(Slot(owner, name, param, fqn_of(owner, name), path))
    return found


def mesh_of(slots: Sequence[Slot]) -> DeviceMesh | None:
    """The mesh of all ranks that have a part or a copy of the parameters in ``slots``; None if
    there are none."""
    meshes = [slot.param.device_mesh for slot in slots]
    beside = next((slot for slot in slots if slot.groups_of_copies()), None)
    if beside is not None:
        split = beside.owner.__dict__[SPLIT_BESIDE]
        meshes.append(joined(split.mesh, beside.param.device_mesh))
    return max(meshes, key=DeviceMesh.size, default=None)


def restore(slots: Iterable[Slot]) -> None:
    """Put the shards back; a parameter that was taken away, or became None, stays so."""
    for owner, name, param, *_ in slots:
        if owner._parameters.get(name) is not None:
            owner._parameters[name] = cast(nn.Parameter, param)
        else:
            left = {key: layout for key, layout in layouts_of(owner).items() if key != name}
            set_layouts(owner, left)


def refuse_new_places(module: nn.Module, slots: Iterable[Slot]) -> None:
    """Refuse full parameters under names that no shard had, as pruning gives them: they would stay,
    and each rank would train one of its own."""
    known = {(id(slot.owner), slot.name) for slot in slots}
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if stands_for_shard(param) and (id(owner), name) not in known:
                path = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"unsharded: {path} was registered inside, and would stay a full copy that "
                    "each rank trains by itself; prune, parametrize and tie before simple_fsdp"
                )


class End(NamedTuple):
    """What is in a shard's place at the end of ``unsharded``."""

    slot: Slot
    made: nn.Parameter  # the full parameter that was put there
    full: Tensor  # the one that is there now


def ends_of(slots: Iterable[Slot], fulls: dict[int, nn.Parameter]) -> list[End]:
    """For each shard the full parameter that is in its place now, if there is one; ``fulls`` are
    those that were put there, by the ``id`` of the shard."""
    ends: dict[int, End] = {}
    for slot in slots:
        made, full = fulls[id(slot.param)], slot.owner._parameters.get(slot.name)
        if full is None:
            continue
        _check(slot, made)
        _check(slot, full)
        first = ends.setdefault(id(slot.param), End(slot, made, full))
        if first.full is not full:
            raise ValueError(
                f"unsharded: {first.slot.path} and {slot.path} were one parameter, and are two; "
                "what simple_fsdp tied stays tied: give both the same new parameter, or untie "
                "them before the wrap"
            )
    return list(ends.values())


def _check(slot: Slot, full: Tensor) -> None:
    param, what = slot.param, ""
    if full.grad is not None:
        what = (
            "got a gradient, which would be lost: it is that of a full parameter, on this rank "
            "alone; call backward outside"
        )
    elif has_hooks(full):
        what = (
            "got a hook, which would be lost: the full parameter gets no gradient, its shard "
            "does; register it outside"
        )
    elif full.shape != param.shape or full.dtype != param.dtype:
        what = (
            f"was {tuple(param.shape)} {param.dtype} and is {tuple(full.shape)} {full.dtype}; "
            "shapes and dtypes are fixed by simple_fsdp: change the model before the wrap"
        )
    if what:
        raise ValueError(f"unsharded: {slot.fqn} of {type(slot.owner).__name__} {what}")


def carry_over(ends: Iterable[End]) -> None:
    """Give the shards what was set on their full parameters: ``requires_grad``, and marks."""
    for slot, made, full in ends:
        param = slot.param
        if param.requires_grad != full.requires_grad:
            param.requires_grad_(full.requires_grad)
        for mark in _marks(param).keys() - _marks(made).keys():
            delattr(param, mark)
        param.__dict__.update(_marks(made) | _marks(full))


def _marks(param: Tensor) -> dict[str, Any]:
    """What the user has set on ``param``; torch and this package set marks of their own."""
    own = {"_is_param", "_local_tensor", "_spec"}
    named = vars(param).items()
    return {k: v for k, v in named if k not in own and not k.startswith("_simple_fsdp_")}


def agree_to_leave(
    mesh: DeviceMesh | None,
    ends: list[End],
    buffers: Iterable[str],
    error: BaseException | None,
) -> None:
    """Return if no rank failed, all are about to write the same parameters back, and all had the
    same ``buffers``; else raise RankMismatchError. ``error`` is what this rank failed with, if it
    did: the caller then raises that instead."""
    ranks = rank_guard.ranks_of([] if mesh is None else [mesh])
    lines = ["came to its end" if error is None else f"failed: {type(error).__name__}"]
    lines += [f"{end.slot.fqn} requires_grad={end.full.requires_grad}" for end in ends]
    lines += buffers
    rank_guard.agree("what was done inside unsharded", lines, ranks, remember=False)
