"""Gradient accumulation on real gloo ranks: gradients against one process, and what is launched.

Each step is several micro-batches whose gradients add up; only the last one's backward reduces.
The plain model takes the batches of all ranks in one process; the error is the norm of the
difference over the norm, of the worst parameter. Example:

    python benchmarks/accumulate_ranks.py
    python benchmarks/accumulate_ranks.py --ranks 2 --microbatches 1 4
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accumulate import Mode, write

RESULTS = Path(__file__).parent / "results" / "accumulate_ranks.json"
WIDTH, LAYERS, BATCH = 128, 3, 4
# What a launch is called in a profile: functional collectives, and those of FSDP2.
LAUNCHES = {
    "gather": ("_c10d_functional::all_gather_into_tensor", "c10d::_allgather_base_"),
    "reduce": ("_c10d_functional::reduce_scatter_tensor", "c10d::_reduce_scatter_base_"),
    "all_reduce": ("_c10d_functional::all_reduce", "c10d::allreduce_"),
}


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks; of 4 also a hybrid mesh of 2 x 2."""
    microbatches: tuple[int, ...] = (1, 4, 16)
    """How many make a step."""
    executor: Literal["inductor", "regions", "aot_eager"] = "inductor"
    """What runs our compiled graphs."""
    json: Path | None = None
    """Where to write the results. Default: benchmarks/results/accumulate_ranks.json for a run
    without options, nothing otherwise."""


def model() -> Any:
    """A few uneven layers, the same on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(WIDTH, 3 * WIDTH + 1), nn.GELU(), nn.Linear(3 * WIDTH + 1, WIDTH)
            )
            for _ in range(LAYERS)
        )
    )


def batch(step: int, rank: int) -> Any:
    """Input of one micro-batch on one rank."""
    import torch

    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def serve(rank: int, ranks: int, store: str, options: Options, out: str) -> None:
    """One rank: all cells; rank 0 writes them down."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    modes: list[Mode] = ["fully_shard", "hybrid_shard"] if ranks == 4 else ["fully_shard"]
    cells = [
        cell(rank, ranks, mode, count, variant, options)
        for mode in modes
        for count in options.microbatches
        for variant in ("eager", "manual", "auto", "fsdp2_eager")
    ]
    if rank == 0:
        Path(out).write_text(json.dumps(cells))
    dist.destroy_process_group()


def cell(
    rank: int, ranks: int, mode: Mode, count: int, variant: str, options: Options
) -> dict[str, Any]:
    """Two steps of one variant; the second one is counted and compared."""
    import torch
    from accumulate import deferring
    from torch.distributed.tensor import DTensor

    torch._dynamo.reset()
    wrapped = model()
    run = distribute(wrapped, mode, variant, options)
    within = deferring(wrapped, variant)

    def step() -> None:
        for i in range(count):
            with within(i == count - 1):
                (run(batch(i, rank)).square().mean() / count).backward()

    step()
    wrapped.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    plain = model()
    for i in range(count):
        for each in range(ranks):
            (plain(batch(i, each)).square().mean() / count / ranks).backward()
    error = 0.0
    for fqn, param in plain.named_parameters():
        grad = wrapped.get_parameter(fqn).grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        error = max(error, float((full - param.grad).norm() / param.grad.norm()))
    found = {"ranks": ranks, "mode": mode, "microbatches": count, "variant": variant}
    return {**found, "launches": launched(profile), "gradient_error": error}


def distribute(plain: Any, mode: Mode, variant: str, options: Options) -> Callable[..., Any]:
    """Wrap ``plain`` in place; what is to be called."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from simplefsdp import simple_fsdp

    ranks = dist.get_world_size()
    shape = (ranks,) if mode == "fully_shard" else (2, ranks // 2)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if variant == "fsdp2_eager":
        for part in (*plain, plain):
            fully_shard(part, mesh=mesh)
        return plain
    simple_fsdp(plain, mesh, mode=mode)
    if variant == "eager":
        return plain
    backend = {"bucketing": variant, "executor": options.executor}
    backend |= {"cluster": "h100"} if variant == "auto" else {}
    return torch.compile(plain, backend="simplefsdp", options=backend, fullgraph=True)


def launched(profile: Any) -> dict[str, int]:
    """Collectives by kind; one that another calls is a part of it (see _torch/gloo.py)."""
    parts = tuple(part for prefixes in LAUNCHES.values() for part in prefixes)
    names = Counter(
        event.name
        for event in profile.events()
        if event.cpu_parent is None or not event.cpu_parent.name.startswith(parts)
    )
    counts = {}
    for kind, prefixes in LAUNCHES.items():
        by_prefix = [sum(n for name, n in names.items() if name.startswith(p)) for p in prefixes]
        counts[kind] = by_prefix[0] or by_prefix[1]
    return counts


def print_table(cells: list[dict[str, Any]]) -> None:
    """A row per cell."""
    from rich.console import Console
    from rich.table import Table

    heads = ("ranks", "mode", "micro-batches", "variant", *LAUNCHES, "gradient error")
    table = Table(*heads)
    for found in cells:
        counts = [str(found["launches"][kind]) for kind in LAUNCHES]
        names = [str(found[key]) for key in ("ranks", "mode", "microbatches", "variant")]
        table.add_row(*names, *counts, f"{found['gradient_error']:.1e}")
    Console(width=130).print(table)


def main() -> None:
    """Run, print, write."""
    import torch.multiprocessing as mp
    import tyro

    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    options = tyro.cli(Options, description=__doc__, config=config)
    cells = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "cells"
            mp.spawn(serve, (ranks, f"{folder}/store", options, str(out)), nprocs=ranks)
            cells += json.loads(out.read_text())
    print_table(cells)
    write(RESULTS if options == Options() else options.json, options, cells)


if __name__ == "__main__":
    main()
