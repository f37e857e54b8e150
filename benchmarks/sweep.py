"""How long a sweep takes.

    python benchmarks/sweep.py

One trace of Llama 3 8B and one of 405B answer 1,000 cells in all, plans included, on H100 nodes.
(``benchmarks/published.py`` has what others measured beside what is predicted.)
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from report import environment
from rich.console import Console
from rich.table import Table

from inductor_passes.machine.presets import preset
from simplefsdp.models.options import ActivationCheckpointing, ModelOptions, ParallelOptions
from simplefsdp.sweep.cells import Cell
from simplefsdp.sweep.models import swept_llama
from simplefsdp.sweep.traces import CellSweep

RESULTS = Path(__file__).parent / "results" / "sweep.json"
RANKS = (8, 16, 32, 64, 128, 256)  # all parameters' rows divide among them
LENGTHS = (2048, 4096, 8192, 16384, 32768)
CELLS = 500


def sweep_of(name: str, recomputed: ActivationCheckpointing) -> CellSweep:
    parallel = ParallelOptions(mixed_precision="bf16")
    swept = swept_llama(ModelOptions(name, recomputed), parallel)
    return CellSweep(swept, parallel, preset("h100"))


def timed(name: str, recomputed: ActivationCheckpointing, count: int) -> dict[str, Any]:
    """Seconds of the trace, with its plans, and of the cells."""
    sweep = sweep_of(name, recomputed)
    batches = range(1, count)
    cells = [Cell(b, s, r) for b in batches for s in LENGTHS for r in RANKS][:count]
    began = time.perf_counter(), time.process_time()
    sweep.steps(cells[:1])
    traced = time.perf_counter(), time.process_time()
    steps = sweep.steps(cells)
    ended = time.perf_counter(), time.process_time()
    return {
        "model": name,
        "recomputed": recomputed,
        "cells": len(steps),
        "fit": sum(step.fits for step in steps),
        "traces": len(sweep.traced),
        "candidates": [len(plans) for plans in sweep.traced[0].plans],
        "trace_s": traced[0] - began[0],
        "trace_cpu_s": traced[1] - began[1],
        "cells_s": ended[0] - traced[0],
        "cells_cpu_s": ended[1] - traced[1],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=CELLS, help="of each model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    times = [timed("8b", "selective", options.cells), timed("405b", "full", options.cells)]
    show("1,000 cells" if options.cells == CELLS else "cells", times)
    seconds = sum(row["trace_s"] + row["cells_s"] for row in times)
    print(f"in all {seconds:.1f} s")
    found = {
        "environment": environment(torch.device("cpu")),
        "seconds": seconds,
        "times": times,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
