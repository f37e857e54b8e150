"""Buffers inside ``unsharded``: what rank 0 has written goes to all ranks, as its parameters do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp._torch import has_no_data
from simplefsdp.frontend.slots import Slot


class BufferSlot(NamedTuple):
    """A plain buffer as it was when parameters were made whole."""

    owner: nn.Module
    name: str
    path: str
    tensor: Tensor
    version: int

    @property
    def now(self) -> Tensor | None:
        """What stands in its place."""
        return self.owner._buffers.get(self.name)

    def __str__(self) -> str:
        now = self.now
        return f"{self.path}: {None if now is None else (tuple(now.shape), now.dtype)}"

    def is_written(self) -> bool:
        """Whether it is another tensor, or was written to in place."""
        return self.now is not self.tensor or _version(self.tensor) != self.version


def buffers_of(module: nn.Module) -> list[BufferSlot]:
    """The buffers of ``module`` and what is in it that have values; a shared one comes once."""
    found: dict[int, BufferSlot] = {}
    for prefix, owner in module.named_modules():
        for name, tensor in owner._buffers.items():
            if tensor is None or isinstance(tensor, DTensor) or has_no_data(tensor):
                continue
            path = f"{prefix}.{name}" if prefix else name
            found.setdefault(id(tensor), BufferSlot(owner, name, path, tensor, _version(tensor)))
    return list(found.values())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def send_written(buffers: Sequence[BufferSlot], slots: Sequence[Slot]) -> None:
    """Give every rank the buffers that rank 0 has written to; collective over the ranks of the
    parameters in ``slots``. All ranks have buffers of the same shapes and dtypes."""
    if not buffers or not slots:
        return
    widest = max(slots, key=lambda slot: slot.param.device_mesh.size())
    groups = [*widest.groups_of_copies(), *widest.param.device_mesh.get_all_groups()]
    flags = [buffer.is_written() for buffer in buffers]
    written = torch.tensor(flags, dtype=torch.uint8, device=widest.param.device)
    from_first_rank(written, groups)
    for buffer, is_written in zip(buffers, written.tolist(), strict=True):
        if is_written and (now := buffer.now) is not None:
            sent = now.detach().to(widest.param.device).reshape(-1).clone()
            from_first_rank(sent.view(torch.uint8), groups)
            now.copy_(sent.view_as(now))


def from_first_rank(tensor: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Overwrite ``tensor`` by what the first rank of all these groups has; collective."""
    for group in groups:
        if group.size() > 1:
            dist.broadcast(tensor, group=group, group_src=0)
