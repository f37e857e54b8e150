"""Traces a model as few times as a sweep needs: each trace serves all cells for which it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from inductor_passes.garbage import no_garbage_collection
from inductor_passes.ir.cells import CellError
from inductor_passes.machine.cluster import Cluster, nodes_spanned
from inductor_passes.machine.grid import OpenProgram
from simplefsdp._torch.symbolic import open_sizes
from simplefsdp.choices import Bucketing
from simplefsdp.launcher.ranks import fake_ranks
from simplefsdp.models.layout import RankLayout, make_mesh, plan_layout
from simplefsdp.models.options import ParallelOptions
from simplefsdp.simulation.extrapolate_depth import trace_deep
from simplefsdp.simulation.trace import TracedStep, trace
from simplefsdp.sweep.cells import Cell, CellStep, cell_steps
from simplefsdp.sweep.models import SweptModel
from simplefsdp.sweep.plans import plans_of
from simplefsdp.sweep.traced import OpenStep, open_step

_BATCHES = (3, 5)  # batches to trace: no powers of two, so products with them equal no other size
_AT_ONCE = 2000  # cells computed at once: the live bytes during 1,024 ops in each take 16 MB


@dataclass(eq=False)
class CellSweep:
    """Predicts a model in any cell: spread over the cell's ranks as ``parallel`` says, and under
    the best of the candidate plans of ``bucketing``."""

    model: SweptModel
    parallel: ParallelOptions
    cluster: Cluster
    bucketing: Bucketing = "auto"
    # Each trace so far, with the candidate plans of each of its graphs.
    traced: list[tuple[OpenStep, list[list[OpenProgram]]]] = field(default_factory=list, init=False)

    def steps(self, cells: Sequence[Cell]) -> list[CellStep]:
        """The step in each cell. The model is traced again for a cell for which no trace holds.

        Raises:
            CellError: no trace holds for a cell, not even a new one.
            UntraceableError: the model cannot be traced.
            UnknownLinkError: the cluster has no link for a collective.
            ValueError: there is no layout for the ranks, or the model cannot be built over them.
        """
        of: dict[int, list[Cell]] = {}
        found: dict[Cell, CellStep] = {}
        with no_garbage_collection():
            for cell in cells:
                of.setdefault(self._of(cell), []).append(cell)
            for at, its in of.items():
                for first in range(0, len(its), _AT_ONCE):
                    some = its[first : first + _AT_ONCE]
                    steps = cell_steps(*self.traced[at], some, self.cluster, self._nodes_of)
                    found.update(zip(some, steps, strict=True))
        return [found[cell] for cell in cells]

    def _of(self, cell: Cell) -> int:
        for at, (step, _) in enumerate(self.traced):
            if _holds(step, cell):
                return at
        why = ""
        for batch in dict.fromkeys((*_BATCHES, max(2, cell.batch))):
            if batch == cell.seq:  # open sizes with equal hints cannot be told apart in the graph
                continue
            try:
                step = self._trace(cell._replace(batch=batch))
            except CellError as error:  # a size became a number; it may stay open for another batch
                why = f" ({error})"
                continue
            if _holds(step, cell):
                plans = [plans_of(step, graph, self.bucketing) for graph in step.graphs]
                self.traced.append((step, plans))
                return len(self.traced) - 1
        raise CellError(
            f"{self.model.name}: the graph of batch {cell.batch}, seq {cell.seq} and ranks "
            f"{cell.ranks} is that of no trace with its sizes left open{why}; have it traced "
            "by itself, without --fit and --sweep: `simplefsdp inspect` of a --model with "
            "--batch-size and --seq-len, or of a --target whose --input has these sizes"
        )

    def _trace(self, cell: Cell) -> OpenStep:
        hints = {name: getattr(cell, name) for name in self.model.open_sizes}
        with fake_ranks(cell.ranks):
            layout = self.layout(cell.ranks)
            mesh = make_mesh(layout, self.parallel, "cpu")

            def traced(depth: int) -> tuple[TracedStep, nn.Module]:
                model = self.model.build(depth, mesh)
                with open_sizes(hints) as size:
                    model.to_empty(device="cpu")
                    inputs, by_name = self.model.inputs(size["batch"], size.get("seq"))
                    averages = self.cluster.averages
                    return trace(model, *inputs, keywords=by_name, averages=averages), model

            step, _ = trace_deep(traced, self.model.layers, self.model.depth)
            names = mesh.mesh_dim_names or ()
            dim_of: dict[str, str] = {mesh.get_group(dim).group_name: dim for dim in names}
            # Tensor-parallel groups do not grow, and neither do the shard groups of hybrid_shard.
            hybrid = self.parallel.mode == "hybrid_shard"
            return open_step(step, hints, dim_of, layout.tp * (layout.shard if hybrid else 1))

    def layout(self, ranks: int) -> RankLayout:
        """The layout of ``ranks`` ranks."""
        return plan_layout(self.parallel, ranks, self.cluster.ranks_per_node)

    def _nodes_of(self, ranks: int) -> Mapping[str, int]:
        """How many nodes a group of each mesh dimension spans, among ``ranks`` ranks."""
        layout = self.layout(ranks)
        sizes_and_strides = {
            "tp": (layout.tp, 1),
            "shard": (layout.shard, layout.tp),
            "dp": (layout.dp, layout.tp),
            "replicate": (layout.replicate, layout.tp * layout.shard),
        }
        return {
            name: nodes_spanned(range(0, size * stride, stride), ranks, self.cluster.ranks_per_node)
            for name, (size, stride) in sizes_and_strides.items()
        }


def _holds(step: OpenStep, cell: Cell) -> bool:
    try:
        step.symbols.check(cell._asdict(), exactly=False)
    except CellError:
        return False
    return True
