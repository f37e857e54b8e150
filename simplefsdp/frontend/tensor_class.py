"""Tensor subclasses that say themselves how FSDP2 is to gather them, such as torchao's float8 ones.

Two methods of the subclass say it, as for FSDP2:

- ``fsdp_pre_all_gather(mesh)``, or of ``(mesh, outer_size, outer_stride, module, mp_policy)``,
  gives the tensors that are to be sent, and what else is needed;
- ``fsdp_post_all_gather(sent, that, param_dtype)`` makes of them what the model computes with.

The shard itself is the plain tensor that the subclass holds, and so are gradients and checkpoints:
what the subclass adds are constants, which :class:`TensorClass` keeps. A gather makes the subclass
again, of this rank's rows.

    shard ─ wrapped ─ fsdp_pre_all_gather ─▶ gathers ─▶ fsdp_post_all_gather ─ full
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
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


# A graph holds their names. A name says all that there is to say: it is the same on all ranks, and
# in the process that loads the code which this one compiled.
_named: dict[str, TensorClass] = {}
# By the name of the process group that shards are spread over.
_meshes: dict[str, DeviceMesh] = {}


def extends(tensor: Tensor) -> bool:
    """Whether the class of ``tensor`` says how it is gathered."""
    return any(hasattr(tensor, name) for name in METHODS)


class Plain(NamedTuple):
    """What a tensor holds, and the name of what its class adds to that; "" if it adds nothing."""

    plain: Tensor
    name: str


def plain_of(fqn: str, tensor: Tensor) -> Plain:
    """The plain tensor that ``tensor``, the value of the parameter ``fqn``, is or holds.

    Raises:
        ValueError: it holds several tensors, or one of another shape or dtype, or says only half.
    """
    if not extends(tensor):
        return Plain(tensor, "")
    cls: Any = type(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names, context = ([], None) if flatten is None else flatten()
    held = [getattr(tensor, name) for name in names]
    complete = all(hasattr(tensor, name) for name in METHODS)
    alike = len(held) == 1 and (held[0].shape, held[0].dtype) == (tensor.shape, tensor.dtype)
    if not complete or not alike:
        raise ValueError(
            f"{fqn}: is a {cls.__name__}, which says by {' and '.join(METHODS)}() how FSDP2 is to "
            "gather it; simple_fsdp can do so if it has both, and holds one plain tensor of its "
            f"own shape and dtype, not {', '.join(names) or 'none'}. Wrap the model without that "
            "subclass (for torchao: int8 with module_swap=True)"
        )
    return Plain(held[0], _name_of(TensorClass(cls, names[0], context)))


def _name_of(found: TensorClass) -> str:
    cls, context = found.cls, re.sub(" at 0x[0-9a-f]+", "", repr(found.context))
    name = f"{cls.__module__}.{cls.__qualname__} {context}"
    while _named.setdefault(name, found) != found:  # which says other things by the same words
        name += "'"
    return name


def note_mesh(group: str, mesh: DeviceMesh) -> None:
    """Let gathers over the process group ``group`` give the classes' methods this 1-D mesh."""
    _meshes[group] = mesh


class Sending(NamedTuple):
    """What this rank is to send, and what becomes of what all have sent."""

    tensors: Sequence[Tensor]
    received: Callable[[Sequence[Tensor]], Tensor]


def sending(
    padded: Tensor, name: str, group: str, policy: MixedPrecisionPolicy, rows: Sequence[int]
) -> Sending:
    """What the class of that ``name`` says of the gather of a parameter; may be collective.

    Args:
        padded: this rank's rows, with padding, in the parameter's dtype.
        name: that :func:`plain_of` gave.
        group: name of the process group that shards are spread over.
        policy: its ``param_dtype`` is what the model computes in; None for that of ``padded``.
        rows: how many all ranks have without padding; none if they are not split.

    Raises:
        ValueError: a compiler traces this, and would not see all that is sent.
    """
    wrapped = _named[name].wrapped(padded)
    size = torch.Size((*rows, *padded.shape[len(rows) :]))
    arguments: tuple[Any, ...] = (_meshes[group],)
    if len(inspect.signature(wrapped.fsdp_pre_all_gather).parameters) > 1:
        arguments += (size, torch.empty(size, device="meta").stride(), None, policy)
    with watch_collectives_in_place(only_if=has_no_data(padded)) as unseen:
        tensors, metadata = wrapped.fsdp_pre_all_gather(*arguments)
    if unseen:  # each rank would compute with what it has itself
        raise ValueError(
            f"{type(wrapped).__name__}.fsdp_pre_all_gather() calls {unseen[0]} of "
            "torch.distributed, which writes to its argument, so the compiler does not see it; "
            "have it call torch.distributed._functional_collectives, or do not compile the model"
        )

    def received(outputs: Sequence[Tensor]) -> Tensor:
        outputs = tuple(_without_padding(tensor, rows) for tensor in outputs)
        dtype = padded.dtype if policy.param_dtype is None else policy.param_dtype
        full: Tensor
        full, _ = wrapped.fsdp_post_all_gather(outputs, metadata, dtype)
        return full

    return Sending(tensors, received)


def _without_padding(full: Tensor, rows: Sequence[int]) -> Tensor:
    return full[slice(*rows)] if rows and full.shape[0] != rows[0] else full
