"""Times kernels on the ranks at hand: medians of interleaved repeats.

Operands are random, because multiplying ones takes less power, so that a GPU would clock higher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from simplefsdp.calibrate.fit import Sample
from simplefsdp.calibrate.timers import Call, Timer, host_clock, medians_us, timer_for

_TOO_LONG_US = 2e5  # of one call


@dataclass(frozen=True)
class Sweep:
    """The sizes that are measured; each of them ``repeats`` times, interleaved."""

    nbytes: Sequence[int]  # sizes of collectives, in bytes of the full tensor
    widths: Sequence[int]  # widths of square matmuls
    sequences: Sequence[int]  # sequence lengths of attention
    memory_nbytes: int  # of each of two arrays, for copies between them; more than a cache holds
    repeats: int
    heads: tuple[int, int] = (8, 64)  # number of attention heads, and channels of each
    beside_dtype: torch.dtype = torch.float32  # dtype of the matmuls beside transfers
    beside_width: int = 0  # their least width: that of matmuls which transfers slow in training
    # Bytes of each full parameter of a layer, of which buckets are made. If empty, buckets consist
    # of tensors each half as large as the one before.
    layer_nbytes: Sequence[int] = ()


_CPU = Sweep((), (64, 128, 256, 512, 1024), (128, 256, 512, 1024), memory_nbytes=2**26, repeats=15)
_CUDA = Sweep(
    (),
    widths=(256, 512, 1024, 2048, 4096, 8192),
    sequences=(1024, 2048, 4096, 8192),
    memory_nbytes=2**30,
    repeats=15,
    heads=(32, 128),
    beside_dtype=torch.bfloat16,
    beside_width=4096,
)
_QUICK_CPU = replace(_CPU, widths=(64, 256), sequences=(128,), memory_nbytes=2**22, repeats=3)
_QUICK_CUDA = replace(_CUDA, widths=(512, 4096), sequences=(1024,), memory_nbytes=2**28, repeats=3)


def sweep_for(
    device: str, *, quick: bool, nbytes_max: int | None, layer_nbytes: Sequence[int] = ()
) -> Sweep:
    """The sizes for a device, which take seconds. Those of collectives go from 4 KiB to
    ``nbytes_max`` (by default 16 MiB on CPU, 1 GiB on CUDA).

    If two layers of ``layer_nbytes`` exceed ``nbytes_max``, they are scaled down to it.
    """
    cpu = device == "cpu"
    largest, step = nbytes_max or (2**24 if cpu else 2**30), 64 if quick else 4
    nbytes = [largest]
    while nbytes[0] // step >= min(2**12, largest // step):
        nbytes.insert(0, nbytes[0] // step)
    scale = min(1.0, largest / (2 * sum(layer_nbytes) or 1))
    layer = [int(n * scale) for n in layer_nbytes]
    sizes = (_QUICK_CPU if cpu else _QUICK_CUDA) if quick else (_CPU if cpu else _CUDA)
    return replace(sizes, nbytes=nbytes, layer_nbytes=layer)


def _samples(calls: Mapping[float, Call], repeats: int, timer: Timer) -> list[Sample]:
    return [Sample(size, us) for size, us in medians_us(calls, repeats, timer).items()]


def groups_of(world_size: int, local_size: int) -> Iterator[tuple[int, int]]:
    """Sizes of groups to measure, as (ranks, nodes): powers of two and the whole, first within a
    node, then across nodes."""
    for unit, most in ((1, local_size), (local_size, world_size // local_size)):
        sizes = {2**i for i in range(1, most.bit_length()) if 2**i <= most} | {most}
        for size in sorted(sizes - {0, 1}):
            yield size * unit, size if unit != 1 or local_size == 1 else 1


def time_matmuls(dtype: torch.dtype, sweep: Sweep, device: torch.device) -> list[Sample]:
    """Time square matmuls: the mean of a linear layer's three, one forward and two backward."""
    timer = timer_for(device)
    calls = {2.0 * width**3: matmuls(dtype, width, device) for width in sweep.widths}
    samples = _samples(_affordable(calls, timer), sweep.repeats, timer)
    return [Sample(s.size, s.us / 3) for s in samples]


def matmuls(dtype: torch.dtype, width: int, device: torch.device) -> Call:
    """A call of the three matmuls of a square linear layer: forward, and two in backward."""
    tensor = partial(torch.randn, width, width, dtype=dtype, device=device)
    x, weight, grad, out = tensor(), tensor(), tensor(), tensor()

    def run() -> None:
        torch.mm(x, weight.t(), out=out)
        torch.mm(grad, weight, out=out)
        torch.mm(grad.t(), x, out=out)

    return run


def time_attention(dtype: torch.dtype, sweep: Sweep, device: torch.device) -> list[Sample]:
    """Time causal attention, forward and backward together. Sizes are the operations of both, of
    which the causal mask leaves half."""
    heads, channels = sweep.heads
    timer = timer_for(device)

    def attention(length: int) -> Call:
        tensor = partial(torch.randn, 1, heads, length, channels, dtype=dtype, device=device)
        q, k, v = (tensor(requires_grad=True) for _ in range(3))
        grad = tensor()

        def run() -> None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), grad)

        return run

    # Two matmuls forward, five backward, of 2 * length^2 * channels operations per head; half of
    # these are done.
    calls = {7.0 * heads * channels * n**2: attention(n) for n in sweep.sequences}
    return _samples(_affordable(calls, timer), sweep.repeats, timer)


def _affordable(calls: Mapping[float, Call], timer: Timer) -> Mapping[float, Call]:
    """The calls in ascending size, up to the first that takes too long, as in an emulated dtype, or
    before the first that runs out of memory, as for attention that keeps all scores."""
    kept: dict[float, Call] = {}
    for size, call in calls.items():
        try:
            too_long = len(kept) > 0 and medians_us({size: call}, 1, timer)[size] > _TOO_LONG_US
        except torch.OutOfMemoryError:
            break
        kept[size] = call
        if too_long:
            break
    return kept


def memory_gb_s(sweep: Sweep, device: torch.device) -> tuple[float, float]:
    """Memory bandwidth in 1e9 bytes per second: the best that was seen; and that of a loop with
    arithmetic (SiLU), as most loops are."""
    source, out = (torch.randn(sweep.memory_nbytes // 4, device=device) for _ in range(2))
    calls: dict[str, Call] = {
        "copy": lambda: out.copy_(source),
        "silu": lambda: torch.ops.aten.silu.out(source, out=out),
    }
    us = medians_us(calls, sweep.repeats, timer_for(device))
    gb_s = {name: 2 * sweep.memory_nbytes / us[name] / 1e3 for name in us}
    return max(gb_s.values()), gb_s["silu"]


def launch_us(device: torch.device) -> float:
    """Time per kernel of a long series of tiny kernels, which is the time that the host takes to
    launch one."""
    tiny, count = torch.ones(1, device=device), 500

    def row() -> None:
        for _ in range(count):
            tiny.add_(1)

    return medians_us({"row": row}, 5, host_clock(device))["row"] / count
