"""What the parts on the modelled wire share: rows, and the calibration of part a."""

from __future__ import annotations

import json
from typing import Any

import cluster_here
import torch
import torch.distributed as dist
from ledger import NOTED, Part
from rows import GPU_ROWS, Row

from inductor_passes.machine.cluster import Peak

# One layer and a wire that is slow enough to be seen.
SMALLEST = {"smallest": Row(layers=1, dim=128, vocab=256, seq_len=32, batch=1, latency_us=500.0)}


def rows(run: Part) -> dict[str, Row]:
    """Of the models that are trained."""
    return SMALLEST if run.smallest else GPU_ROWS


def pretend(ranks: int) -> None:
    """A process group that sends nothing and takes no time, torch's own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def disconnect() -> None:
    """Leave the process group, and what was compiled on it."""
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def use_calibration(run: Part) -> None:
    """Take the machine as part a measured it; where it did not, it is measured here."""
    path = run.out.with_name("machine.json")
    cells: dict[str, Any] = json.loads(path.read_text())["cells"] if path.exists() else {}
    found = {k: v for k, v in cells.get("calibration", {}).items() if k not in NOTED}
    if "peaks" in found:
        peaks = {name: _peak(peak) for name, peak in found["peaks"].items()}
        cluster_here.measured_before({**found, "peaks": peaks})


def _peak(peak: dict[str, Any]) -> Peak:
    ramps = {k: tuple(map(tuple, v)) if isinstance(v, list) else v for k, v in peak.items()}
    return Peak(**ramps)
