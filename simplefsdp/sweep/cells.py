"""The time and memory of a step in each cell, and what limits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from inductor_passes.ir.cells import Formulas
from inductor_passes.machine.cluster import Cluster, ClusterCost
from inductor_passes.machine.grid import OpenProgram, Taken, taken
from inductor_passes.rehearsal import USABLE
from simplefsdp.simulation.prediction import optimizer_us
from simplefsdp.sweep.traced import OpenStep


class Cell(NamedTuple):
    """The sizes of a step."""

    batch: int  # sequences per rank; with tensor parallelism, per group of tensor-parallel ranks
    seq: int  # tokens per sequence
    ranks: int  # number of all ranks


@dataclass(frozen=True)
class CellStep:
    """A step in one cell, under the best plan for it."""

    cell: Cell
    step_us: float  # the optimizer's time included
    exposed_us: float  # part of ``step_us`` in which compute waits for the wire
    compute_us: float  # time of graphs and optimizer, if nothing were in transfer
    wire_us: float  # time of all collectives
    peak_nbytes: int  # peak memory of a rank, shards and optimizer state included
    room_nbytes: int  # usable memory of a device

    @property
    def fits(self) -> bool:
        return self.peak_nbytes <= self.room_nbytes

    @property
    def binds(self) -> Literal["memory", "wire", "compute"]:
        """The resource that limits the step: memory if it does not fit; the wire if it is busy for
        longer than compute; else compute."""
        if not self.fits:
            return "memory"
        return "wire" if self.wire_us > self.compute_us else "compute"


def cell_steps(
    step: OpenStep,
    candidates: Sequence[Sequence[OpenProgram]],
    cells: Sequence[Cell],
    cluster: Cluster,
    nodes_of: Callable[[int], Mapping[str, int]],
) -> list[CellStep]:
    """The step in each of ``cells``, for all of which ``step`` must be valid, see
    :meth:`inductor_passes.ir.cells.Symbols.check`.

    Args:
        step, cells, cluster: the graphs, their sizes, and the machine.
        candidates: for each graph its plans, see :func:`simplefsdp.sweep.plans.plans_of`.
        nodes_of: for a number of ranks, how many nodes a group of each mesh dimension spans.

    Raises:
        UnknownLinkError: the cluster cannot price a collective.
    """
    sizes = [cell._asdict() for cell in cells]

    @cache
    def cost_of(ranks: int) -> ClusterCost:
        spanned = nodes_of(ranks)
        return ClusterCost(cluster, {group: spanned[dim] for group, dim in step.dim_of.items()})

    (shards,) = Formulas([step.parameters_nbytes], step.symbols).many(sizes)
    at_rest = 3 * shards  # with AdamW's two moments
    room = torch.full_like(at_rest, int(USABLE * cluster.memory_gb * 1e9))
    total = torch.tensor(
        [optimizer_us(cluster, nbytes) for nbytes in shards.tolist()], dtype=torch.float64
    )
    exposed, compute, wire = torch.zeros_like(total), total.clone(), torch.zeros_like(total)
    peak = torch.zeros_like(total)
    costs = [cost_of(cell.ranks) for cell in cells]
    for plans in candidates:
        each = zip(*(taken(plan, sizes, costs) for plan in plans), strict=True)
        found = Taken(*map(torch.stack, each))  # a row for each plan
        best = _best(found, room - at_rest)
        one = Taken(*(column.gather(0, best[None])[0] for column in found))
        total, exposed = total + one.total_us, exposed + one.exposed_us
        compute, wire = compute + one.compute_us, wire + one.wire_us
        peak = torch.maximum(peak, one.peak_nbytes)
    columns = (total, exposed, compute, wire, at_rest + peak, room)
    rows = zip(cells, *(column.tolist() for column in columns), strict=True)
    return [
        CellStep(cell, us, exposed_us, compute_us, wire_us, int(nbytes), int(room_nbytes))
        for cell, us, exposed_us, compute_us, wire_us, nbytes, room_nbytes in rows
    ]


def _best(found: Taken, room: Tensor) -> Tensor:
    """The index of the best candidate in each cell, chosen as the automatic planner does. It is the
    fastest of those that fit into the memory of the first one, which is by module, or into that of
    the device if it has less. If no candidate fits, it is the one with the lowest peak."""
    peaks = found.peak_nbytes
    fits = peaks <= torch.minimum(peaks[0], room)
    fastest = found.total_us.where(fits, torch.inf).argmin(0)
    return torch.where(fits.any(0), fastest, peaks.argmin(0))
