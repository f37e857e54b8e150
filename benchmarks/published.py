"""What is predicted of Llama 3 8B on 8 H100, 8,192 tokens, beside figures that others published.

    python benchmarks/published.py

Their GPUs have 96 GB at 2.4 TB/s and 500 W (torchtitan's report of December 2024 says so; 52.44 GiB
are 55 % of one in its pull request 3429); the data sheet's, of which our preset is, have 80 GB at
3.35 TB/s and 700 W. Of a step, graph_trainer runs most op by op, and FSDP2 all but the compiled
layers, where we assume that Inductor fuses all. So each figure is predicted four ways: with either
memory, all fused or nothing. Their memory is what the allocator has reserved, ours what is live;
``benchmarks/LOG.md`` does the sums.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import environment
from rich.console import Console
from rich.table import Table

from inductor_passes.adapters.loops import touches_of
from inductor_passes.adapters.roofline import cost_of, work_of_node
from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.fusion import traffic_of
from inductor_passes.machine.presets import preset
from inductor_passes.passes import rehearse
from inductor_passes.rehearsal import Rehearsal, Settings, arranged
from inductor_passes.transform.portable import in_program
from simplefsdp.inspection.plans import settings_of
from simplefsdp.inspection.subject import trace_llama
from simplefsdp.launcher.ranks import fake_ranks
from simplefsdp.models.layout import make_mesh, plan_layout
from simplefsdp.models.options import ActivationCheckpointing, ModelOptions, ParallelOptions
from simplefsdp.provenance import carried_fqn
from simplefsdp.simulation.prediction import (
    GraphPrediction,
    StepPrediction,
    optimizer_us,
    predict_program,
    predict_rehearsed,
    shards_of,
)

RESULTS = Path(__file__).parent / "results" / "published.json"
GIB = 1 << 30
RANKS, SEQ = 8, 8192
H100 = preset("h100")
CLUSTERS = {"3.35 TB/s": H100, "2.4 TB/s": replace(H100, memory_gb_s=2400.0, memory_gb=96.0)}


class Published(NamedTuple):
    """A figure: of whom, sequences of a rank, what is recomputed, tokens/s of a GPU, peak GiB."""

    who: str
    batch: int
    recomputed: ActivationCheckpointing
    tokens_per_s: float
    gib: float


PUBLISHED = (
    Published("torchtitan graph_trainer", 1, "selective", 7890, 52.44),
    Published("torchtitan graph_trainer", 1, "full", 7006, 32.07),
    Published("torchtitan, FSDP2, compiled by layer", 2, "selective", 6667, 77.0),
    Published("torchtitan, FSDP2 eager", 2, "selective", 5762, 82.4),
)


def unfused(
    name: str,
    rehearsal: Rehearsal,
    settings: Settings | None,
    cluster: Cluster,
    shards: Collection[str],
) -> GraphPrediction:
    """A graph that was planned, if each of its ops is a kernel that reads and writes memory."""
    program, nodes = rehearsal.reading.program, rehearsal.reading.nodes
    computes = {op.name: nodes[op.name][0] for op in program.ops if op.kind == "compute"}
    touches = {
        n: nbytes for n, node in computes.items() if (nbytes := touches_of(node)) is not None
    }
    traffic = traffic_of(program, {}, touches)
    work = {
        n: work_of_node(node, traffic[n].nbytes, traffic[n].kernels) for n, node in computes.items()
    }
    before = replace(program, resident=program.resident | set(program.inputs).intersection(shards))
    after = arranged(before, in_program(before, rehearsal.planned), settings)
    cost = replace(cost_of(rehearsal.reading, cluster), work=work)
    return predict_program(name, before, after, cost, 0.0)


@cache
def ways_of(batch: int, recomputed: ActivationCheckpointing) -> dict[str, StepPrediction]:
    """The step four ways."""
    parallel = ParallelOptions(mixed_precision="bf16")
    with fake_ranks(RANKS):
        mesh = make_mesh(plan_layout(parallel, RANKS, RANKS), parallel, "cpu")
        options = ModelOptions("8b", recomputed)
        subject = trace_llama(
            options, parallel, mesh, layers=None, seq_len=SEQ, batch_size=batch, averages=True
        )
        settings = settings_of("auto", subject.step.fqns, H100, None)
        shards, nbytes = shards_of(subject.step.forward.graph), subject.parameters_nbytes
        graphs = {"forward": subject.step.forward, "backward": subject.step.backward}
        planned = [(name, rehearse(gm, settings, carried_fqn)) for name, gm in graphs.items()]
        found = {}
        for memory, cluster in CLUSTERS.items():
            by = (settings, cluster)
            fused = tuple(predict_rehearsed(*of, *by, 0.0, shards) for of in planned)
            apart = tuple(unfused(*of, *by, shards) for of in planned)
            for kernels, predicted in (("fused", fused), ("unfused", apart)):
                us = optimizer_us(cluster, nbytes)
                found[f"{kernels}, {memory}"] = StepPrediction(predicted, us, nbytes, 2 * nbytes)
        return found


def row_of(figure: Published) -> dict[str, Any]:
    """A figure, and what is predicted of it."""
    step_ms = figure.batch * SEQ / figure.tokens_per_s * 1e3
    ways = ways_of(figure.batch, figure.recomputed)
    predicted = {name: way_of(step, figure) for name, step in ways.items()}
    return {**figure._asdict(), "step_ms": step_ms, "predicted": predicted}


def way_of(step: StepPrediction, figure: Published) -> dict[str, Any]:
    """A prediction, and its ratio to a figure."""
    parts = {
        "slowed": sum(graph.timeline.slowed_us for graph in step.graphs),
        "exposed": step.exposed_us,
        "optimizer": step.optimizer_us,
        **dict.fromkeys(("matmul", "attention", "loops"), 0.0),
    }
    for graph in step.graphs:
        for op in graph.after.ops:
            work = graph.cost.work.get(op.name)
            if op.kind == "compute" and work is not None:
                kind = work.kind if work.flops else "loops"
                parts[kind] += graph.cost.compute_us(graph.after, op)
    tokens, gib = step.tokens_per_second(figure.batch * SEQ), step.peak_nbytes / GIB
    return {
        "tokens_per_s": tokens,
        "tokens_ratio": tokens / figure.tokens_per_s,
        "step_ms": step.step_us / 1e3,
        "parts_ms": {name: us / 1e3 for name, us in parts.items()},
        "live_gib": gib,
        "memory_ratio": gib / figure.gib,
        "live_by_use_gib": {use: n / GIB for use, n in step.peak_by_use().items() if n},
    }


def show(row: dict[str, Any]) -> None:
    """A table of a figure."""
    title = f"{row['who']}, batch {row['batch']}, {row['recomputed']}"
    table = Table("", "tokens/s", "step, ms", "of which", "memory, GiB", title=title)
    table.add_row(
        "published", f"{row['tokens_per_s']}", f"{row['step_ms']:.0f}", "", f"{row['gib']}"
    )
    for name, way in row["predicted"].items():
        table.add_row(
            name,
            f"{way['tokens_per_s']:.0f} ({way['tokens_ratio']:.2f})",
            f"{way['step_ms']:.0f}",
            ", ".join(f"{part} {ms:.0f}" for part, ms in way["parts_ms"].items() if ms >= 0.5),
            f"{way['live_gib']:.1f} ({way['memory_ratio']:.2f})",
        )
    Console(width=150).print(table)


def main() -> None:
    """Predict, print, write."""
    rows = []
    for figure in PUBLISHED:
        rows.append(row_of(figure))
        show(rows[-1])
    found = {"environment": environment(torch.device("cpu")), "figures": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
