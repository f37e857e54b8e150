"""Time collectives and kernels on the ranks at hand: medians of interleaved repeats."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inductor_passes.cluster import LINK_KINDS
from inductor_passes.program import CollectiveKind
from simplefsdp.calibrate.fit import Sample
from simplefsdp.launcher.ranks import group_of

Call = Callable[[], object]
K = TypeVar("K", bound=Hashable)
_TOO_LONG_US = 2e5  # of one call
_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        nbytes: full sizes of collectives.
        widths: of square matmuls.
        sequences: lengths of attention, 8 heads of 64 channels.
        memory_nbytes: of each of two arrays, one copied to the other; more than a cache holds.
        repeats: of everything, interleaved.
    """

    nbytes: Sequence[int]
    widths: Sequence[int]
    sequences: Sequence[int]
    memory_nbytes: int
    repeats: int


def sweep_for(device: str, *, quick: bool, nbytes_max: int | None) -> Sweep:
    """Sizes that take seconds: from 4 KiB to ``nbytes_max`` (16 MiB on CPU, 1 GiB on CUDA)."""
    cpu = device == "cpu"
    largest = nbytes_max or (2**24 if cpu else 2**30)
    step = 64 if quick else 4
    smallest = min(2**12, largest // step)
    nbytes = [largest]
    while nbytes[-1] // step >= smallest:
        nbytes.append(nbytes[-1] // step)
    if quick:
        return Sweep(nbytes[::-1], (64, 256), (128,), 2**22, 3)
    return Sweep(
        nbytes[::-1],
        (64, 128, 256, 512, 1024) if cpu else (256, 512, 1024, 2048, 4096, 8192),
        (128, 256, 512, 1024) if cpu else (1024, 2048, 4096, 8192),
        2**26 if cpu else 2**30,
        15,
    )


def medians_us(calls: Mapping[K, Call], repeats: int, device: torch.device) -> dict[K, float]:
    """The median time of each call; they take turns, after one untimed turn."""
    times: defaultdict[K, list[float]] = defaultdict(list)
    for turn in range(repeats + 1):
        for key, call in calls.items():
            _synchronize(device)
            start = time.perf_counter()
            call()
            _synchronize(device)
            if turn:
                times[key].append((time.perf_counter() - start) * 1e6)
    return {key: statistics.median(found) for key, found in times.items()}


def _samples(calls: Mapping[float, Call], repeats: int, device: torch.device) -> list[Sample]:
    return [Sample(size, us) for size, us in medians_us(calls, repeats, device).items()]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def groups_of(world_size: int, local_size: int) -> Iterator[tuple[int, int]]:
    """Sizes of groups to measure, as (ranks, nodes): powers of two and all, first within a node."""
    for unit, most in ((1, local_size), (local_size, world_size // local_size)):
        sizes = {2**i for i in range(1, most.bit_length()) if 2**i <= most} | {most}
        for size in sorted(sizes - {0, 1}):
            yield size * unit, size if unit != 1 or local_size == 1 else 1


def time_collectives(
    ranks: int, sweep: Sweep, device: torch.device
) -> dict[CollectiveKind, list[Sample]]:
    """Time the collectives among the first ``ranks`` ranks; every rank of the world must call it.

    Sizes are rounded so that the ranks' shards are equal. Ranks that take no part get nothing.
    """
    group = group_of(list(range(ranks)))
    found: dict[CollectiveKind, list[Sample]] = {}
    if dist.get_rank() < ranks:
        for kind in LINK_KINDS:
            shards = dict.fromkeys(max(1, nbytes // (4 * ranks)) for nbytes in sweep.nbytes)
            calls = {
                4.0 * n * ranks: _waited(_launch(kind, n, ranks, group.group_name, device))
                for n in shards
            }
            found[kind] = _samples(calls, sweep.repeats, device)
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def _launch(
    kind: CollectiveKind, numel: int, ranks: int, group: str, device: torch.device
) -> Callable[[], Tensor]:
    """The collective that a compiled graph launches, of ``numel`` fp32 elements per shard."""
    sent = torch.ones(numel if kind == "gather" else numel * ranks, device=device)
    if kind == "gather":
        return lambda: _ops.all_gather_into_tensor(sent, ranks, group)
    if kind == "reduce":
        return lambda: _ops.reduce_scatter_tensor(sent, "sum", ranks, group)
    return lambda: _ops.all_reduce(sent, "sum", group)


def _waited(launch: Callable[[], Tensor]) -> Call:
    return lambda: _ops.wait_tensor(launch())


def compute_beside(sweep: Sweep, device: torch.device) -> float | None:
    """Fraction of its speed that compute keeps beside gathers and reduces; every rank must call it.

    Matmuls in fp32 that take a third of a transfer of the largest size, alone and while one is
    under way among all ranks, in turns; the mean over ranks. None if any rank's transfers are too
    short for that.
    """
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    shard = max(1, max(sweep.nbytes) // (4 * ranks))
    launches = [_launch(kind, shard, ranks, group, device) for kind in ("gather", "reduce")]
    transfers = {i: _waited(launch) for i, launch in enumerate(launches)}
    room_us = min(medians_us(transfers, sweep.repeats, device).values()) / 3
    layers = {width: _matmuls(torch.float32, width, device) for width in sweep.widths}
    layers_us = medians_us(layers, sweep.repeats, device)
    widest = max((width for width, us in layers_us.items() if us <= room_us), default=0)
    agreed = torch.tensor(widest, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if not (width := int(agreed)):
        return None
    layer, count = layers[width], max(1, int(room_us / layers_us[width]))
    kept = torch.zeros((), device=device)
    for launch in launches:
        alone, beside = [], []
        for _ in range(sweep.repeats):
            dist.barrier()
            started = launch()
            beside.append(_elapsed_us(layer, count, device))
            _ops.wait_tensor(started)
            alone.append(_elapsed_us(layer, count, device))
        kept += min(1.0, statistics.median(alone) / statistics.median(beside))
    dist.all_reduce(kept)
    return kept.item() / (ranks * len(launches))


def _elapsed_us(call: Call, count: int, device: torch.device) -> float:
    """Of some calls; on CUDA, on the current stream alone: a transfer has its own."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def time_matmuls(dtype: torch.dtype, sweep: Sweep, device: torch.device) -> list[Sample]:
    """Square matmuls as a linear layer has them, one forward and two backward; their mean."""

    calls = {2.0 * width**3: _matmuls(dtype, width, device) for width in sweep.widths}
    samples = _samples(_affordable(calls, device), sweep.repeats, device)
    return [Sample(s.size, s.us / 3) for s in samples]


def _matmuls(dtype: torch.dtype, width: int, device: torch.device) -> Call:
    def tensor() -> Tensor:
        return torch.ones(width, width, dtype=dtype, device=device)

    x, weight, grad, out = tensor(), tensor(), tensor(), tensor()

    def run() -> None:
        torch.mm(x, weight.t(), out=out)
        torch.mm(grad, weight, out=out)
        torch.mm(grad.t(), x, out=out)

    return run


def time_attention(dtype: torch.dtype, sweep: Sweep, device: torch.device) -> list[Sample]:
    """Causal attention forward and backward, by the operations of both, of which half are done."""
    heads, channels = 8, 64

    def attention(length: int) -> Call:
        def tensor() -> Tensor:
            shape = (1, heads, length, channels)
            return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

        q, k, v = tensor(), tensor(), tensor()
        grad = torch.ones_like(q)

        def run() -> None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), grad)

        return run

    # Two matmuls forward, five backward, of 2 * length^2 * channels operations per head.
    calls = {7.0 * heads * channels * n**2: attention(n) for n in sweep.sequences}
    return _samples(_affordable(calls, device), sweep.repeats, device)


def _affordable(calls: Mapping[float, Call], device: torch.device) -> Mapping[float, Call]:
    """The calls in rising size until one takes too long, as in a dtype that is emulated."""
    kept = {}
    for size, call in calls.items():
        kept[size] = call
        if len(kept) > 1 and medians_us({size: call}, 1, device)[size] > _TOO_LONG_US:
            break
    return kept


def memory_gb_s(sweep: Sweep, device: torch.device) -> tuple[float, float]:
    """1e9 bytes per second of a copy, and of a loop with arithmetic (SiLU), as most are."""
    source, out = (torch.ones(sweep.memory_nbytes // 4, device=device) for _ in range(2))
    calls: dict[str, Call] = {
        "copy": lambda: out.copy_(source),
        "silu": lambda: torch.ops.aten.silu.out(source, out=out),
    }
    us = medians_us(calls, sweep.repeats, device)
    gb_s = {name: 2 * sweep.memory_nbytes / us[name] / 1e3 for name in us}
    return max(gb_s.values()), gb_s["silu"]


def launch_us(device: torch.device) -> float:
    """Time per kernel of a long row of kernels that do nothing else."""
    tiny, count = torch.ones(1, device=device), 500

    def row() -> None:
        for _ in range(count):
            tiny.add_(1)

    return medians_us({"row": row}, 5, device)["row"] / count
