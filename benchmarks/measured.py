"""Predicted buckets beside measured ones: ``report.measure()`` of ``simplefsdp.inspect()``.

On the modelled wire (one process that stands for all ranks), or, under torchrun, on ranks that
gloo joins:

    python benchmarks/measured.py
    simplefsdp calibrate --ranks 2 --quick --out two.json
    torchrun --nproc-per-node 2 benchmarks/measured.py --cluster two.json

Machine and wire of the first are measured before, as predict.py does; ``--cluster`` says what the
prediction is for instead (of gloo ranks: by default the preset cpu-gloo). ``--trace`` keeps the
profile of one more step, for ``simplefsdp inspect --trace``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wire
from cluster_here import cluster_here
from measure import Runner, calibrate, choose_link, workload
from report import environment
from rows import ROWS, Row
from transfers import link
from variants import BUILDERS, Workload

import simplefsdp
from inductor_passes.machine.cluster import Cluster

CPU = torch.device("cpu")


def on_wire(row: Row, device: torch.device = CPU) -> tuple[Workload, Cluster]:
    """The workload of a row on the modelled wire, and what wire and machine are."""
    wire.connect(row.world_size)
    load = workload(row, device)
    if row.bandwidth_gb_s is not None:
        wire.set_link(row.latency_us / 1e6, row.bandwidth_gb_s * 1e9)
    else:
        choose_link(row, *calibrate(Runner(load, say=lambda line: None)))
    return load, cluster_here(row, device)


def step_of(load: Workload, variant: str) -> Callable[[], None]:
    """A forward and backward of a variant; the first call compiles it."""
    model = BUILDERS[variant](load)

    def step() -> None:
        model.optimizer.zero_grad(set_to_none=True)
        model.step(load.tokens, load.targets).backward()

    return step


def measured(
    load: Workload, variant: str, cluster: Cluster | str | None, steps: int, trace: Path | None
) -> tuple[dict[str, Any], str]:
    """Compile a variant, measure steps of it; returns the comparison as plain data and as text."""
    with simplefsdp.inspect(cluster) as report:
        step = step_of(load, variant)
        step()
    found = report.measure(step, steps)
    if trace is not None:
        with torch.profiler.profile(record_shapes=True) as profiler:
            step()
        profiler.export_chrome_trace(str(trace))
    return found.to_json(), f"{found}\nall ranks alike: {report.compare_ranks()}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", default="small", choices=list(ROWS), help="what is trained")
    parser.add_argument("--bandwidth-gb-s", type=float, help="of the wire; default: the row's")
    parser.add_argument("--variant", default="manual", choices=("none", "manual", "auto"))
    parser.add_argument("--cluster", help="preset, or a file of simplefsdp calibrate")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="where to keep the profile of a step (rank 0's)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    row = replace(ROWS[options.row], bandwidth_gb_s=options.bandwidth_gb_s)
    cluster: Cluster | str | None = None
    if ranks:
        dist.init_process_group("gloo")
        row = replace(row, world_size=ranks)
        load = workload(row, CPU)
    else:
        load, cluster = on_wire(row)
    first = dist.get_rank() == 0
    trace = options.trace if first else None
    cluster = options.cluster or cluster
    found, text = measured(load, options.variant, cluster, options.steps, trace)
    if first:
        print(text)
        on = {"ranks": ranks, "backend": "gloo"} if ranks else {"wire_gb_s": link.bandwidth / 1e9}
        told = {"row": dataclasses.asdict(row), "variant": options.variant, **on}
        told |= {"environment": environment(CPU), **found, "text": text.splitlines()}
        if options.json is not None:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
            print(f"written: {options.json}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
