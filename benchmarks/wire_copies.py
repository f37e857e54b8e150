"""What a NIC would copy, and the modelled wire does: one shard into all slots, one slot out.

On CUDA a few launches copy for all members: some calls of torch for each member take the host
longer than the device, and a NIC takes nothing of the host for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather(outputs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int, size: int) -> None:
    """Each of ``outputs`` is ``size`` times the shard in ``inputs``, all equal to this rank's."""
    if outputs and outputs[0].is_cuda:
        gather_at_once(outputs, inputs, rank, size)
        return
    for output, shard in zip(outputs, inputs, strict=True):
        slots, row = output.view(size, -1), shard.reshape(1, -1)
        lies_there = shard.data_ptr() == slots[rank].data_ptr()
        for part in (slots[:rank], slots[rank + lies_there :]):
            part.copy_(row)


def gather_at_once(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int, size: int
) -> None:
    """The same by a few launches for all members."""
    slots: list[Tensor] = []
    rows: list[Tensor] = []
    for output, shard in zip(outputs, inputs, strict=True):
        of_ranks, row = list(output.view(size, -1).unbind()), shard.reshape(-1)
        if row.data_ptr() == of_ranks[rank].data_ptr():
            del of_ranks[rank]
        slots += of_ranks
        rows += [row] * len(of_ranks)
    if slots:  # there are none of a single rank, in place
        torch._foreach_copy_(slots, rows)


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
