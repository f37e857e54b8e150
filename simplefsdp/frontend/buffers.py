"""Buffers inside ``unsharded``: what rank 0 has written goes to all ranks, as its parameters do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simplefsdp._torch import has_no_data
from simplefsdp.frontend.placement import bits_of, from_first_rank


class BufferSlot(NamedTuple):
    """A plain buffer as it was when parameters were made whole."""

    owner: nn.Module
    name: str  # in its owner
    path: str  # from the module that was made whole
    before: Tensor  # a copy of its value

    @property
    def now(self) -> Tensor | None:
        """What stands in its place."""
        return self.owner._buffers.get(self.name)

    def written(self) -> Tensor | None:
        """What stands in its place, if its value is another one, bit for bit; else None."""
        now, before = self.now, self.before
        if now is None or (now.shape, now.dtype) != (before.shape, before.dtype):
            return now
        return None if torch.equal(bits_of(now), bits_of(before.to(now.device))) else now


def buffers_of(module: nn.Module) -> list[BufferSlot]:
    """The buffers of ``module`` and what is in it that have values; a shared one comes once."""
    found: dict[int, BufferSlot] = {}
    for prefix, owner in module.named_modules():
        for name, tensor in owner._buffers.items():
            if tensor is None or isinstance(tensor, DTensor) or has_no_data(tensor):
                continue
            path = f"{prefix}.{name}" if prefix else name
            if id(tensor) not in found:
                found[id(tensor)] = BufferSlot(owner, name, path, tensor.detach().clone())
    return list(found.values())


@torch.no_grad()
def send_written(buffers: Sequence[BufferSlot], mesh: DeviceMesh) -> None:
    """Give every rank of ``mesh`` the buffers that its first rank has written to; collective.

    Raises:
        ValueError: such a buffer has another size on this rank.
    """
    if not buffers:
        return
    groups = mesh.get_all_groups()
    # Of what was written to, how many bytes; of the rest, -1.
    sizes = [-1 if (now := b.written()) is None else bits_of(now).numel() for b in buffers]
    told = torch.tensor(sizes, dtype=torch.int64, device=mesh.device_type)
    from_first_rank(told, groups)
    other: list[str] = []
    for buffer, nbytes in zip(buffers, told.tolist(), strict=True):
        if nbytes < 0:
            continue
        now = buffer.now
        own = torch.empty(0) if now is None else bits_of(now)
        fits = own.numel() == nbytes
        # A rank where it does not fit takes part, for the others wait for it.
        sent = own.to(mesh.device_type, copy=True) if fits else told.new_empty(nbytes).byte()
        from_first_rank(sent, groups)
        if now is None or not fits:
            other.append(buffer.path)
        else:
            now.copy_(sent.to(now.device).view(now.dtype).view(now.shape))
    if other:
        raise ValueError(
            f"unsharded: rank 0 has written to the buffer {other[0]}, which has another size on "
            "this rank; write to it on every rank"
        )
