"""Clipping by the global gradient norm, over parameters of any mesh."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


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
    rank must call it.

    Args:
        model_or_params: a module, or parameters as an optimizer takes them.
        max_norm: the largest norm left as it is.
        norm_type: the p of the p-norm; may be ``inf``.
        error_if_nonfinite: raise if the norm is nan or inf, the gradients then untouched.

    Returns:
        The norm before clipping, a 0-d plain tensor, the same on every rank.

    Raises:
        ValueError: ``max_norm`` is negative or nan.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number >= 0, got {max_norm!r}")
    if isinstance(model_or_params, nn.Module):
        model_or_params = model_or_params.parameters()
    params = [model_or_params] if isinstance(model_or_params, Tensor) else list(model_or_params)
    grads = [p.grad for p in params if p.grad is not None]
    total = _total_norm(grads, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {float(total)}; they were not clipped"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(device=local.device, dtype=local.dtype))
    return total


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Norm over all gradients: one norm per mesh and placement, then the norm of those norms."""
    alike: dict[object, list[Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        alike.setdefault(key, []).append(grad)
    if not alike:
        return torch.tensor(0.0)
    norms = [get_total_norm(group, norm_type) for group in alike.values()]
    plain = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return torch.linalg.vector_norm(torch.stack([n.float() for n in plain]), norm_type)
