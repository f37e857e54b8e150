"""What this machine and the modelled wire are, as the automatic planner is told."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rows import Row
from transfers import link

from inductor_passes.machine.cluster import LINK_KINDS, Cluster, Wire
from inductor_passes.machine.links import Link
from simplefsdp.calibrate.measure import sweep_for
from simplefsdp.calibrate.session import CalibrationReport, measure_compute
from simplefsdp.launcher.ranks import Rank

_computes: dict[str, object] = {}


def measured_before(found: Mapping[str, object]) -> None:
    """Take these compute fields, of an earlier process, instead of measuring them here."""
    _computes.update(found)


def cluster_here(row: Row, device: torch.device) -> Cluster:
    """Compute as ``simplefsdp calibrate`` measures it, and the wire as it is modelled now: another
    number of ``link.blocks`` is another cluster, for which ``auto`` plans otherwise."""
    if not _computes:
        sweep = sweep_for(device.type, quick=False, nbytes_max=None)
        found = measure_compute(
            sweep, Rank(0, row.world_size, device), CalibrationReport(enabled=False)
        )
        _computes.update(found)
    wires = []
    for kind in LINK_KINDS:
        once = 2 if kind == "all_reduce" else 1
        known = Link(link.latency_s * 1e6 * once, link.bandwidth / 1e9 / once)
        # Of all ranks, and of the groups of a hybrid mesh: the wire is the same.
        for ranks in sorted({2, row.world_size // 2, row.world_size} - {1}):
            wires.append(Wire(kind, ranks, 1, known))
    return Cluster(
        name="this machine, modelled wire",
        ranks_per_node=row.world_size,
        wires=tuple(wires),
        compute_beside=beside_blocks(device),
        **_computes,  # type: ignore[arg-type]
    )


def beside_blocks(device: torch.device) -> float:
    """The multiprocessors that a transfer leaves to compute: each of its blocks has one."""
    if device.type != "cuda":
        return 1.0
    have = torch.cuda.get_device_properties(device).multi_processor_count
    return 1 - min(link.blocks, have - 1) / have
