"""The backward of ``DTensor.full_tensor`` and ``to_local``, reduced over some dimensions of a mesh.

Dynamo takes either for one node of its graph, which then runs what is here, as eager code does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from simplefsdp._torch.dynamo import run_as_it_is

_full_tensor, _to_local = DTensor.full_tensor, DTensor.to_local


class GradientReduction(NamedTuple):
    """How the gradient of what is whole on each rank is reduced."""

    ndim: int  # last dimensions of the mesh, that it is summed over
    # In backward: what the sum is divided by, or None for the number of ranks; it may raise.
    divide_factor: Callable[[], float | None]


def reduce_gradients_of_dtensors(
    reduction_of: Callable[[DeviceMesh], GradientReduction | None],
) -> None:
    """Where no ``grad_placements`` are given, reduce the gradient of what is whole on each rank;
    torch takes it to be the same on all of them.

    Args:
        reduction_of: of a mesh; None to leave its tensors as they are.
    """

    @functools.wraps(_full_tensor)  # by whose names Dynamo knows that it is not to be followed
    def full_tensor(self: DTensor, *, grad_placements: Any = None) -> Tensor:
        whole = [Replicate()] * self.device_mesh.ndim
        summed = None if grad_placements is not None else _summed(self, whole, reduction_of)
        if summed is None:
            return _full_tensor(self, grad_placements=grad_placements)
        return _divided(_full_tensor(self, grad_placements=summed.placements), summed)

    @functools.wraps(_to_local)
    def to_local(self: DTensor, *, grad_placements: Any = None) -> Tensor:
        summed = None if grad_placements is not None else _summed(self, None, reduction_of)
        if summed is None:
            return _to_local(self, grad_placements=grad_placements)
        return _divided(_to_local(self, grad_placements=summed.placements), summed)

    run_as_it_is(full_tensor)
    run_as_it_is(to_local)
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    DTensor.to_local = to_local  # type: ignore[method-assign]


class _Summed(NamedTuple):
    placements: list[Placement]  # of the gradient
    ranks: int  # that it is the sum of
    divide_factor: Callable[[], float | None]


def _summed(
    tensor: DTensor,
    whole: Sequence[Placement] | None,
    reduction_of: Callable[[DeviceMesh], GradientReduction | None],
) -> _Summed | None:
    """How the gradient of ``tensor`` is, if it is placed ``whole``, or as it is; None if it is as
    torch takes it."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements if whole is None else whole
    reduction = reduction_of(mesh)
    if reduction is None or any(isinstance(p, Partial) for p in placements):
        return None
    of_copies = [
        dim
        for dim in range(mesh.ndim - reduction.ndim, mesh.ndim)
        if isinstance(placements[dim], Replicate) and mesh.size(dim) > 1
    ]
    if not of_copies:
        return None
    partial: list[Placement] = list(placements)
    for dim in of_copies:
        partial[dim] = Partial()
    ranks = math.prod(mesh.size(dim) for dim in of_copies)
    return _Summed(partial, ranks, reduction.divide_factor)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, summed: _Summed) -> Tensor:  # type: ignore[override]
        ctx.summed = summed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        factor = ctx.summed.divide_factor()
        return grad / (ctx.summed.ranks if factor is None else factor), None


def _divided(tensor: Tensor, summed: _Summed) -> Tensor:
    return cast(Tensor, _Divide.apply(tensor, summed))
