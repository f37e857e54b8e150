"""Clipping by the global gradient norm, over parameters of any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement

from simplefsdp._torch import is_split
from simplefsdp.frontend.placement import dtensor_like, local_part
from simplefsdp.frontend.waiting import refuse_waiting

_collectives = torch.ops._c10d_functional


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, but true over all ranks, also when parameters live
    on different meshes (tensor parallelism, nested wraps) or are plain tensors. Collective: every
    rank must call it. Parameters that differ between ranks outside of the wrap's mesh, as experts
    do, must be DTensors over these ranks before the wrap: plain tensors are taken to be the same on
    all.

    Args:
        model_or_params: a module, or parameters as an optimizer takes them.
        max_norm: the largest norm left as it is.
        norm_type: the p of the p-norm, > 0; may be ``inf``.
        error_if_nonfinite: raise if the norm is nan or inf, the gradients then untouched.

    Returns:
        The norm before clipping, a 0-d plain tensor, the same on every rank.

    Raises:
        TypeError: a parameter is neither sharded nor replicated along a mesh dimension.
        ValueError: ``max_norm`` is negative or nan, or ``norm_type`` is not positive; or gradients
            of micro-batches wait to be reduced.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number >= 0, got {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a number > 0, got {norm_type!r}")
    if isinstance(model_or_params, nn.Module):
        model_or_params = model_or_params.parameters()
    params = [model_or_params] if isinstance(model_or_params, Tensor) else list(model_or_params)
    refuse_waiting(params, "clip_grad_norm_")
    _place_alike(params)
    grads = [p.grad for p in params if p.grad is not None]
    total = _total_norm([(p, p.grad) for p in params], float(norm_type), torch._foreach_norm)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {float(total)}; they were not clipped"
        )
    factor = _factor(max_norm, total)
    for (device, dtype), alike in _alike(map(local_part, grads)).items():
        # Elsewhere than on CPU one kernel takes many gradients only if the factor has their dtype;
        # a kernel for each gradient would round the factor likewise.
        theirs = factor.to(device) if device.type == "cpu" else factor.to(device, dtype)
        torch._foreach_mul_(alike, theirs)
    return total


def clipped(
    params: Sequence[Tensor], grads: Sequence[Tensor], max_norm: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What :func:`clip_grad_norm_` does, for gradients in a graph that is traced: the norm, and the
    scaled gradients. Each is scaled by operators of its own, so that it waits for the norm only."""
    found = list(zip(params, grads, strict=True))
    total = _total_norm(found, 2.0, _norm_of_each)
    factor = _factor(max_norm, total)
    return total, tuple(_scaled(grad, factor) for grad in grads)


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    local = local_part(grad) * factor.to(grad.device, grad.dtype)
    return dtensor_like(grad, local) if isinstance(grad, DTensor) else local


def _factor(max_norm: float, total: Tensor) -> Tensor:
    return (max_norm / (total + 1e-6)).clamp(max=1.0)


# Gives the norm of each of some gradients that are alike, in a dtype. torch's own takes one kernel.
Norms = Callable[..., Sequence[Tensor]]


def _all_reduce(tensor: Tensor, op: str, group: ProcessGroup) -> Tensor:
    started = _collectives.all_reduce(tensor, op, group.group_name)
    return cast(Tensor, _collectives.wait_tensor(started))


def _norm_of_each(alike: list[Tensor], norm_type: float, *, dtype: torch.dtype) -> list[Tensor]:
    return [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in alike]


def _total_norm(
    found: Sequence[tuple[Tensor, Tensor | None]], norm_type: float, norms: Norms
) -> Tensor:
    """Norm over all gradients: one all-reduce per mesh dimension that some are sharded over.

    Grouped by parameter, not by gradient: which parameters got one may differ between ranks, and
    all must take part in the same all-reduces.
    """
    device = found[0][0].device if found else torch.device("cpu")
    sharded_alike: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for param, grad in found:
        parts = sharded_alike.setdefault(_shard_groups(param), [])
        if grad is not None:
            _check_placed_alike(param, grad)
            part = local_part(grad)
            parts.append(part.abs() if part.is_complex() else part)
    zero = torch.zeros((), device=device, dtype=_dtype_of_norm(p.dtype for p, _ in found))
    totals = [
        _norm_over(groups, parts, norm_type, zero, norms) for groups, parts in sharded_alike.items()
    ]
    return _norm_of_norms(totals, norm_type)


def _shard_groups(param: Tensor) -> tuple[ProcessGroup, ...]:
    """The process groups over which parts of ``param`` are spread."""
    if not isinstance(param, DTensor):
        return ()
    sharded = (dim for dim, p in enumerate(param.placements) if _splits(p))
    return tuple(param.device_mesh.get_group(dim) for dim in sharded)


def _place_alike(params: Iterable[Tensor]) -> None:
    """Place gradients as their parameters are, which DTensor leaves whole, or as parts of a sum,
    behind what a loss computes with parameters as DTensors."""
    for param in params:
        grad = param.grad
        if isinstance(param, DTensor) and isinstance(grad, DTensor):
            pairs = zip(grad.placements, param.placements, strict=True)
            others = [its for its, wanted in pairs if its != wanted]
            if others and all(its.is_replicate() or its.is_partial() for its in others):
                param.grad = grad.redistribute(placements=param.placements)


def _check_placed_alike(param: Tensor, grad: Tensor) -> None:
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor)):
        return
    if grad.placements != param.placements:
        raise TypeError(
            f"clip_grad_norm_: a parameter of shape {tuple(param.shape)} is placed "
            f"{param.placements}, its gradient {grad.placements}; redistribute the gradient"
        )


def _splits(placement: Placement) -> bool:
    """Whether each rank has elements of its own (``_StridedShard``: of FSDP2 over tensor
    parallelism)."""
    if not is_split(placement) and not placement.is_replicate():
        raise TypeError(
            f"clip_grad_norm_: expected parameters placed by Shard or Replicate, got {placement}; "
            "redistribute the parameter first"
        )
    return is_split(placement)


def _norm_over(
    groups: tuple[ProcessGroup, ...],
    parts: list[Tensor],
    norm_type: float,
    zero: Tensor,
    norms: Norms,
) -> Tensor:
    found = [zero]  # for empty shards, of which there is no inf-norm
    for (_, dtype), alike in _alike(p for p in parts if p.numel()).items():
        of_these = norms(alike, norm_type, dtype=_dtype_of_norm([dtype]))
        found.append(_norm_of_norms(of_these, norm_type).to(zero))
    total = _norm_of_norms(found, norm_type)
    for group in groups:
        if norm_type == float("inf"):
            total = _all_reduce(total, "max", group)
        else:
            total = _all_reduce(total**norm_type, "sum", group) ** (1.0 / norm_type)
    return total


def _dtype_of_norm(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """At least float32: in bfloat16 a norm would be true to 3 digits only."""
    wide = {torch.float64, torch.complex128}
    return torch.float64 if wide.intersection(dtypes) else torch.float32


def _norm_of_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([*norms]), norm_type)


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The tensors by device and dtype: a kernel takes many that are alike in these."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found
