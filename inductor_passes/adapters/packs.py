"""The members of a bucket copied into one buffer, or out of it: each way one operator of the graph.

::

    pack: members, as they lie in memory              flat, [rows, columns of all members]
      a  0 1 2 3 4 5 6                                  0 1 2 3 │ a b
      b  a b c d                                        4 5 6 ▫ │ c d

A member fills its columns row by row, and zeros fill the rest of them: so a shard or gradient need
be neither padded nor cast before.

On CUDA each operator is one Triton kernel; elsewhere it is made of torch's operators. With fake
tensors it gives shapes only. The cost model sees an operator that reads its inputs and writes its
results once.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_NAMESPACE = "inductor_passes"
_PACK, _UNPACK = f"{_NAMESPACE}::pack", f"{_NAMESPACE}::unpack"

torch.library.define(
    _PACK, "(Tensor[] members, int rows, int[] widths, ScalarType dtype) -> Tensor"
)
torch.library.define(_UNPACK, "(Tensor flat, int rows, int[] widths) -> Tensor[]")

PACK = torch.ops.inductor_passes.pack.default
UNPACK = torch.ops.inductor_passes.unpack.default


def has_kernel(device: torch.device) -> bool:
    """Whether each operator is one kernel on a device."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def pack(members: Sequence[Tensor], rows: int, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """One buffer, ``[rows * sum(widths)]``, of what members hold.

    Args:
        members: each of at most ``rows`` times its width elements, on one device. If any has
            another dtype than the buffer, all must be floats of 16 or 32 bits.
        rows: of the buffer.
        widths: its columns for each member.
        dtype: of the buffer; casts round to the nearest, half to even.
    """
    parts = [
        pad(member.to(dtype).flatten(), (0, rows * width - member.numel())).view(rows, width)
        for member, width in zip(members, widths, strict=True)
    ]
    return torch.cat(parts, 1).flatten()


def unpack(flat: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """The columns of each member in a buffer of so many ``rows``, as tensors ``[rows * width]``."""
    parts = flat.view(rows, sum(widths)).split(list(widths), 1)
    return [part.clone(memory_format=torch.contiguous_format).flatten() for part in parts]


def _by_triton(name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        from inductor_passes.adapters import pack_kernels

        return getattr(pack_kernels, name)(*args)

    return run


for _operator, _plain in ((_PACK, pack), (_UNPACK, unpack)):
    torch.library.impl(_operator, "CPU", _plain)
    torch.library.impl(_operator, "CUDA", _by_triton(_plain.__name__))


@torch.library.register_fake(_PACK)
def _(members: Sequence[Tensor], rows: int, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    return members[0].new_empty(rows * sum(widths), dtype=dtype)


@torch.library.register_fake(_UNPACK)
def _(flat: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    return [flat.new_empty(rows * width) for width in widths]
