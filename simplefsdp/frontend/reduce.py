"""The reduce of one parameter's gradient: over the ranks that share its shards, then over those
that hold copies; or how far it is put off. ``gather.py`` calls it in its backward."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from simplefsdp.frontend.gather_spec import GatherSpec, pad_rows, padded_rows, rows_in_place
from simplefsdp.frontend.placement import on_the_wire
from simplefsdp.rank_sequence import note_reduced

_collectives = torch.ops._c10d_functional


class Deferral(NamedTuple):
    """How far a backward takes the gradient of one parameter, and what earlier ones left.

    Gradients that are not reduced yet are added up in tensors that graphs write to, so that it
    does not matter in which order forwards and backwards run. A backward that reduces a gradient
    further adds the sum of earlier ones to it, and leaves zeros there.
    """

    # ``"all"``: reduced over all ranks. ``"shards"``: within the group that the shards are spread
    # over, not over copies. ``"none"``: not sent.
    until: Literal["all", "shards", "none"] = "all"
    # Sum of gradients that were not sent, the shape of the gathered parameter, rows first.
    unreduced: Tensor | None = None
    # Sum of gradients reduced within the shard group only, the shape of a shard with its padding,
    # rows first.
    partial: Tensor | None = None


def reduce_grad(
    grad: Tensor, shard_rows: int, spec: GatherSpec, deferral: Deferral
) -> Tensor | None:
    """The gradient of the shard; None if it is deferred. ``grad`` has rows first."""
    if spec.reduce_dtype is not None and grad.is_floating_point():
        grad = grad.to(spec.reduce_dtype)
    if deferral.until == "none":
        cast(Tensor, deferral.unreduced).add_(grad)
        return None
    part = _reduce_over_shards(_with_deferred(deferral.unreduced, grad), spec)
    if deferral.until == "shards":
        cast(Tensor, deferral.partial).add_(part)
        return None
    reduced = _reduce_over_copies(_with_deferred(deferral.partial, part), shard_rows, spec)
    return rows_in_place(reduced, spec)


def reduce_deferred(shard_rows: int, spec: GatherSpec, deferral: Deferral) -> Tensor:
    """The shard's gradient from what backwards have deferred, reduced over all; collective."""
    if deferral.unreduced is not None:
        nothing = torch.zeros_like(deferral.unreduced)
        return cast(Tensor, reduce_grad(nothing, shard_rows, spec, deferral))
    partial = cast(Tensor, deferral.partial)
    part = _with_deferred(partial, torch.zeros_like(partial))
    return rows_in_place(_reduce_over_copies(part, shard_rows, spec), spec)


def averaged(grad: Tensor, spec: GatherSpec) -> Tensor:
    """The gradient of a tensor that each rank has whole, over all ranks of a parameter's spec."""
    shards = ((spec.reduce_group, spec.shard_ranks),) if spec.shard_ranks > 1 else ()
    whole = spec._replace(shard_ranks=1, copy_groups=(*shards, *spec.copy_groups))
    return _reduce_over_copies(_reduce_over_shards(grad, whole), 0, whole)


def _reduce_over_shards(grad: Tensor, spec: GatherSpec) -> Tensor:
    """This rank's part, with its padding, of the gradient reduced over the shard group."""
    if grad.is_complex():
        return torch.view_as_complex(_reduce_over_shards(on_the_wire(grad), spec))
    if _divides_first(grad, spec):
        grad = grad / _division(spec)
    if spec.shard_ranks == 1:
        return grad
    padded = pad_rows(grad, padded_rows(spec) * spec.shard_ranks).contiguous()
    note_reduced(spec.shard_group, spec.fqn, padded)
    return _collectives.wait_tensor(
        _collectives.reduce_scatter_tensor(
            padded, _operation(spec), spec.shard_ranks, spec.reduce_group
        )
    )


def _reduce_over_copies(grad: Tensor, shard_rows: int, spec: GatherSpec) -> Tensor:
    if grad.is_complex():
        return torch.view_as_complex(_reduce_over_copies(on_the_wire(grad), shard_rows, spec))
    for group, _ in spec.copy_groups:
        note_reduced(group, spec.fqn, grad)
        grad = _collectives.wait_tensor(
            _collectives.all_reduce(grad.contiguous(), _operation(spec), group)
        )
    if spec.shard_ranks > 1 and grad.shape[0] != shard_rows:
        grad = grad[:shard_rows]
    factor = _division(spec)
    return grad if factor == 1 or _divides_first(grad, spec) else grad / factor


def _divides_first(grad: Tensor, spec: GatherSpec) -> bool:
    """Whether to divide before the sum: float16 overflows when many gradients are summed, and loses
    some small values by this. Wider dtypes are divided after, on the shard, which is less work."""
    return grad.dtype == torch.float16 and _division(spec) != 1


def _operation(spec: GatherSpec) -> str:
    return "avg" if spec.averages and spec.divide_factor is None else "sum"


def _division(spec: GatherSpec) -> float:
    """What we divide a sum over all data-parallel ranks by; 1 if the collectives average."""
    if spec.divide_factor is not None:
        return spec.divide_factor
    ranks = spec.shard_ranks * math.prod(ranks for _, ranks in spec.copy_groups)
    return 1 if spec.averages else ranks


def _with_deferred(sum_: Tensor | None, grad: Tensor) -> Tensor:
    if sum_ is None:
        return grad
    grad = sum_ + grad
    sum_.zero_()
    return grad
