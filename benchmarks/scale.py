"""Training steps on clusters that are not at hand: Llama 3 on 8, 64 and 512 GPUs, planned here.

    python benchmarks/scale.py
    python benchmarks/scale.py --models 8b --ranks 8 64 --layers 2        # to try it
    python benchmarks/scale.py --check-memory

Each model is traced with fake tensors in a fake process group, once per ranks, batch and layout;
parameters are gathered in bf16, gradients reduced in fp32, the loss is in the graph, and every
layer is checkpointed in full (its input is kept), without which no 70B and no 405B fits. Then, on
the same graphs, with the same costs and the same simulator, each variant is priced on each
cluster: no passes, buckets by layer (manual), the published greedy rule, auto; PyTorch's own
manual and auto passes (``simplefsdp/inspection/torch_passes.py`` says what is replaced); and a
model of FSDP2 eager (``fsdp2_model.py``). Nothing is measured but the time that planning takes on
this machine.

The lower bound is that of the traced graphs: no buckets and no order of collectives can beat it, as
long as compute keeps its order (torch's auto pass may change that; it beat it nowhere). Steps are
forward, backward and fused AdamW; peak memory counts shards, optimizer state and all live bytes,
but no fragmentation, no NCCL buffers and no CUDA context. Where auto, which may take as much
memory as manual, is more than 3 % above the bound or does not fit, auto_room has the device's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fsdp2_memory import check_memory
from fsdp2_model import record_step
from report import environment
from scale_cells import LAYOUTS, Cell, makes_sense, rank_of, traced_step
from scale_report import as_row, compared, print_cell, print_summary
from scale_variants import VARIANTS, Traced, outcomes

from inductor_passes.machine.presets import PRESETS, preset
from simplefsdp.models import CONFIGS

RESULTS = Path(__file__).parent / "results" / "scale.json"


def cells_of(choice: argparse.Namespace) -> list[Cell]:
    """The grid, small cells first, and what the published figures are compared with."""
    grid = [
        Cell(model, ranks, batch, layout, layers=choice.layers)
        for model in choice.models
        for ranks in choice.ranks
        for layout in choice.layouts
        for batch in choice.batches
        if makes_sense(model, ranks, layout)
    ]
    published = [
        Cell("8b", ranks, batch, checkpointing="selective", layers=choice.layers)
        for ranks, batch in ((8, 1), (64, 1), (8, 2))
        if ranks in choice.ranks and batch in choice.batches
    ]
    return grid + published if "8b" in choice.models and "shard" in choice.layouts else grid


def is_priced(
    cell: Cell, clusters: Sequence[str], variants: Sequence[str], rows: Sequence[dict[str, Any]]
) -> bool:
    """Whether the rows have all variants of a cell on all clusters."""
    complete = (row for row in rows if is_of(row, cell) and row["variants"].keys() >= set(variants))
    return {row["cluster"] for row in complete}.issuperset(clusters)


def is_of(row: dict[str, Any], cell: Cell) -> bool:
    """Whether a row is one of a cell's."""
    return all(row[key] == value for key, value in dataclasses.asdict(cell).items())


def price(
    cell: Cell, clusters: Sequence[str], variants: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each cluster, from one trace."""
    with rank_of(cell) as mesh:
        began = time.perf_counter(), time.process_time()
        step, parameters_nbytes = traced_step(cell, mesh)
        trace = {
            "trace_s": time.perf_counter() - began[0],
            "trace_cpu_s": time.process_time() - began[1],
            "nodes": sum(len(graph.graph.nodes) for graph in step[:2]),
        }
        traced = Traced(step, parameters_nbytes, lambda: record_step(cell, mesh))
        for name in clusters:
            cluster = preset(name)
            begin = time.perf_counter()
            found = {}
            for variant, outcome in outcomes(traced, cluster, variants):
                found[variant] = outcome
                seconds = time.perf_counter() - began[0]
                print(f"  {seconds:.0f} s: {name} {variant}", file=sys.stderr, flush=True)
            timing = {
                **trace,
                "price_s": time.perf_counter() - begin,
                "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            }
            yield as_row(cell, cluster, found, timing)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["8b", "70b", "405b"]
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=models)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--clusters", nargs="+", choices=PRESETS, default=["h100", "b200"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="where they make sense"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--layers", type=int, help="fewer layers, to debug")
    parser.add_argument(
        "--out", type=Path, help=f"JSON; default, unless --layers is given: {RESULTS}"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what the JSON has, price only other cells"
    )
    parser.add_argument(
        "--check-memory",
        action="store_true",
        help="only compare the memory of the model of FSDP2 with torch's FSDPMemTracker",
    )
    return parser.parse_args()


def main() -> None:
    """Price the grid, print a table per cell and a summary, write the results row by row."""
    choice = arguments()
    if choice.check_memory:
        check_memory()
        return
    out = choice.out or (None if choice.layers else RESULTS)
    rows = json.loads(out.read_text())["rows"] if choice.resume and out and out.exists() else []
    cells = [
        cell
        for cell in cells_of(choice)
        if not is_priced(cell, choice.clusters, choice.variants, rows)
    ]
    rows[:] = [row for row in rows if all(not is_of(row, cell) for cell in cells)]
    results: dict[str, Any] = {"environment": environment(torch.device("cpu")), "rows": rows}
    for number, cell in enumerate(cells, 1):
        print(f"[{number}/{len(cells)}] {cell} ...", flush=True)
        for row in price(cell, choice.clusters, tuple(choice.variants)):
            rows.append(row)
            print_cell(row)
            results["published"] = compared(rows)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1) + "\n")
    print_summary(rows)
    if out is not None:
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
