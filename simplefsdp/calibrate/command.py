"""``simplefsdp calibrate``: from the command line to a cluster file."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_cluster, save
from simplefsdp.launcher.errors import user_errors
from simplefsdp.launcher.follow import follow_launcher, under_torchrun
from simplefsdp.models.configs import config_of, layer_numels

if TYPE_CHECKING:
    from simplefsdp.launcher.ranks import Rank

_DESCRIPTION = """Measure collectives, matmuls, attention, memory, and, with two ranks or more, what
compute keeps of its speed beside transfers, and write them as a cluster file, for
options={"cluster": "cluster.json"}. All ranks of a run use one file: copy it to them.

Without a launcher it starts its own local ranks; under torchrun it measures the ranks it is given,
within nodes and across. Nothing else should run on the machine meanwhile.

examples:
  simplefsdp calibrate
  simplefsdp calibrate --quick --out rough.json
  simplefsdp calibrate --ranks 4 --out four.json --nbytes-max 268435456
  simplefsdp calibrate --model 8b --out for_8b.json
  simplefsdp calibrate --ranks 1 --links h100 --out one_gpu.json
  torchrun --nnodes 2 --nproc-per-node 8 -m simplefsdp calibrate --out two_nodes.json
"""


@dataclass(frozen=True)
class CalibrateOptions:
    """What to measure, and where to write it."""

    out: Path = Path("cluster.json")
    """File to write; replaced if it exists."""
    ranks: int | None = None
    """Local ranks to start: every GPU by default, or two on CPU."""
    nbytes_max: int | None = None
    """Largest collective, in bytes of the full tensor. Default: 16 MiB on CPU, 1 GiB on CUDA."""
    links: str | None = None
    """Take the links from this preset or cluster file, and measure the rest."""
    model: str | None = None
    """Time buckets as large as one and two layers of this model (of `simplefsdp train`), in
    bfloat16 and tensor by tensor; scaled down where two are more than --nbytes-max."""
    quick: bool = False
    """Few sizes and repeats: seconds, and figures to try things with."""


def run(args: list[str]) -> int:
    """Run ``simplefsdp calibrate *args``; return the exit code."""
    if under_torchrun():
        return _run_rank(args)
    options = parse(args)
    from simplefsdp.launcher import launch
    from simplefsdp.launcher.ranks import check_devices, default_ranks

    ranks = default_ranks() if options.ranks is None else options.ranks
    with user_errors():
        check(options, ranks)
        check_devices(ranks)
    with tempfile.TemporaryDirectory(prefix="simplefsdp-calibrate-") as logs:
        return launch.start_local_ranks(["calibrate", *args], ranks=ranks, log_folder=Path(logs))


def parse(args: list[str]) -> CalibrateOptions:
    """Read the options."""
    import tyro

    return tyro.cli(
        CalibrateOptions, prog="simplefsdp calibrate", description=_DESCRIPTION, args=args
    )


def check(options: CalibrateOptions, ranks: int) -> None:
    """Refuse options that cannot work, before anything is measured.

    Raises:
        ValueError: too few ranks or bytes, unknown links, or a file that cannot be written.
    """
    if ranks < 1 or (ranks == 1 and options.links is None):
        raise ValueError(
            f"--ranks {ranks}: links are measured between 2 ranks or more; give more ranks, or "
            "name a preset that has them with --links"
        )
    if options.model is not None:
        config_of(options.model)
        if options.links is not None:
            raise ValueError("--model is for links that are measured: leave out it or --links")
    smallest = 64 * ranks
    if options.nbytes_max is not None and options.nbytes_max < smallest:
        raise ValueError(
            f"--nbytes-max must be {smallest} or more for {ranks} ranks, got {options.nbytes_max}"
        )
    if options.links is not None:
        as_cluster(options.links)
    folder = options.out.parent
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: give the name of a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out {options.out}: cannot write there: {error.strerror}") from error


def _run_rank(args: list[str]) -> int:
    """Run one rank: it measures together with the others; rank 0 reports and writes the file."""
    from simplefsdp.launcher.ranks import join_ranks, on_rank_zero

    follow_launcher()
    with ExitStack() as stack:
        with user_errors():
            rank = stack.enter_context(join_ranks())

        def decide() -> CalibrateOptions:
            options = parse(args)
            with user_errors():
                check(options, rank.world_size)
            return options

        _calibrate(on_rank_zero(rank, decide), rank)
    return 0


def _calibrate(options: CalibrateOptions, rank: Rank) -> None:
    from simplefsdp.calibrate.measure import sweep_for
    from simplefsdp.calibrate.session import (
        CalibrationReport,
        measure_beside,
        measure_compute,
        measure_wires,
    )

    with user_errors():
        ranks_per_node = _local_size(rank)
    layer = layer_numels(config_of(options.model)) if options.model is not None else []
    layer_nbytes = [2 * numel for numel in layer]  # in bfloat16
    sweep = sweep_for(
        rank.device.type,
        quick=options.quick,
        nbytes_max=options.nbytes_max,
        layer_nbytes=layer_nbytes,
    )
    report = CalibrationReport(enabled=rank.rank == 0)
    model = options.model or ""
    if model:
        share = sum(sweep.layer_nbytes) / sum(layer_nbytes)
        model += f", scaled by {share:.2g} to fit --nbytes-max" if share != 1 else ""
        report.say(f"buckets as large as one and two layers of {model}")
    if options.links is None:
        wires = measure_wires(sweep, rank, ranks_per_node, report)
    else:
        known = as_cluster(options.links)
        wires, ranks_per_node = known.wires, known.ranks_per_node
    compute = measure_compute(sweep, rank, report)
    beside = measure_beside(sweep, rank, report)
    if rank.rank == 0:
        cluster = Cluster(
            name=options.out.stem,
            ranks_per_node=ranks_per_node,
            wires=wires,
            source=_source(options, model, rank),
            compute_beside=beside,
            averages=rank.device.type == "cuda",
            **compute,
        )
        save(options.out, cluster)
        report.say(f'wrote {options.out}; use it as options={{"cluster": "{options.out}"}}')


def _local_size(rank: Rank) -> int:
    """Number of ranks on this node. Raises a ValueError, on all ranks, if nodes differ in it."""
    import torch
    import torch.distributed as dist

    here = rank.local_size
    sizes = torch.tensor([here, -here], device=rank.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    most, fewest = int(sizes[0]), -int(sizes[1])
    if most != fewest:
        raise ValueError(
            f"expected as many ranks on every node, got {fewest} on one and {most} on another "
            "(LOCAL_WORLD_SIZE): start equal numbers (torchrun --nproc-per-node)"
        )
    return here


def _source(options: CalibrateOptions, model: str, rank: Rank) -> str:
    import torch
    import torch.distributed as dist

    device = torch.cuda.get_device_name() if rank.device.type == "cuda" else "CPU"
    links = f"; links of {options.links}" if options.links else ""
    how = f" --model {model}" if model else ""
    how += " --quick" if options.quick else ""
    return (
        f"simplefsdp calibrate{how}, {date.today()}: {rank.world_size} ranks, "
        f"{dist.get_backend()}, {device}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}{links}"
    )
