"""What the modelled wire runs on a GPU: kernels that hold its blocks until a transfer's time is up.

NCCL keeps as many blocks on the device as it has channels for as long as a transfer takes, and each
leaves little of its SM to anybody else. A block that only looked at the clock would fit beside
compute, on the same SM; here it holds so many numbers that it has all registers of an SM (128 for
each of 512 threads, says ptxas).

Only imported where there is Triton; compiled without a GPU by
``tests/benchmarks/test_wire_kernels.py``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

WARPS = 16
HELD = WARPS * 32 * 64  # numbers that a block holds, 64 per thread


@triton.jit
def _now_ns():
    """The device's clock, which all its blocks and streams share."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def stamp(began):
    """Note when a transfer begins."""
    tl.store(began, _now_ns())


@triton.jit(do_not_specialize=["takes_ns"])
def hold(began, takes_ns, kept, HELD: tl.constexpr):
    """Stay until ``takes_ns`` after what ``stamp`` noted, copies included; a block that comes late
    stays no longer.

    What is read from ``kept`` is in registers meanwhile, for it might be written back.
    """
    at = tl.arange(0, HELD)
    mine = tl.load(kept + at)
    end = tl.load(began) + takes_ns
    now = _now_ns()
    while now < end:
        now = _now_ns()
    tl.store(kept + at, mine + 1, mask=now < 0)


def sources() -> list[tuple[Any, dict[str, str], dict[str, int]]]:
    """Each kernel with the types of its arguments and its constants, to compile without a GPU."""
    spins = {"began": "*i64", "takes_ns": "i32", "kept": "*fp32", "HELD": "constexpr"}
    return [(stamp, {"began": "*i64"}, {}), (hold, spins, {"HELD": HELD})]
