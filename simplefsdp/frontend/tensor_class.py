"""Tensor subclasses that say themselves how FSDP2 is to gather them, such as torchao's float8 ones.

Two methods of the subclass say it, as for FSDP2:

- ``fsdp_pre_all_gather(mesh)``, or of ``(mesh, outer_size, outer_stride, module, mp_policy)``,
  gives the tensors that are to be sent, and metadata;
- ``fsdp_post_all_gather(sent, metadata, param_dtype)`` makes of them what the model computes with.

The shard itself is the plain tensor that the subclass holds; gradients and checkpoints are plain,
too. What the subclass adds are constants, which :class:`TensorClass` keeps. A gather makes the
subclass again, from this rank's rows. Its methods are told neither the module nor the policy's
casts of inputs and outputs.

    shard ─ wrapped ─ fsdp_pre_all_gather ─▶ gathers ─▶ fsdp_post_all_gather ─ full
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp._torch import has_no_data, watch_collectives_in_place

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(frozen=True)
class TensorClass:
    """What a subclass adds to the plain tensor that it holds."""

    cls: Any
    inner: str  # name of that tensor
    context: Any  # that ``__tensor_flatten__`` gives

    def wrapped(self, plain: Tensor) -> Any:
        """``plain`` as the subclass."""
        return self.cls.__tensor_unflatten__(
            {self.inner: plain}, self.context, plain.shape, plain.stride()
        )


# By the names that graphs hold.
_named: dict[str, TensorClass] = {}
# By the name of a process group that shards are spread over, or copies where nothing is sharded.
_meshes: dict[str, DeviceMesh] = {}


class Held(NamedTuple):
    """The plain tensor that a parameter's value is or holds."""

    tensor: Tensor
    name: str  # of the :class:`TensorClass` that it belongs to; "" if it is plain


def held_by(fqn: str, value: Tensor, ranks: int) -> Held:
    """What ``value``, of the parameter ``fqn``, holds, if it can be sharded over ``ranks``.

    Raises:
        ValueError: it holds several tensors, or one of another shape or dtype; its class has only
            one of the two methods, or adds what no text tells; or its rows cannot be split evenly.
    """
    says = [hasattr(value, name) for name in METHODS]
    if not any(says):
        return Held(value, "")
    cls: Any = type(value)
    flatten = getattr(value, "__tensor_flatten__", None)
    names, context = ([], None) if flatten is None else flatten()
    held = [getattr(value, name) for name in names]
    alike = len(held) == 1 and (held[0].shape, held[0].dtype) == (value.shape, value.dtype)
    if not all(says) or not alike:
        raise ValueError(
            f"{fqn}: is a {cls.__name__}, which says by {' and '.join(METHODS)}() how FSDP2 is to "
            "gather it; simple_fsdp can do so if it has both, and holds one plain tensor of its "
            f"own shape and dtype, not {', '.join(names) or 'none'}. Wrap the model without that "
            "subclass (for torchao: int8 with module_swap=True)"
        )
    text = repr(context)
    # With addresses, equal contexts have different texts; with tensors, others may have the same.
    if " at 0x" in text or "tensor(" in text:
        raise ValueError(
            f"{fqn}: is a {cls.__name__}, which adds to its tensor what no text tells: {text}; "
            "give it a __repr__, without tensors, that says all of it"
        )
    # FSDP2 refuses it, too: the class would see other rows than there are, or none.
    if value.dim() and value.shape[0] % ranks:
        raise ValueError(
            f"{fqn}: is a {cls.__name__} of {value.shape[0]} rows, which {ranks} ranks cannot "
            "share evenly; leave it a plain tensor (for torchao: by module_filter_fn)"
        )
    name = f"{cls.__module__}.{cls.__qualname__} {text}"
    _named[name] = TensorClass(cls, names[0], context)
    return Held(held[0], name)


def note_mesh(mesh: DeviceMesh) -> None:
    """Have gathers over the process group of this 1-D ``mesh`` give it to the classes' methods."""
    _meshes[mesh.get_group().group_name] = mesh
    if mesh.size() == 1:  # a gather on one rank has no group
        _meshes[""] = mesh


class Sending(NamedTuple):
    """What this rank is to send, and what becomes of what all have sent."""

    tensors: Sequence[Tensor]
    received: Callable[[Sequence[Tensor]], Tensor]


def sending(
    shard: Tensor, name: str, group: str, ranks: int, policy: MixedPrecisionPolicy
) -> Sending:
    """What the class of that ``name`` says of the gather of a parameter; may be collective.

    Args:
        shard: this rank's rows, in the parameter's dtype.
        name: that :func:`held_by` gave.
        group: name of the process group that shards are spread over, see :func:`note_mesh`.
        ranks: that share the shards.
        policy: its ``param_dtype`` is what the model computes in; None for that of ``shard``.

    Raises:
        ValueError: a compiler traces this, and would not see all that is sent.
    """
    wrapped, is_traced = _named[name].wrapped(shard), has_no_data(shard)
    arguments: tuple[Any, ...] = (_meshes[group],)
    if len(inspect.signature(wrapped.fsdp_pre_all_gather).parameters) > 1:
        size = torch.Size((shard.shape[0] * ranks, *shard.shape[1:]) if shard.dim() else ())
        arguments += (size, torch.empty(size, device="meta").stride(), None, policy)
    with _all_seen(wrapped, is_traced):
        tensors, metadata = wrapped.fsdp_pre_all_gather(*arguments)

    def received(outputs: Sequence[Tensor]) -> Tensor:
        dtype = shard.dtype if policy.param_dtype is None else policy.param_dtype
        full: Tensor
        with _all_seen(wrapped, is_traced):
            full, _ = wrapped.fsdp_post_all_gather(tuple(outputs), metadata, dtype)
        return full

    return Sending(tensors, received)


@contextmanager
def _all_seen(wrapped: Any, is_traced: bool) -> Iterator[None]:
    """Around a method of a class: raise if it is traced, and the compiler misses what it sends."""
    with watch_collectives_in_place(only_if=is_traced) as unseen:
        yield
    if unseen:  # each rank would compute with what it has itself
        raise ValueError(
            f"{type(wrapped).__name__}: its {' or '.join(METHODS)}() calls {unseen[0]} of "
            "torch.distributed, which writes to its argument, so the compiler does not see it; "
            "have it call torch.distributed._functional_collectives, or do not compile the model"
        )
