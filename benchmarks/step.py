"""One training step on a modelled wire: simplefsdp against no communication, DDP and FSDP2.

Real compute and memory in one process that stands for all ranks (wire.py); the variants take
turns, round by round. Examples:

    python benchmarks/step.py
    python benchmarks/step.py --row latency_bound --rounds 20
    python benchmarks/step.py --layers 2 --dim 256 --variants floor fsdp2_eager none
    python benchmarks/step.py --grid
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from rows import GPU_ROWS, ROWS, Row

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    row: str = "default"
    """Row of the grid to start from; the options below change it."""
    setting: Annotated[Row, "the model and the wire"] = field(default_factory=Row)
    variants: tuple[str, ...] = ()
    """Which variants to run. Default: the ten of RESULTS.md. `floor` and `none` always run: the
    wire is calibrated by them. See variants.py for more names."""
    rounds: int = 11
    """Timed rounds; each steps every variant once."""
    warmup: int = 2
    """Rounds before those."""
    threads: int = 1
    """Threads of compute (CPU)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """On cuda a stream spins in the place of the wire."""
    json: Path | None = None
    """Where to write the results. Default: benchmarks/results/step_<row>.json for a row as it is
    in the grid, nothing otherwise."""
    grid: bool = False
    """Run every row of the grid, each in a process of its own; rows whose results are there are
    left out."""
    traceback: bool = False
    """Print where a failing variant failed."""


def parse(argv: list[str]) -> Options:
    """The options; --row sets the defaults of the others."""
    import tyro

    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--row", default="default")
    row = first.parse_known_args(argv)[0].row
    known = ROWS | GPU_ROWS
    if row not in known:
        sys.exit(f"--row: expected one of {', '.join(known)}, got {row!r}")
    default = Options(row=row, setting=known[row])
    options = tyro.cli(
        Options,
        args=argv,
        default=default,
        description=f"{__doc__}\nRows of the grid: {', '.join(ROWS)}.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    from variants import BUILDERS

    unknown = [name for name in options.variants if name not in BUILDERS]
    if unknown:
        sys.exit(f"--variants: expected some of {', '.join(BUILDERS)}, got {', '.join(unknown)}")
    if options.rounds < 1 or options.warmup < 0 or options.threads < 1:
        sys.exit("--rounds and --threads: expected 1 or more; --warmup: 0 or more")


def run(options: Options) -> None:
    """Run one row, print its table, write its JSON."""
    import measure
    import report
    import torch
    import torch.distributed as dist
    import transfers
    import variants
    import wire
    from cluster_here import cluster_here

    from inductor_passes.machine.cluster_file import as_json

    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # the variants share the code of the model
    device = torch.device(options.device)
    row = options.setting
    wire.connect(row.world_size)
    runner = measure.Runner(measure.workload(row, device), say=lambda line: print(line, flush=True))
    floor_s, nbytes = measure.calibrate(runner)
    measure.choose_link(row, floor_s, nbytes)
    print(
        f"wire: {nbytes / 1e6:.0f} MB per step, floor {floor_s:.3f} s -> "
        f"{transfers.link.bandwidth / 1e9:.3g} GB/s, {row.latency_us:.0f} us",
        flush=True,
    )
    wanted = options.variants or variants.DEFAULT
    runner.build(wanted)
    runner.rounds(options.warmup, options.rounds)
    runner.memory()
    data = report.report(options.row, row, runner.results, device)
    if {"auto", "greedy"} & runner.results.keys():  # what they were planned with
        data["cluster"] = as_json(cluster_here(row, device))
    report.print_report(data)
    if options.traceback:
        print("\n".join(r.trace for r in runner.results.values() if r.trace))
    _write(options, data)
    dist.destroy_process_group()


def _write(options: Options, data: dict[str, object]) -> None:
    path = options.json
    as_it_is = options.setting == (ROWS | GPU_ROWS)[options.row]
    if path is None and as_it_is and not options.variants:
        path = result_path(options.row)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(f"written: {path}")


def result_path(row: str) -> Path:
    """Where the results of a row of the grid lie."""
    return RESULTS / f"step_{row}.json"


def run_grid(argv: list[str]) -> int:
    """Run the rows whose results are missing, one process after another; 1 if any failed."""
    passed_on = [a for a in argv if a != "--grid"]
    code = 0
    for row in ROWS:
        if result_path(row).exists():
            print(f"{row}: {result_path(row)} is there")
            continue
        done = subprocess.run([sys.executable, __file__, "--row", row, *passed_on], check=False)
        if done.returncode:
            print(f"{row}: failed with exit code {done.returncode}", file=sys.stderr)
            code = 1
    return code


def main() -> None:
    """The command line."""
    argv = sys.argv[1:]
    options = parse(argv)
    if options.grid:
        sys.exit(run_grid(argv))
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler tells of its own start and end
    run(options)


if __name__ == "__main__":
    main()
