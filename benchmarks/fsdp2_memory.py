"""The memory of our model of FSDP2 against torch's own ``FSDPMemTracker``."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fsdp2_model import record_step, wrap
from scale_cells import Cell, in_fake_model, rank_of, tokens_and_targets
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.machine.simulate import memory

CHECKED = (
    Cell("debug", 8, 2, seq_len=512),
    Cell("debug", 8, 2, seq_len=512, checkpointing="none"),
    Cell("160m", 8, 1, layers=4),
    Cell("8b", 8, 1, layers=4),
    Cell("8b", 64, 1, layers=4, checkpointing="selective"),
)


class Peaks(NamedTuple):
    """Most live bytes of forward and backward on a rank, shards included."""

    ours: int
    torchs: int


def peaks(cell: Cell) -> Peaks:
    """What the two say of a cell, both on fake CPU tensors (torch without CUDA has no others)."""
    with rank_of(cell) as mesh:
        ours = memory(record_step(cell, mesh).issued).peak_nbytes
        return Peaks(ours, tracked_nbytes(cell, mesh))


def tracked_nbytes(cell: Cell, mesh: DeviceMesh) -> int:
    """The peak by torch's tracker."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    def run(model: nn.Module) -> int:
        tracker = FSDPMemTracker(model)
        inputs = tokens_and_targets(cell)
        tracker.track_inputs(inputs)
        with tracker:
            model(*inputs).backward()
        found = tracker.get_tracker_snapshot("peak").values()
        return max(by_use["Total"] for by_use in found)

    return in_fake_model(cell, mesh, partial(wrap, cell, mesh), run)


def check_memory() -> None:
    """Print both figures and their ratio, per cell."""
    for cell in CHECKED:
        found = peaks(cell)
        layers = "" if cell.layers is None else f", {cell.layers} layers"
        print(
            f"{cell}{layers}, {cell.seq_len} tokens: ours "
            f"{found.ours / 1e9:.4f} GB, FSDPMemTracker {found.torchs / 1e9:.4f} GB, ratio "
            f"{found.ours / found.torchs:.3f}",
            flush=True,
        )
