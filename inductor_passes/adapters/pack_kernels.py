"""The Triton kernel behind :mod:`~.packs`, which alone imports this, on CUDA.

One launch copies up to 64 members, of several dtypes. What it must know of each (address, sizes)
are its arguments: a table in the device's memory would have to be sent there, and a captured graph
would hold what it was. A program copies a block of one row of one member, and finds out which by
adding up the blocks of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

BLOCK = tl.constexpr(4096)  # elements that a program copies
WARPS = 8
AT_ONCE = 64  # a launch takes 4 KB of arguments

# Any other dtype is only copied, as whole numbers of its size.
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAME = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@triton.jit
def copy_members(  # type: ignore[no-untyped-def]
    flat,
    members,
    rows,
    column,
    total,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Copy between members and ``flat``, ``[rows, total]``.

    Args:
        flat: pointer to its first element.
        members: of each, one after the other: address; columns in ``flat``; elements (what
            ``flat`` has beyond is zero, or left out); place of its dtype in ``DTYPES``.
        rows: of ``flat``.
        column: of the first member's first element.
        total: columns of ``flat``.
        DTYPES: that the members have.
        ALIGNED: the address of each is a multiple of 16.
        PACKS: into ``flat``; else out of it.
    """
    block = tl.program_id(0)
    member, width, numel, dtype = members[0], members[1], members[2], members[3]
    begin, first, at = 0, 0, column
    for i in tl.static_range(0, len(members), 4):
        is_it = block >= first  # or a later one
        member = tl.where(is_it, members[i], member)
        width = tl.where(is_it, members[i + 1], width)
        numel = tl.where(is_it, members[i + 2], numel)
        dtype = tl.where(is_it, members[i + 3], dtype)
        begin = tl.where(is_it, first, begin)
        at = tl.where(is_it, column, at)
        first += rows * tl.cdiv(members[i + 1], BLOCK)
        column += members[i + 1]
    blocks_of_row = tl.cdiv(width, BLOCK)
    row = ((block - begin) // blocks_of_row).to(tl.int64)
    inside_row = ((block - begin) % blocks_of_row) * BLOCK + tl.arange(0, BLOCK)
    here = row * width + inside_row
    there = flat + row * total + at + inside_row
    is_there = inside_row < width
    is_here = is_there & (here < numel)
    for d in tl.static_range(len(DTYPES)):
        if dtype == d:
            start = member.to(tl.pointer_type(DTYPES[d]))
            if ALIGNED:
                start = tl.multiple_of(start, 16)
            if PACKS:
                value = tl.load(start + here, mask=is_here, other=0)
                tl.store(there, value.to(flat.dtype.element_ty), mask=is_there)
            else:
                tl.store(start + here, tl.load(there, mask=is_here), mask=is_here)


def pack(members: Sequence[Tensor], rows: int, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """See :func:`inductor_passes.adapters.packs.pack`."""
    flat = members[0].new_empty(rows * sum(widths), dtype=dtype)
    _launch(flat, [member.contiguous() for member in members], rows, widths, packs=True)
    return flat


def unpack(flat: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """See :func:`inductor_passes.adapters.packs.unpack`."""
    members = [flat.new_empty(rows * width) for width in widths]
    _launch(flat.contiguous(), members, rows, widths, packs=False)
    return members


def _launch(
    flat: Tensor, members: Sequence[Tensor], rows: int, widths: Sequence[int], *, packs: bool
) -> None:
    total = sum(widths)
    flat, dtypes = _as_numbers(flat, members)
    names = tuple(dict.fromkeys(dtypes))
    column = 0
    for i in range(0, len(members), AT_ONCE):
        some, their = members[i : i + AT_ONCE], widths[i : i + AT_ONCE]
        kinds = (names.index(dtype) for dtype in dtypes[i : i + AT_ONCE])
        table = tuple(
            number
            for member, width, kind in zip(some, their, kinds, strict=True)
            # An empty one is at 0, which Triton takes for a number of 32 bits, and no pointer.
            for number in (member.data_ptr() or flat.data_ptr(), width, member.numel(), kind)
        )
        blocks = rows * sum(-(-width // BLOCK.value) for width in their)
        if blocks:
            aligned = all(address % 16 == 0 for address in table[::4])
            with torch.cuda.device_of(flat) if flat.is_cuda else nullcontext():
                copy_members[(blocks,)](
                    flat, table, rows, column, total, names, aligned, packs, num_warps=WARPS
                )
        column += sum(their)


def _as_numbers(flat: Tensor, members: Sequence[Tensor]) -> tuple[Tensor, list[tl.dtype]]:
    """What the kernel takes ``flat`` and the members for: floats that are cast, or bits."""
    if all(member.dtype == flat.dtype for member in members):
        bits = _BITS[flat.dtype.itemsize]
        return flat.view(bits), [_SAME[bits]] * len(members)
    return flat, [_FLOATS[member.dtype] for member in members]
