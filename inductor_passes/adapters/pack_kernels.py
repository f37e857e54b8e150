"""The Triton kernel behind :mod:`~.packs`, which alone imports this, on CUDA.

One launch copies up to 64 members, of several dtypes. What it must know of each (address, sizes) is
passed as arguments: a table in the device's memory would have to be sent there, and a captured
graph would keep an old table. A program copies a block of one row of one member: of the last member
whose first block is the program's block or one before.

Triton compiles another variant for a tuple of another length, and for each number in it that is
1, a multiple of 16, or of 64 bits; it cannot be told not to. So that buckets of all sizes share a
few variants, a table has one of a few lengths, and its numbers are sent as odd ones of 64 bits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

# The kernel takes these as defaults: Triton compares globals of a kernel at each launch, slowly.
BLOCK = 4096  # elements that a program copies
WARPS = 8
LENGTHS = (8, 16, 32, 64)  # members in a table; 64 are 2 KB of arguments
CODED = 2**32 + 1  # added to the double of a number: odd, and of 64 bits
STEP = 16  # bytes, or elements: what is aligned are multiples of it

# Other dtypes are only copied, as integers of the same size.
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAME = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@triton.jit
def decoded(number, CODED: tl.constexpr = CODED):  # type: ignore[no-untyped-def]
    """The number of 64 bits that :func:`_table` sends as ``number``."""
    return (number - CODED) >> 1


@triton.jit(do_not_specialize=["flat"])
def copy_members(  # type: ignore[no-untyped-def]
    flat,
    table,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    STEP: tl.constexpr = STEP,
):
    """Copy between members and ``flat``, ``[rows, total]``.

    Args:
        flat: pointer to its first element.
        table: coded: ``total``, and the column of the first member's first element. Then for each
            member: address; its first block; four times its elements (what ``flat`` has beyond is
            zero, or left out), plus the place of its dtype in ``DTYPES``; the column behind its
            last. Entries at the end whose first block is behind all blocks only fill the table up.
        DTYPES: that the members have, four at most.
        ALIGNED: all addresses, columns and elements are multiples of ``STEP``.
        PACKS: into ``flat``; else out of it.
    """
    block = tl.program_id(0)
    # Blocks are compared coded, by their lower 32 bits, which hold 2**30 of them.
    here_coded = 2 * block + 1
    at, member, first, size, end = table[1], table[2], table[3].to(tl.int32), table[4], table[5]
    for i in tl.static_range(6, len(table), 4):
        is_it = table[i + 1].to(tl.int32) <= here_coded  # or a later one
        at = tl.where(is_it, table[i - 1], at)
        member = tl.where(is_it, table[i], member)
        first = tl.where(is_it, table[i + 1].to(tl.int32), first)
        size = tl.where(is_it, table[i + 2], size)
        end = tl.where(is_it, table[i + 3], end)
    numel, dtype = decoded(size) >> 2, decoded(size) & 3
    width = decoded(end) - decoded(at)
    # The offset of a program's first element may need 64 bits; its elements are counted from there.
    blocks_of_row = tl.cdiv(width, BLOCK).to(tl.int32)
    of_member = (here_coded - first) >> 1
    row = (of_member // blocks_of_row).to(tl.int64)
    inside_row = (of_member % blocks_of_row).to(tl.int64) * BLOCK
    here = row * width + inside_row
    there = flat + (row * decoded(table[0]) + decoded(at) + inside_row)
    in_flat = tl.minimum(width - inside_row, BLOCK).to(tl.int32)
    in_member = tl.maximum(tl.minimum(numel - here, in_flat), 0).to(tl.int32)
    if ALIGNED:
        there = tl.multiple_of(there, STEP)
        in_flat, in_member = tl.multiple_of(in_flat, STEP), tl.multiple_of(in_member, STEP)
    lanes = tl.arange(0, BLOCK)
    for d in tl.static_range(len(DTYPES)):
        if dtype == d:
            start = decoded(member).to(tl.pointer_type(DTYPES[d])) + here
            if ALIGNED:
                start = tl.multiple_of(start, STEP)
            if PACKS:
                value = tl.load(start + lanes, mask=lanes < in_member, other=0)
                tl.store(there + lanes, value.to(flat.dtype.element_ty), mask=lanes < in_flat)
            else:
                value = tl.load(there + lanes, mask=lanes < in_member)
                tl.store(start + lanes, value, mask=lanes < in_member)


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
    flat, names, kinds = _as_numbers(flat, members)
    addresses, sizes = [m.data_ptr() for m in members], [m.numel() for m in members]
    aligned = _are_aligned(flat.data_ptr(), *addresses, *widths, *sizes)
    numbers = list(zip(addresses, widths, sizes, kinds, strict=True))
    for i in range(0, len(members), LENGTHS[-1]):
        some = numbers[i : i + LENGTHS[-1]]
        blocks, table = _table(some, rows, sum(widths[:i]), sum(widths))
        if blocks:
            with torch.cuda.device_of(flat) if flat.is_cuda else nullcontext():
                copy_members[(blocks,)](flat, table, names, aligned, packs, num_warps=WARPS)


def _are_aligned(*numbers: int) -> bool:
    return math.gcd(STEP, *numbers) == STEP


def _table(
    members: Sequence[tuple[int, int, int, int]], rows: int, column: int, total: int
) -> tuple[int, tuple[int, ...]]:
    """The number of blocks of some members (address, width, elements, place of dtype), and the
    kernel's table of them, filled up to one of :data:`LENGTHS` with entries that have no block."""
    coded = CODED
    table = [2 * total + coded, 2 * column + coded]
    first, end = 0, column
    for address, width, size, kind in members:
        end += width
        table += (2 * address + coded, 2 * first + coded, 8 * size + 2 * kind + coded)
        table.append(2 * end + coded)
        first += rows * -(-width // BLOCK)
    length = LENGTHS[bisect_left(LENGTHS, len(members))]
    beyond = (coded, 2 * first + coded, coded, 2 * end + coded)
    return first, (*table, *beyond * (length - len(members)))


def _as_numbers(
    flat: Tensor, members: Sequence[Tensor]
) -> tuple[Tensor, tuple[tl.dtype, ...], list[int]]:
    """How the kernel sees ``flat`` and the members, as floats that are cast or as bits: ``flat``,
    the distinct dtypes of members, in an order that does not depend on theirs, and for each member
    the place of its dtype."""
    dtypes = [member.dtype for member in members]
    there = set(dtypes)
    if there == {flat.dtype}:
        bits = _BITS[flat.dtype.itemsize]
        return flat.view(bits), (_SAME[bits],), [0] * len(members)
    place = {dtype: i for i, dtype in enumerate(d for d in _FLOATS if d in there)}
    return flat, tuple([_FLOATS[d] for d in place]), [place[d] for d in dtypes]
