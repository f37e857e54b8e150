"""What a NIC would copy, and the modelled wire does: one shard into all slots, one slot out.

With few calls of torch for each member: on CUDA many took the host longer than the device, and a
NIC takes nothing of the host for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather(outputs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int, size: int) -> None:
    """Each of ``outputs`` is ``size`` times the shard in ``inputs``, all equal to this rank's."""
    parts: list[Tensor] = []
    rows: list[Tensor] = []
    for output, shard in zip(outputs, inputs, strict=True):
        slots, row = output.view(size, -1), shard.reshape(-1)
        begins_at = output.data_ptr() + rank * shard.nbytes
        after = rank + (shard.data_ptr() == begins_at)  # it may lie in its slot
        if rank > 0:
            parts.append(slots[:rank])
            rows.append(row)
        if after < size:
            parts.append(slots[after:])
            rows.append(row)
    if parts:
        torch._foreach_copy_(parts, rows)


def reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int, size: int, factor: float
) -> None:
    """Each of ``outputs`` is this rank's slot of ``inputs``, ``factor`` times."""
    slots = [
        full.view(size, -1)[rank].view(output.shape)
        for output, full in zip(outputs, inputs, strict=True)
    ]
    if outputs and outputs[0].is_cuda:
        scatter_at_once(outputs, slots, factor)
        return
    for output, slot in zip(outputs, slots, strict=True):
        if factor == 1:
            output.copy_(slot)
        else:
            torch.mul(slot, factor, out=output)


def scatter_at_once(outputs: Sequence[Tensor], slots: Sequence[Tensor], factor: float) -> None:
    """The same by a few launches for all members."""
    torch._foreach_copy_(outputs, slots)
    if factor != 1:
        torch._foreach_mul_(outputs, factor)
