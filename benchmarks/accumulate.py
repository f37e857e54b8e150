"""Gradient accumulation on a modelled wire: what is sent, how long a step takes, what it holds.

A step is several micro-batches whose gradients add up; only the last one's backward reduces them
(``simplefsdp.microbatch``; ``set_requires_gradient_sync`` of FSDP2). Real compute and memory in one
process that stands for all ranks, as in step.py; the variants take turns. Example:

    python benchmarks/accumulate.py
    python benchmarks/accumulate.py --row default --microbatches 4 --modes fully_shard
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rows import ROWS, Row

RESULTS = Path(__file__).parent / "results" / "accumulate.json"
Mode = Literal["fully_shard", "hybrid_shard"]


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    row: str = "small"
    """Row of step.py's grid: the model and the wire."""
    microbatches: tuple[int, ...] = (1, 4, 16)
    """How many make a step."""
    modes: tuple[Mode, ...] = ("fully_shard", "hybrid_shard")
    """hybrid_shard: two copies, each over half of the ranks."""
    variants: tuple[str, ...] = ("floor", "manual", "auto", "fsdp2_eager")
    """Of variants.py; `floor` and `manual`, which the limit is taken from, among them."""
    rounds: int = 5
    """Timed rounds; each steps every variant once."""
    warmup: int = 1
    """Rounds before those."""
    json: Path | None = None
    """Where to write the results. Default: benchmarks/results/accumulate.json for a run without
    options, nothing otherwise."""


def parse() -> Options:
    """The options."""
    import tyro

    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    options = tyro.cli(Options, description=__doc__, config=config)
    if options.row not in ROWS:
        raise SystemExit(f"--row: expected one of {', '.join(ROWS)}, got {options.row!r}")
    if not {"floor", "manual"} <= set(options.variants):
        raise SystemExit("--variants: the limit needs floor and manual among them")
    return options


def deferring(model: Any, variant: str) -> Callable[[bool], AbstractContextManager[None]]:
    """What a micro-batch is run in, given whether it is the last."""
    from simplefsdp import microbatch

    def fsdp2(is_last: bool) -> AbstractContextManager[None]:
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    if variant == "floor":  # nothing is sent anyway
        return lambda _: nullcontext()
    if variant.startswith("fsdp2"):
        return fsdp2
    return lambda is_last: microbatch(model, is_last=is_last)


def accumulating(name: str, count: int, load: Any) -> Any:
    """The variant ``name``, whose step is ``count`` micro-batches."""
    from variants import BUILDERS

    variant = BUILDERS[name](load)
    run, within = variant.step, deferring(variant.model, name)
    if count > 1 and name not in ("floor", "fsdp2_eager", "fsdp2_compiled"):
        # Ours holds full gradients from step to step, so that a step does not allocate them.
        full = sum(p.numel() * p.element_size() for p in variant.params.values())
        variant = replace(variant, extra_nbytes=full)

    def step(tokens: Any, targets: Any) -> Any:
        for _ in range(count - 1):
            with within(False):
                (run(tokens, targets) / count).backward()
        with within(True):  # what the caller's backward does is settled by this forward
            return run(tokens, targets) / count

    return replace(variant, step=step)


def run(options: Options) -> list[dict[str, Any]]:
    """All cells, a table row each; prints them as they are measured."""
    import measure

    row = ROWS[options.row]
    load = measure.on_the_wire(row)
    cells = []
    for mode in options.modes:
        of_mode = replace(load, mesh=_mesh(row, mode))
        for count in options.microbatches:
            print(f"{mode}, {count} micro-batches", flush=True)
            cells += _cells(options, row, of_mode, mode, count)
    return cells


def _mesh(row: Row, mode: Mode) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if mode == "fully_shard":
        return init_device_mesh("cpu", (row.world_size,), mesh_dim_names=("dp",))
    shape = (2, row.world_size // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _cells(options: Options, row: Row, load: Any, mode: Mode, count: int) -> list[dict[str, Any]]:
    import measure
    import torch
    from compare import agreements, limit_of

    torch._dynamo.reset()
    builders = {name: functools.partial(accumulating, name, count) for name in options.variants}
    runner = measure.Runner(
        load, say=lambda line: print(f"  {line}", flush=True), builders=builders
    )
    runner.build(options.variants)
    runner.rounds(options.warmup, options.rounds)
    runner.memory()
    limit = limit_of(row, runner.results)
    agreement = agreements(runner.results)
    cells = []
    for name, result in runner.results.items():
        cell: dict[str, Any] = {"mode": mode, "microbatches": count, "variant": name}
        if not result.ok:
            cells.append({**cell, "failure": result.failure})
            continue
        transfers = result.samples[-1].transfers
        nbytes: Counter[str] = Counter()
        for transfer in transfers:
            nbytes[transfer.kind] += transfer.nbytes
        found = agreement.get(name)
        cell |= {
            "step_s": result.step_s,
            "to_limit": result.step_s / limit.total_s,
            "exposed_s": result.median(lambda s: s.exposed_s),
            "copy_s": result.median(lambda s: s.copy_s),
            "launches": result.samples[-1].counts,
            "nbytes": dict(nbytes),
            "peak_nbytes": _peak(result),
            "gradient_error": found.gradient if found else None,
            "limit": {**asdict(limit), "total_s": limit.total_s},
        }
        cells.append(cell)
    _print(cells)
    return cells


def _peak(result: Any) -> int | None:
    """Of what a step allocates, and of full gradients that stay from step to step."""
    return None if result.memory is None else result.memory.step_peak + result.memory.extra


def _print(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    times = ("step s", "/limit", "exposed s", "wire's copies s")
    launches = ("gathers", "reduces", "all-reduces")
    table = Table("variant", *times, *launches, "MB", "peak MiB", "gradient error")
    for cell in cells:
        if "failure" in cell:
            table.add_row(cell["variant"], cell["failure"])
            continue
        launches, peak, error = cell["launches"], cell["peak_nbytes"], cell["gradient_error"]
        table.add_row(
            cell["variant"],
            f"{cell['step_s']:.3f}",
            f"{cell['to_limit']:.3f}",
            f"{cell['exposed_s']:.3f}",
            f"{cell['copy_s']:.3f}",
            *(str(launches.get(kind, 0)) for kind in ("gather", "reduce", "all_reduce")),
            f"{sum(cell['nbytes'].values()) / 1e6:.0f}",
            f"{(peak or 0) / 2**20:.0f}",
            "" if error is None else f"{error:.1e}",
        )
    Console(width=130).print(table)


def main() -> None:
    """Run, print, write."""
    import torch
    from report import environment

    options = parse()
    found = {
        "environment": environment(torch.device("cpu")),
        "options": {**asdict(options), "json": None},
        "cells": run(options),
    }
    if path := RESULTS if options == Options() else options.json:
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
