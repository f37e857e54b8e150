"""Time collectives: alone, as buckets that are launched as one, and beside compute."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from inductor_passes.ir.program import CollectiveKind
from inductor_passes.machine.cluster import LINK_KINDS
from simplefsdp.calibrate.fit import Sample
from simplefsdp.calibrate.measure import Sweep, matmuls
from simplefsdp.calibrate.timers import Call, medians_us, timer_for
from simplefsdp.launcher.ranks import group_of

MEMBERS = 8
_ops = torch.ops._c10d_functional


def time_collectives(
    ranks: int, sweep: Sweep, device: torch.device
) -> dict[CollectiveKind, list[Sample]]:
    """Time the collectives among the first ``ranks`` ranks, each size as one buffer and those of
    :func:`buckets` as several, too; every rank of the world must call it.

    Sizes are rounded so that the ranks' shards are equal. Ranks that take no part get nothing.
    """
    group = group_of(list(range(ranks)))
    found: dict[CollectiveKind, list[Sample]] = {}
    if dist.get_rank() < ranks:
        several = buckets(sweep, ranks)
        shards = dict.fromkeys([*_shards(sweep.nbytes, ranks), *map(sum, several)])
        at = ranks, group.group_name, device
        for kind in LINK_KINDS:
            calls = {(n, 1): _waited(_launch(kind, n, *at)) for n in shards}
            for parts in several:
                calls[sum(parts), len(parts)] = _coalesced(kind, parts, *at)
            us = medians_us(calls, sweep.repeats, timer_for(device), together=True)
            found[kind] = [Sample(4.0 * n * ranks, t, members) for (n, members), t in us.items()]
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def buckets(sweep: Sweep, ranks: int) -> list[list[int]]:
    """The fp32 elements of a rank's shard of each member, of each bucket that is timed as several.

    One and two layers, where the sweep has a layer's parameters; else all sizes that can be cut
    into :data:`MEMBERS`.
    """
    if sweep.layer_nbytes:
        layer = _shards(sweep.layer_nbytes, ranks)
        return [layer, layer * 2]
    return [halved(n) for n in dict.fromkeys(_shards(sweep.nbytes, ranks)) if n >= 2**MEMBERS]


def _shards(nbytes: Sequence[int], ranks: int) -> list[int]:
    return [max(1, n // (4 * ranks)) for n in nbytes]


def halved(numel: int) -> list[int]:
    """Sizes of a bucket's members, each half of the one before, as in a layer large and small."""
    parts = [numel >> i for i in range(1, MEMBERS)]
    return [*parts, numel - sum(parts)]


def _launch(
    kind: CollectiveKind, numel: int, ranks: int, group: str, device: torch.device
) -> Callable[[], Tensor]:
    """The collective that a compiled graph launches, of ``numel`` fp32 elements per shard."""
    sent = torch.randn(numel if kind == "gather" else numel * ranks, device=device)
    if kind == "gather":
        return lambda: _ops.all_gather_into_tensor(sent, ranks, group)
    if kind == "reduce":
        return lambda: _ops.reduce_scatter_tensor(sent, "sum", ranks, group)
    return lambda: _ops.all_reduce(sent, "sum", group)


def _waited(launched: Callable[[], Tensor]) -> Call:
    return lambda: _ops.wait_tensor(launched())


def _coalesced(
    kind: CollectiveKind, parts: Sequence[int], ranks: int, group: str, device: torch.device
) -> Call:
    """A bucket of tensors with so many fp32 elements per shard."""
    each = 1 if kind == "gather" else ranks
    sent = [torch.randn(n * each, device=device) for n in parts]

    def run() -> None:
        if kind == "gather":
            results = _ops.all_gather_into_tensor_coalesced(sent, ranks, group)
        elif kind == "reduce":
            results = _ops.reduce_scatter_tensor_coalesced(sent, "sum", ranks, group)
        else:
            results = _ops.all_reduce_coalesced(sent, "sum", group)
        for result in results:
            _ops.wait_tensor(result)

    return run


def compute_beside(sweep: Sweep, device: torch.device) -> float | None:
    """Fraction of its speed that compute keeps beside gathers and reduces; every rank must call it.

    Matmuls that take a third of a transfer of the largest size, alone and while one is under way
    among all ranks, in turns; the mean over ranks. None if any rank's transfers are too short for
    that.
    """
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    shard, timer = max(1, max(sweep.nbytes) // (4 * ranks)), timer_for(device)
    launches = [_launch(kind, shard, ranks, group, device) for kind in ("gather", "reduce")]
    transfers = {i: _waited(launched) for i, launched in enumerate(launches)}
    room_us = min(medians_us(transfers, sweep.repeats, timer, together=True).values()) / 3
    layers = layers_beside(sweep, device)
    layers_us = medians_us(layers, sweep.repeats, timer)
    widest = max((width for width, us in layers_us.items() if us <= room_us), default=0)
    agreed = torch.tensor(widest, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if not (width := int(agreed)):
        return None
    layer, count = layers[width], max(1, int(room_us / layers_us[width]))
    kept = torch.zeros((), device=device)
    for launched in launches:
        alone, beside = [], []
        for _ in range(sweep.repeats):
            dist.barrier()
            started = launched()
            beside.append(timer.elapsed_us(layer, count))  # a transfer has a stream of its own
            _ops.wait_tensor(started)
            alone.append(timer.elapsed_us(layer, count))
        kept += min(1.0, statistics.median(alone) / statistics.median(beside))
    dist.all_reduce(kept)
    return kept.item() / (ranks * len(launches))


def layers_beside(sweep: Sweep, device: torch.device) -> dict[int, Call]:
    """The matmuls that may run beside transfers, by width: as training has them, if it can be."""
    widths = [width for width in sweep.widths if width >= sweep.beside_width]
    return {width: matmuls(sweep.beside_dtype, width, device) for width in widths}
