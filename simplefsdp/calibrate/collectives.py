"""Times collectives: one by one, as buckets that are launched as one, and beside compute."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

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
    """Time the collectives among the first ``ranks`` ranks; every rank of the world must call it.

    Each size is timed as one buffer; those of :func:`buckets` also as several tensors. Sizes are
    rounded so that the ranks' shards are equal. Ranks that take no part get an empty dict.
    """
    group = group_of(list(range(ranks)))
    found: dict[CollectiveKind, list[Sample]] = {}
    if dist.get_rank() < ranks:
        several = buckets(sweep, ranks)
        shards = dict.fromkeys([*_shards(sweep.nbytes, ranks), *map(sum, several)])
        at = ranks, group.group_name, device
        for kind in LINK_KINDS:
            calls = {
                (sum(parts), len(parts)): _waited(_launch(kind, parts, *at))
                for parts in (*([n] for n in shards), *several)
            }
            us = medians_us(calls, sweep.repeats, timer_for(device), together=True)
            found[kind] = [Sample(4.0 * n * ranks, t, members) for (n, members), t in us.items()]
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def buckets(sweep: Sweep, ranks: int) -> list[list[int]]:
    """The buckets that are timed as several tensors: for each bucket, the number of fp32 elements
    of a rank's shard of each member.

    If the sweep has the parameters of a layer, the buckets are one and two layers; else they are
    all sizes that can be divided into :data:`MEMBERS` members.
    """
    if sweep.layer_nbytes:
        layer = _shards(sweep.layer_nbytes, ranks)
        return [layer, layer * 2]
    return [halved(n) for n in dict.fromkeys(_shards(sweep.nbytes, ranks)) if n >= 2**MEMBERS]


def _shards(nbytes: Sequence[int], ranks: int) -> list[int]:
    return [max(1, n // (4 * ranks)) for n in nbytes]


def halved(numel: int) -> list[int]:
    """Sizes of a bucket's members, each half of the one before: a layer, too, has large and small
    parameters."""
    parts = [numel >> i for i in range(1, MEMBERS)]
    return [*parts, numel - sum(parts)]


def _launch(
    kind: CollectiveKind, parts: Sequence[int], ranks: int, group: str, device: torch.device
) -> Callable[[], Any]:
    """The collective as a compiled graph launches it. ``parts`` are the fp32 elements per shard, of
    one tensor, or of the several tensors of a bucket."""
    name, args = {
        "gather": ("all_gather_into_tensor", (ranks, group)),
        "reduce": ("reduce_scatter_tensor", ("sum", ranks, group)),
        "all_reduce": ("all_reduce", ("sum", group)),
    }[kind]
    each = 1 if kind == "gather" else ranks
    sent = [torch.randn(n * each, device=device) for n in parts]
    if len(sent) == 1:
        return partial(getattr(_ops, name), sent[0], *args)
    return partial(getattr(_ops, f"{name}_coalesced"), sent, *args)


def _waited(launched: Callable[[], Any]) -> Call:
    def run() -> None:
        results = launched()
        for result in results if isinstance(results, list) else [results]:
            _ops.wait_tensor(result)

    return run


def compute_beside(sweep: Sweep, device: torch.device) -> float | None:
    """Fraction of its speed that compute keeps beside gathers and reduces; every rank must call it.

    It times matmuls that take a third of the largest transfer, in turns by themselves and during
    such a transfer among all ranks, and gives the mean over ranks. None if the transfers of any
    rank are too short for that.
    """
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    shard, timer = max(1, max(sweep.nbytes) // (4 * ranks)), timer_for(device)
    launches = [_launch(kind, [shard], ranks, group, device) for kind in ("gather", "reduce")]
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
            beside.append(timer.elapsed_us(layer, count))  # the transfer runs on another stream
            _ops.wait_tensor(started)
            alone.append(timer.elapsed_us(layer, count))
        kept += min(1.0, statistics.median(alone) / statistics.median(beside))
    dist.all_reduce(kept)
    return kept.item() / (ranks * len(launches))


def layers_beside(sweep: Sweep, device: torch.device) -> dict[int, Call]:
    """The matmuls that may run beside transfers, by width: those at least as wide as the ones that
    transfers slow down in training."""
    widths = [width for width in sweep.widths if width >= sweep.beside_width]
    return {width: matmuls(sweep.beside_dtype, width, device) for width in widths}
