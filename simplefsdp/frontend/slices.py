"""Slices of sharded tensors outside of forward: reads are right, and writes raise.

Of a plain tensor a slice is a view, so that ``module.weight.data[0].zero_()`` writes to the weight.
A DTensor's slice along a sharded dimension is a copy, gathered from all ranks: what is written to
it would be lost, and nobody would notice. That goes for parameters, their gradients, the views of
both, and for what is sharded as they are, such as the state of optimizers. A slice along a
dimension that is whole on every rank is a view, as of a plain tensor.

Older versions of torch (2.11, for one) do not tell subclasses of DTensor that they are written to.
There a parameter's slice raises when it is made, unless autograd would refuse the write; and writes
to slices of other tensors are lost.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from inductor_passes.adapters._torch_calls import makes_view, written_by
from simplefsdp import _torch
from simplefsdp.frontend.living import fqn_alike, living_shards
from simplefsdp.frontend.placement import dtensor_like
from simplefsdp.frontend.reading import in_forward

_aten = torch.ops.aten
# Operators whose results are views of parts of a plain tensor: their arguments that are dimensions,
# with the defaults.
_DIM = (("dim", 0),)
_SLICES: dict[Any, tuple[tuple[str, int], ...]] = {
    _aten.select.int: _DIM,
    _aten.slice.Tensor: _DIM,
    _aten.unbind.int: _DIM,
    _aten.split.Tensor: _DIM,
    _aten.split_with_sizes.default: _DIM,
    _aten.diagonal.default: (("dim1", 0), ("dim2", 1)),
}


@functools.cache
def handle_slices() -> None:
    """Have slices handled, from the first wrap of a process on."""
    for op in _SLICES:
        _torch.handle_dtensor_op(op, _slice)


class _Whole(NamedTuple):
    """What a slice is of. Its name is looked for where it is needed, among all parameters."""

    memory: StorageWeakRef
    like: str  # the FQN of a parameter that is sharded as it is, or whose gradient it is a view of

    def fqn(self) -> str:
        """That of the parameter that it is, or is a view of; "" if it is of no parameter."""
        own = (fqn for fqn, param in living_shards() if _torch.is_of_memory(param, self.memory))
        return next(own, "")

    def __str__(self) -> str:
        return self.fqn() or f"a tensor sharded as {self.like} is, such as its gradient"


class CopiedSlice(DTensor):
    """A slice that is a copy, or a view of one. It raises where it is written to."""

    slice_of: _Whole
    is_watched = False  # whether torch calls what follows; set when it first does

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        CopiedSlice.is_watched = True
        kwargs = kwargs or {}
        for place, name in written_by(op):
            written = args[place] if place < len(args) else kwargs.get(name)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, CopiedSlice):
                    raise ValueError(_lost(tensor.slice_of, f"what {op} writes to it"))
        plain_args, plain_kwargs = tree_map_only(CopiedSlice, _plain, (args, kwargs))
        result = op(*plain_args, **plain_kwargs)
        if makes_view(op) and isinstance(args[0], CopiedSlice):
            _mark(result, args[0].slice_of)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return copy.deepcopy(_plain(self), memo)


def _lost(slice_of: _Whole, what: str) -> str:
    return (
        f"{slice_of}: a slice along a dimension that is sharded is a copy, so that {what} would be "
        "lost; write to all of it, as by tensor.mul_(distribute_tensor(mask, tensor.device_mesh, "
        "tensor.placements)), or, to a parameter, inside `with simplefsdp.unsharded(model):` (or "
        "in the model's reset_parameters())"
    )


def _plain(tensor: CopiedSlice) -> DTensor:
    return dtensor_like(tensor, _torch.local_tensor(tensor))


def _mark(result: Any, slice_of: _Whole) -> None:
    for tensor in result if isinstance(result, (list, tuple)) else (result,):
        tensor.__class__ = CopiedSlice
        tensor.slice_of = slice_of


def _slice(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _torch.default_dtensor_op(op, args, kwargs)
    target = args[0]
    writable = not (torch.is_grad_enabled() and target.requires_grad)  # else autograd refuses
    if writable and _takes_a_part(op, target, args, kwargs) and not in_forward():
        whole = _whole(target)
        if whole is not None:
            _mark(result, whole)
            if not _is_watched(result) and whole.fqn():
                raise ValueError(_lost(whole, "what is written to it"))
    return result


def _is_watched(result: Any) -> bool:
    if not CopiedSlice.is_watched:
        _aten.detach.default(result[0] if isinstance(result, (list, tuple)) else result)
    return CopiedSlice.is_watched


def _whole(tensor: DTensor) -> _Whole | None:
    """What a slice of ``tensor`` is marked with; None if ``tensor`` is no parameter, nor a view of
    one or of its gradient, nor sharded as one is."""
    memory = _torch.weak_memory_of(tensor)
    if memory is None or not _torch.has_memory(tensor):
        return None
    like = fqn_alike(tensor) or next(_of_views(memory), "")
    return _Whole(memory, like) if like else None


def _of_views(memory: StorageWeakRef) -> Iterator[str]:
    """The FQNs of the parameters of which, or of whose gradients, ``memory`` is."""
    for fqn, param in living_shards():
        grad = param.grad
        both = (param, grad) if isinstance(grad, DTensor) else (param,)
        if any(_torch.is_of_memory(tensor, memory) for tensor in both):
            yield fqn


def _takes_a_part(
    op: Callable[..., Any], target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether ``op`` takes a part of a dimension that is sharded."""
    names = [argument.name for argument in op._schema.arguments]  # type: ignore[attr-defined]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    dims = [arguments.get(name, default) % max(1, target.dim()) for name, default in _SLICES[op]]
    mesh = target.device_mesh
    split = {
        getattr(p, "dim", None)
        for i, p in enumerate(target.placements)
        if _torch.is_split(p) and mesh.size(i) > 1
    }
    if split.isdisjoint(dims):
        return False
    if op is not _aten.slice.Tensor:
        return True
    size = target.shape[dims[0]]
    part = slice(arguments.get("start"), arguments.get("end"), arguments.get("step"))
    return len(range(*part.indices(size))) < size
