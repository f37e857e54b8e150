"""The largest batch that ``inspect --fit`` says there is memory for: does it fit, and one more not?

Two gloo ranks train our debug model as the trainer does, at the largest batch that a device of
``--memory-gb`` is said to have room for, and at the next one; what their allocator holds at most
is compared with what was predicted. The device is imagined: nothing stops a rank that takes more.
``memory_gb`` lets nine tenths be used. Each row is written as soon as it is measured, in the place
of an earlier one, so that a run may be cut, or done in parts. Examples:

    python benchmarks/fit.py
    python benchmarks/fit.py --recomputed full --json benchmarks/results/fit.json
    python benchmarks/fit.py --recomputed full --seq-len 256 --memory-gb 0.2
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simplefsdp.models.options import ActivationCheckpointing, MixedPrecision

RESULTS = Path(__file__).parent / "results" / "fit.json"
RANKS = 2
WITHIN = 0.05
CLUSTER, MEASURED = "cluster.json", "measured.json"


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    recomputed: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
    """What of the activations is recomputed."""
    kept: tuple[bool, ...] = (False, True)
    """Whether full parameters are kept for backward."""
    mixed_precision: tuple[MixedPrecision, ...] = ("none", "bf16")
    """What is computed in."""
    seq_len: int = 256
    """Tokens of a sequence."""
    layers: int = 4
    """Layers of the model."""
    memory_gb: float = 0.25
    """What a device has, in 1e9 bytes."""
    json: Path | None = None
    """Where to write the results. Default: benchmarks/results/fit.json for a run without options,
    nothing otherwise."""


@dataclass(frozen=True)
class Trial:
    """One way to train, and the two batches."""

    recomputed: ActivationCheckpointing
    kept: bool
    mixed_precision: MixedPrecision
    batches: tuple[int, int]
    predicted_nbytes: tuple[int, int]
    room_nbytes: int


def trial_of(options: Options, recomputed: Any, kept: bool, precision: MixedPrecision) -> Trial:
    """Predict the largest batch, and the next one."""
    from simplefsdp.sweep.cells import Cell
    from simplefsdp.sweep.fit import MOST, largest
    from simplefsdp.sweep.models import swept_llama
    from simplefsdp.sweep.traces import CellSweep

    model, parallel = settings(recomputed, kept, precision)
    swept = swept_llama(model, parallel, options.layers)
    sweep = CellSweep(swept, parallel, device(options.memory_gb))
    fits, next_ = largest(
        lambda sizes: sweep.steps([Cell(n, options.seq_len, RANKS) for n in sizes]), MOST["batch"]
    )
    if fits is None or next_ is None:
        said = "not even one sequence fits" if fits is None else "every batch fits"
        sys.exit(f"--memory-gb {options.memory_gb}: {said}")
    return Trial(
        recomputed,
        kept,
        precision,
        (fits.cell.batch, next_.cell.batch),
        (fits.peak_nbytes, next_.peak_nbytes),
        fits.room_nbytes,
    )


def settings(recomputed: Any, kept: bool, precision: MixedPrecision) -> tuple[Any, Any]:
    """The options of a model and of its ranks."""
    from simplefsdp.models.options import ModelOptions, ParallelOptions

    parallel = ParallelOptions(reshard_after_forward=not kept, mixed_precision=precision)
    return ModelOptions("debug", recomputed), parallel


def device(memory_gb: float) -> Any:
    """The CPU, with so much memory for each rank."""
    from inductor_passes.machine.presets import preset

    return replace(preset("cpu-gloo"), memory_gb=memory_gb)


def serve(rank: int, folder: str, options: Options, trial: Trial) -> None:
    """One rank: both batches; rank 0 writes down what it held."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    cluster = f"{folder}/{CLUSTER}"
    measured = [peak_nbytes(options, trial, batch, cluster) for batch in trial.batches]
    if rank == 0:
        Path(folder, MEASURED).write_text(json.dumps(measured))
    dist.destroy_process_group()


def measured_of(options: Options, trial: Trial) -> tuple[int, int]:
    """What rank 0 held with the two batches."""
    import torch.multiprocessing as mp

    from inductor_passes.machine.cluster_file import save

    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/{CLUSTER}", device(options.memory_gb))
        mp.spawn(serve, (folder, options, trial), nprocs=RANKS)
        largest, next_ = json.loads(Path(folder, MEASURED).read_text())
    return largest, next_


def peak_nbytes(options: Options, trial: Trial, batch: int, cluster: str) -> int:
    """Most bytes that this rank holds in the second step: shards, AdamW's state, and the rest."""
    import torch
    from memory import allocated_peak

    from simplefsdp.frontend.initialize import init_weights
    from simplefsdp.frontend.placement import local_nbytes
    from simplefsdp.models.build import wrapped_model
    from simplefsdp.models.layout import make_mesh, plan_layout
    from simplefsdp.sweep.models import tokens_and_targets
    from simplefsdp.train.build import loss_of, make_optimizer
    from simplefsdp.train.config import CompileOptions, OptimOptions

    torch._dynamo.reset()
    model_options, parallel = settings(trial.recomputed, trial.kept, trial.mixed_precision)
    mesh = make_mesh(plan_layout(parallel, RANKS, RANKS), parallel, "cpu")
    model = wrapped_model(model_options, parallel, mesh, options.layers)
    init_weights(model, device=torch.device("cpu"), seed=0)
    optimizer = make_optimizer(model, OptimOptions())
    loss = loss_of(model, CompileOptions(cluster=cluster, executor="inductor"))

    def step() -> None:
        loss(*tokens_and_targets(batch, options.seq_len)[0]).backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [value for state in optimizer.state.values() for value in state.values()]
    return local_nbytes(held) + allocated_peak(step, torch.device("cpu"))


def verdict(trial: Trial, measured: tuple[int, int]) -> dict[str, Any]:
    """A row of the table."""
    largest, next_ = measured
    return {
        **asdict(trial),
        "measured_nbytes": measured,
        "ratio": largest / trial.predicted_nbytes[0],
        "within": abs(largest / trial.predicted_nbytes[0] - 1) <= WITHIN,
        "fits": largest <= trial.room_nbytes,
        "next_does_not": next_ > trial.room_nbytes,
    }


def keep(path: Path, row: dict[str, Any]) -> None:
    """Write a row, with where it was measured, in the place of an earlier one of the same way."""
    import torch
    from report import environment

    there = json.loads(path.read_text())["trials"] if path.exists() else []
    rows = {_way(old): old for old in there}
    rows[_way(row)] = {**row, "environment": environment(torch.device("cpu"))}
    path.write_text(json.dumps({"trials": [*rows.values()]}, indent=1) + "\n")


def _way(row: dict[str, Any]) -> tuple[str, bool, str]:
    return row["recomputed"], row["kept"], row["mixed_precision"]


def print_table(rows: list[dict[str, Any]]) -> None:
    """A row per trial."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "recomputed",
        "kept",
        "precision",
        "largest batch",
        "predicted, MB",
        "measured",
        "ratio",
        "of room",
        "one more: predicted",
        "measured",
        "of room",
    )
    for row in rows:
        (batch, _), room = row["batches"], row["room_nbytes"]
        predicted, measured = row["predicted_nbytes"], row["measured_nbytes"]
        columns = [f"{x / 1e6:.1f}" for x in (predicted[0], measured[0])]
        columns += [f"{row['ratio']:.3f}", f"{measured[0] / room:.3f}"]
        columns += [f"{x / 1e6:.1f}" for x in (predicted[1], measured[1])]
        names = [row["recomputed"], str(row["kept"]), row["mixed_precision"], str(batch)]
        table.add_row(*names, *columns, f"{measured[1] / room:.3f}")
    Console(width=150).print(table)


def main() -> None:
    """Predict, run, print, write."""
    import itertools

    import tyro

    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    options = tyro.cli(Options, description=__doc__, config=config)
    path = options.json or (RESULTS if options == Options() else None)
    rows = []
    for way in itertools.product(options.recomputed, options.kept, options.mixed_precision):
        trial = trial_of(options, *way)
        rows.append(verdict(trial, measured_of(options, trial)))
        print_table(rows[-1:])
        if path is not None:
            keep(path, rows[-1])
    print_table(rows)


if __name__ == "__main__":
    main()
