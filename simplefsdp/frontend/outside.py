"""Operators on sharded parameters outside of forward and of initialisers.

Most operators on a DTensor do what they do to the plain tensor. Some do something else, which
nobody would notice, and one is missing. torch lets a DTensor's operator have a handler; slices do
(``slices.py``), and these:

- *random fills* of parameters (``nn.init.normal_(module.weight)`` in a loop), and of what is
  sharded as they are (noise for gradients, ``torch.randn_like(param.grad)``): on CPU every rank
  would draw for its own shard, so that shards get the same numbers, or copies different ones. Here
  they are those of one global tensor, as on CUDA, and from rank 0's generator; so a fill is
  collective. What is drawn like a view of these, and draws that make a new tensor by another
  operator (``randint_like``, ``bernoulli``), are torch's;
- *the number of a sum over ranks* (``param.grad.norm().item()``): torch gives this rank's part.
  Here it raises: to add up the parts, this rank would wait for ranks that do not ask. But a truth
  value (``(param > 0).any()``) is that of all ranks, as with torch since 2.15; all must ask for it;
- *a complex tensor as real numbers* (``view_as_real``, by which Adam and others step): of one that
  is unevenly sharded along its last dimension torch makes a gathered copy, and what is written to
  that is lost. Here it is a view of the shard, as of a plain tensor;
- *whether any element is true*, which ``torch.autograd.detect_anomaly`` asks of every gradient:
  torch has no such operator for DTensors. Here it is asked over all ranks;
- *collectives* of torch.distributed, which DTensors do not have: the error says what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from simplefsdp import _torch
from simplefsdp.frontend.initialize import RANDOM_FILLS, fill_global
from simplefsdp.frontend.living import fqn_alike
from simplefsdp.frontend.placement import dtensor_like, highest_of_ranks, rank_0s
from simplefsdp.frontend.slices import handle_slices

_aten = torch.ops.aten
# By the operator that makes a random tensor: what fills one.
_DRAWS: dict[Any, Callable[..., Any]] = {
    _aten.randn_like.default: _aten.normal_.default,
    _aten.rand_like.default: _aten.uniform_.default,
}
# Of torch.distributed; DTensors have none of them.
_COLLECTIVES = (
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_", "gather_"),
    *("_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "scatter_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_"),
    *("send", "recv_"),
)
# By the reduction that torch would use for a truth value: whether it must be true on all ranks.
_TRUTHS = {"sum": False, "max": False, "product": True, "min": True}


@functools.cache
def handle_operators() -> None:
    """Have these operators handled, from the first wrap of a process on."""
    for op in RANDOM_FILLS:
        _torch.handle_dtensor_op(op, _fill)
    for op in _DRAWS:
        _torch.handle_dtensor_op(op, _draw_like)
    handle_slices()
    for name in _COLLECTIVES:
        _torch.handle_dtensor_op(getattr(torch.ops.c10d, name).default, _refuse_collective)
    _torch.handle_dtensor_op(_aten._local_scalar_dense.default, _number)
    _torch.handle_dtensor_op(_aten._is_any_true.default, _is_any_true)
    _torch.handle_dtensor_op(_aten.view_as_real.default, _as_real)


def _draws_by_rank(tensor: DTensor) -> bool:
    """Whether torch would let each rank draw for itself what ``tensor``, a wrapped parameter, or
    sharded as one is, is to be filled with."""
    if not _torch.has_memory(tensor) or _torch.draws_globally(tensor.device_mesh):
        return False
    return bool(fqn_alike(tensor))


def _fill(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _draws_by_rank(args[0]):
        return _fill_globally(op, args, kwargs)
    return _torch.default_dtensor_op(op, args, kwargs)


def _draw_like(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _draws_by_rank(args[0]):
        return _fill_globally(_DRAWS[op], (torch.empty_like(args[0], **kwargs),), {})
    return _torch.default_dtensor_op(op, args, kwargs)


def _fill_globally(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    filled = _torch.filled_by_trunc_normal()
    if filled is None or filled is target:
        _begin(target, kwargs.get("generator"))
    # Else what was rejected is drawn again, into another tensor: on some ranks more often.
    given = {name: value for name, value in kwargs.items() if name != "generator"}
    _Last.fills += 1
    key = (_Last.number, tuple(target.shape), _Last.fills)
    fill_global(target, key, lambda part, own: op(part, *args[1:], **given, generator=own))
    return target


class _Last:
    """The last fill. Some ranks may reject its values more often than others; so what is drawn
    again is seeded from here, not taken from the generator that fills share."""

    number = 0  # that the generator gave
    fills = 0


def _begin(param: DTensor, generator: torch.Generator | None) -> None:
    source = torch.default_generator if generator is None else generator
    number = torch.empty((), dtype=torch.int64, device=source.device).random_(generator=source)
    _Last.number, _Last.fills = rank_0s(int(number), param.device_mesh), 0


def _as_real(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (target,) = args
    placements = target.placements
    if all(isinstance(p, Replicate) or type(p) is Shard for p in placements):
        return dtensor_like(target, op(_torch.local_tensor(target)))
    return _torch.default_dtensor_op(op, args, kwargs)


def _refuse_collective(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op.name().partition("::")[2].strip("_")
    raise ValueError(
        f"torch.distributed's {name} of a sharded DTensor, such as a wrapped model's parameter or "
        "its gradient: leave it out where it makes ranks alike, since simple_fsdp gives all ranks "
        "rank 0's values and backward averages gradients; else call it on tensor.full_tensor(), "
        "or on tensor.to_local(), this rank's rows"
    )


def _number(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    sizes = zip(target.placements, target.device_mesh.shape, strict=True)
    left = [p for p, ranks in sizes if isinstance(p, Partial) and ranks > 1]
    if left and _torch.has_memory(target):
        if target.dtype == torch.bool and left[0].reduce_op in _TRUTHS:
            return _of_all_ranks(target, all_true=_TRUTHS[left[0].reduce_op])
        raise ValueError(
            "item(), float() or bool() of a DTensor that is not reduced over ranks, such as the "
            "norm of a parameter or of its gradient, is this rank's part; call "
            "full_tensor().item(), on all ranks (an optimizer that does it in its step, or a "
            "logger that watches parameters, was not made for shards: take another)"
        )
    return _torch.default_dtensor_op(op, args, kwargs)


def _of_all_ranks(flag: DTensor, *, all_true: bool) -> bool:
    """Whether ``flag`` is true on any rank, or, if ``all_true``, on all ranks."""
    here = bool(_torch.local_tensor(flag))
    (found,) = highest_of_ranks([here != all_true], flag.device_mesh)
    return found != all_true


def _is_any_true(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (flags,) = args
    here = bool(op(_torch.local_tensor(flags)))
    (anywhere,) = highest_of_ranks([here], flags.device_mesh)
    return torch.tensor(anywhere, device=flags.device)
