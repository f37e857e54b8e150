"""The kernel of ``pack_kernels`` interpreted on CPU tensors, or compiled for GPUs not at hand.

``test_packs.py`` runs it in a process of its own, with ``TRITON_INTERPRET=1`` or without, and reads
JSON. ``on_device.py`` takes the cases, where there may be no Triton.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from torch import Tensor

from inductor_passes.adapters import packs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COMPILED = (
    "fp32 -> bf16",
    "mixed -> fp32",
    "empty",
    "of a rank without rows",
    "of one byte",
    "aligned",
    "unaligned",
)


def floats(sizes: list[int], *dtypes: torch.dtype) -> list[Tensor]:
    """Numbers of every size, those that are halfway between two of 16 bits, and no numbers."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, size in enumerate(sizes):
        values = torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int32)
        values[1::3] = values[1::3] & -65536 | 0x8000
        values[2::7] = torch.tensor(float("inf")).view(torch.int32)
        values = values.view(FP32).nan_to_num(nan=1.0)
        made.append(values.to(dtypes[i % len(dtypes)]))
    return made


def cases() -> dict[str, tuple[list[Tensor], int, list[int], torch.dtype]]:
    """Members, rows, widths, and the dtype that they are packed in."""
    sizes = [40, 100, 7, 0, 9000]
    rows_of = [20, 50, 4, 3, 4500]  # of two rows; some elements are missing
    whole = [2 * width for width in rows_of]
    return {
        "bf16": (floats(whole, BF16), 2, rows_of, BF16),
        "fp32": (floats(whole, FP32), 2, rows_of, FP32),
        "fp16": (floats(whole, FP16), 2, rows_of, FP16),
        "fp32 -> bf16": (floats(whole, FP32), 2, rows_of, BF16),
        "bf16 -> fp32": (floats(whole, BF16), 2, rows_of, FP32),
        "mixed -> fp32": (floats(whole, FP32, BF16, FP16), 2, rows_of, FP32),
        "mixed -> bf16": (floats(whole, FP32, BF16), 2, rows_of, BF16),
        "uneven": (floats(sizes, FP32, BF16), 2, rows_of, BF16),
        "many": (floats([n % 50 for n in range(200)], FP32, BF16), 1, [50] * 200, BF16),
        "empty": (floats([0, 0], FP32), 4, [0, 0], BF16),
        "of a rank without rows": (floats([0, 0], FP32), 2, [3, 5], BF16),
        "of one byte": ([torch.arange(8, dtype=torch.uint8)] * 2, 2, [4, 5], torch.uint8),
        "aligned": (floats([8192, 16384], FP32, BF16), 2, [4096, 8192], BF16),
        "unaligned": ([m[1:] for m in floats([8193, 4097], FP32)], 1, [8192, 4096], BF16),
    }


def interpret() -> dict[str, Any]:
    """Per case: whether the kernel gives the bits of its twin, both ways, and what it moved."""
    import numpy as np
    from triton.runtime import interpreter

    from inductor_passes.adapters import pack_kernels

    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    cast, load, store = builder.cast_impl, builder.create_masked_load, builder.create_masked_store
    moved = {"read": 0, "written": 0}

    def exact(self: Any, src: Any, dst_type: Any) -> Any:
        """The interpreter's own casts cut fp32 off to bf16, and know no infinity. A GPU rounds, by
        ``cvt.rn``: what it is compiled to says so."""
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.float32, tl.bfloat16):
            bits = torch.from_numpy(np.ascontiguousarray(src.data)).to(BF16).view(torch.int16)
            return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            bits = torch.from_numpy(np.ascontiguousarray(src.data).view(np.int16)).view(BF16)
            return interpreter.TensorHandle(bits.to(FP32).numpy(), tl.float32)
        return cast(self, src, dst_type)

    def counting_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        moved["read"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest)

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved["written"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    builder.cast_impl = exact
    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    pack_kernels.LENGTHS = (2, 4, 8)  # so that cases have tables of each, and several
    found = {}
    for name, (members, rows, widths, dtype) in cases().items():
        packed = packs.pack(members, rows, widths, dtype)
        moved.update(read=0, written=0)
        flat = pack_kernels.pack(members, rows, widths, dtype)
        into = dict(moved)
        moved.update(read=0, written=0)
        parts = pack_kernels.unpack(flat, rows, widths)
        twins = packs.unpack(packed, rows, widths)
        found[name] = {
            "packed": same_bits(flat, packed),
            "unpacked": len(parts) == len(twins) and all(map(same_bits, parts, twins)),
            "pack": into,
            "unpack": dict(moved),
            "least": {
                "read": sum(member.nbytes for member in members),
                "written": rows * sum(widths) * dtype.itemsize,
            },
        }
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def compile_for(capabilities: list[int]) -> dict[str, Any]:
    """Per capability and case: what the launches, which are not made, were compiled to."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from inductor_passes.adapters import pack_kernels

    class NoGpu:
        """One device per capability, of that number."""

        device = 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.device, 32)

        def get_current_device(self) -> int:
            return self.device

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(NoGpu())
    compiled: list[Any] = []
    run = pack_kernels.copy_members.run

    def only_compile(*args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(*args, warmup=True, **kwargs))

    def launches(copy: Any, *args: Any) -> list[dict[str, Any]]:
        compiled.clear()
        copy(*args)
        return [describe(kernel) for kernel in compiled]

    pack_kernels.copy_members.run = only_compile
    found: dict[str, Any] = {}
    for NoGpu.device in capabilities:
        of_this = found[str(NoGpu.device)] = {}
        for name in (*COMPILED, *(["many"] if NoGpu.device == 90 else [])):  # 8 kernels
            members, rows, widths, dtype = cases()[name]
            flat = packs.pack(members, rows, widths, dtype)
            of_this[name] = {
                "pack": launches(pack_kernels.pack, members, rows, widths, dtype),
                "unpack": launches(pack_kernels.unpack, flat, rows, widths),
            }
    NoGpu.device = 90
    found["variants"] = {name: variants(buckets, launches) for name, buckets in alike().items()}
    return found


def variants(buckets: Any, launches: Any) -> list[int]:
    """How many are compiled to pack some buckets, and to unpack them."""
    from inductor_passes.adapters import pack_kernels

    ways: list[set[str]] = [set(), set()]
    for members, rows, widths, dtype in buckets:
        begin = sum(widths) % 2  # an odd one is not where an aligned buffer begins
        flat = torch.empty(begin + rows * sum(widths), dtype=dtype, device="meta")[begin:]
        packed = launches(pack_kernels.pack, members, rows, widths, dtype)
        unpacked = launches(pack_kernels.unpack, flat, rows, widths)
        for way, kernels in zip(ways, (packed, unpacked), strict=True):
            way.update(kernel["hash"] for kernel in kernels)
    return [len(way) for way in ways]


def alike() -> dict[str, list[tuple[list[Tensor], int, list[int], torch.dtype]]]:
    """Buckets of many sizes that are to share a variant of the kernel each way, only shapes."""

    def bucket(rows: int, *widths: int, dtypes: Any = (FP32,)) -> Any:
        sizes = [rows * width for width in widths]
        members = [
            torch.empty(size, dtype=dtypes[i % len(dtypes)], device="meta")
            for i, size in enumerate(sizes)
        ]
        return members, rows, list(widths), BF16

    return {
        "aligned": [
            bucket(1, 16),
            bucket(2, 16, 0, 32),
            bucket(16, *[4096] * 8),
            bucket(8, 2**33, 2**31),
        ],
        "unaligned": [
            bucket(1, 1),
            bucket(2, 1, 0, 16),
            bucket(16, 7, 2**31 + 1),
            bucket(3, *[5] * 8),
        ],
        "of two dtypes": [
            bucket(2, 16, 16, dtypes=(FP32, BF16)),
            bucket(1, 16, 32, 64, dtypes=(BF16, FP32)),
        ],
        "more members": [bucket(8, *[16] * 9), bucket(8, *[16] * 16)],
    }


def describe(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["ptx"]
    instructions = re.findall(r"\b(?:ld|st)\.global\S*|\bcvt\.rn\S*", text)
    return {
        "binary": len(kernel.asm["cubin"]),
        "instructions": sorted(set(instructions)),
        "hash": kernel.hash,
    }


if __name__ == "__main__":
    print(
        json.dumps(
            interpret() if os.environ.get("TRITON_INTERPRET") else compile_for([80, 90, 100])
        )
    )
