"""Predicted against measured: the same steps on paper and on the modelled wire.

The machine is calibrated as ``simplefsdp calibrate`` does it, the wrapped model is traced, and what
the passes make of it is simulated; then the same variants run, in turns (step.py says how).
Examples:

    python benchmarks/predict.py
    python benchmarks/predict.py --row small --variants none manual auto --rounds 7
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transfers
import wire
from cluster_here import cluster_here
from measure import ONLY_ONE, Result, Runner, Turns, calibrate, choose_link, workload
from report import environment
from rows import ROWS, Row
from variants import LlamaLoss, Workload

from inductor_passes.ir.program import Program
from inductor_passes.machine.cluster import Cluster, Work
from inductor_passes.machine.cluster_file import as_json
from simplefsdp import simple_fsdp
from simplefsdp.frontend.placement import local_nbytes
from simplefsdp.inspection.plans import PlanName, settings_of
from simplefsdp.simulation.prediction import StepPrediction, predict_step
from simplefsdp.simulation.trace import TracedStep, trace

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
VARIANTS: tuple[PlanName, ...] = ("none", "manual", "greedy", "auto")


def traced(load: Workload) -> tuple[TracedStep, int]:
    """The step of the wrapped model, and the bytes of this rank's shards."""
    model = simple_fsdp(load.model(LlamaLoss), load.mesh, mp_policy=load.policy())
    step = trace(model, load.tokens, load.targets)
    torch._dynamo.reset()
    return step, local_nbytes(model.parameters())


def predictions(
    load: Workload, cluster: Cluster, names: list[PlanName]
) -> dict[str, StepPrediction]:
    """What is expected of each variant."""
    step, nbytes = traced(load)
    return {
        name: predict_step(step, settings_of(name, step.fqns, cluster, None), cluster, nbytes)
        for name in names
    }


def copy_us(predicted: StepPrediction, cluster: Cluster, row: Row) -> float:
    """What the wire's copies take: the calling thread makes them in the place of a NIC.

    A gather reads a shard and writes all of it; a reduce reads and writes the other way round.
    """
    sent = [
        op.collective.nbytes
        for graph in predicted.graphs
        for _, op in graph.before.starts()
        if op.collective is not None
    ]
    nbytes = sum(sent) * (1 + 1 / row.world_size)
    return cluster.compute_us(Work(nbytes=nbytes)) - cluster.launch_us


def step_nbytes(predicted: StepPrediction) -> int:
    """Most bytes of what the step allocates: its inputs were there before."""
    given = _inputs_nbytes(predicted.graphs[0].before)
    return max(graph.beside_shards_nbytes for graph in predicted.graphs) - given


def _inputs_nbytes(program: Program) -> int:
    names = set(program.inputs) - program.resident
    return sum({program.buffers[n].storage: program.buffers[n].nbytes for n in names}.values())


def compared(predicted: StepPrediction, result: Result, cluster: Cluster, row: Row) -> dict:
    """Predicted, measured and relative error of what a user would ask for."""
    if not result.ok or result.memory is None:
        return {"failure": result.failure or "never ran"}
    graphs_us = sum(graph.timeline.total_us for graph in predicted.graphs)
    pairs = {
        "step_s": ((graphs_us + copy_us(predicted, cluster, row)) / 1e6, result.step_s),
        "exposed_s": (predicted.exposed_us / 1e6, result.median(lambda s: s.exposed_s)),
        "wire_s": (
            sum(graph.timeline.wire_us for graph in predicted.graphs) / 1e6,
            result.median(lambda s: s.wire_s),
        ),
        "step_nbytes": (step_nbytes(predicted), result.memory.step_peak),
    }
    found: dict[str, Any] = {
        key: {"predicted": p, "measured": m, "error": p / m - 1 if m else None}
        for key, (p, m) in pairs.items()
    }
    exposed = found["exposed_s"]
    # Of a few milliseconds a relative error says nothing; of the step it does.
    exposed["error_of_step"] = (exposed["predicted"] - exposed["measured"]) / result.step_s
    return found


def run(
    row_name: str,
    row: Row,
    names: list[PlanName],
    rounds: int,
    device: torch.device,
    turns: Turns = ONLY_ONE,
) -> dict[str, Any]:
    """Calibrate, predict, measure one row."""
    wire.connect(row.world_size)
    with turns.shared():
        load = workload(row, device)
        runner = Runner(load, say=lambda line: print(line, flush=True), turns=turns)
        choose_link(row, *calibrate(runner))
        cluster = cluster_here(row, device)
        print("calibrated; tracing and predicting", flush=True)
        expected = predictions(load, cluster, names)
    runner.build(names)
    runner.rounds(2, rounds)
    runner.memory()
    data = {
        "row": row_name,
        "settings": dataclasses.asdict(row),
        "environment": environment(device),
        "link": {
            "latency_us": transfers.link.latency_s * 1e6,
            "bandwidth_gb_s": transfers.link.bandwidth / 1e9,
        },
        "cluster": as_json(cluster),
        "floor_s": runner.results["floor"].step_s,
        "variants": {
            name: compared(expected[name], runner.results[name], cluster, row) for name in names
        },
    }
    dist.destroy_process_group()
    return data


def print_table(data: dict[str, Any]) -> None:
    """Predicted and measured, side by side."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{data['row']}: predicted / measured (error)", box=box.SIMPLE)
    table.add_column("variant")
    for column in ("step, s", "exposed, s (error of step)", "wire, s", "step memory, MiB"):
        table.add_column(column, justify="right")
    for name, found in data["variants"].items():
        if "failure" in found:
            table.add_row(name, found["failure"])
            continue
        exposed, memory = found["exposed_s"], found["step_nbytes"]
        table.add_row(
            name,
            _pair(found["step_s"], found["step_s"]["error"]),
            _pair(exposed, exposed["error_of_step"]),
            _pair(found["wire_s"], found["wire_s"]["error"]),
            f"{memory['predicted'] / 2**20:.1f} / {memory['measured'] / 2**20:.1f} "
            f"({memory['error']:+.1%})",
        )
    Console(width=120).print(table)


def _pair(found: dict[str, float], error: float | None) -> str:
    told = "" if error is None else f" ({error:+.1%})"
    return f"{found['predicted']:.3f} / {found['measured']:.3f}{told}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", default="default", choices=list(ROWS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (default: 11)")
    parser.add_argument("--threads", type=int, default=1, help="threads of compute (default: 1)")
    parser.add_argument("--json", type=Path, help="default: results/predict_<row>.json")
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        sys.exit("--rounds and --threads: expected 1 or more")
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64
    data = run(options.row, ROWS[options.row], options.variants, options.rounds, CPU)
    print_table(data)
    path = options.json or RESULTS / f"predict_{options.row}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
