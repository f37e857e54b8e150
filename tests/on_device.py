"""What ``test_on_device.py`` and the kit in ``benchmarks/gpu`` both ask of a device."""

from __future__ import annotations

import torch
from pack_checks import cases, same_bits
from torch import Tensor

from inductor_passes.adapters import packs


def packs_alike(device: torch.device) -> dict[str, dict[str, bool]]:
    """Of each case, whether the operators give on a device the bits of the plain twins on CPU.

    On CUDA they are the kernel; on CPU the twins themselves.
    """
    found = {}
    for name, (members, rows, widths, dtype) in cases().items():
        twin = packs.pack(members, rows, widths, dtype)
        flat = packs.PACK([moved(member, device) for member in members], rows, widths, dtype)
        parts = packs.UNPACK(moved(twin, device), rows, widths)
        twins = packs.unpack(twin, rows, widths)
        found[name] = {
            "packed": same_bits(flat.cpu(), twin),
            "unpacked": len(parts) == len(twins)
            and all(same_bits(part.cpu(), other) for part, other in zip(parts, twins, strict=True)),
        }
    return found


def moved(member: Tensor, device: torch.device) -> Tensor:
    """On a device, and there, too, so many elements behind an aligned address."""
    at = member.storage_offset()
    whole = torch.empty(at + member.numel(), dtype=member.dtype, device=device)
    return whole[at:].copy_(member.flatten()).view(member.shape)
