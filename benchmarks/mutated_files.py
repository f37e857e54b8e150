"""What a user's commands read: how to write one of each kind, and how to read it as they do."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from mutate import Change, change_bytes, change_json, change_metadata
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from inductor_passes.ir.text import parse
from inductor_passes.machine import cluster_file
from inductor_passes.machine.cluster import Work
from inductor_passes.machine.presets import preset
from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.opened import fill, verify
from simplefsdp.checkpoints.saving import ChecksumWriter
from simplefsdp.inspection.measured import measure, measured_document, print_measured
from simplefsdp.inspection.profile import read_profiles
from simplefsdp.pretrained.files import entries_of, opened
from simplefsdp.train import metrics, runs
from simplefsdp.train.config import TrainConfig, check_options
from simplefsdp.train.data import ShardedBatches
from simplefsdp.train.restore import check_model, model_keys, open_checkpoint
from simplefsdp.train.runs import TrainerState


@dataclass(frozen=True)
class Target:
    """A kind of file: how to write it, how to change it besides bytes, and how to read it.

    Attributes:
        write: into an empty folder; returns the file to change.
        structure: changes a value in it.
        read: gets the file; raises ValueError or OSError if it refuses it.
        detects: a changed file must be refused.
    """

    write: Callable[[Path], Path]
    structure: Change
    read: Callable[[Path], object]
    detects: bool = False


def _write_cluster(folder: Path) -> Path:
    cluster_file.save(folder / "cluster.json", preset("h100"))
    return folder / "cluster.json"


def _read_cluster(path: Path) -> None:
    found = cluster_file.load(path)
    for dtype in ("float32", "bfloat16"):
        found.compute_us(Work(1e12, 1e9, "matmul", dtype))
    for wire in found.wires:
        found.link(wire.kind, wire.ranks, wire.nodes).us(1e8, wire.ranks, 3)


def _write_trace(folder: Path, *, first: int = 0) -> Path:
    nccl = {"device": 0, "correlation": 7, "In msg nelems": 4, "dtype": "Float"}
    wire = "wire:gather nbytes=8 begins_after_us=1.0 takes_us=2.5"
    dims = {"Input Dims": [[4, 2], [[8], [8]]], "Input type": ["float"]}
    events = [
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 5, "dur": 9},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 9, "pid": 0, "args": nccl},
        {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 0, "dur": 1, "args": nccl},
        {"ph": "X", "name": "gloo:all_gather", "ts": 1, "dur": 2, "tid": 4, "args": dims},
        {"ph": "X", "name": "c10d::_allgather_base_", "ts": 0, "dur": 1, "tid": 1, "args": dims},
        {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "simplefsdp, auto"}},
        {"ph": "X", "cat": "gather", "name": "a", "pid": 3, "ts": 0, "dur": 1, "args": nccl},
        {"ph": "X", "cat": "compute", "name": "b", "pid": 3, "ts": 30, "dur": 10},
        {"ph": "X", "name": wire, "ts": 1, "dur": 1},
    ]  # fmt: skip
    found = {"traceEvents": events[first:], "distributedInfo": {"rank": 1}}
    (folder / "trace.json").write_text(json.dumps(found))
    return folder / "trace.json"


def _read_trace(path: Path) -> None:
    reports = [measure(profile) for profile in read_profiles(path)]
    json.dumps([measured_document(report) for report in reports])
    print_measured(Console(file=io.StringIO(), width=100), reports)


def _write_trainer(folder: Path) -> Path:
    data = {"epoch": 0, "cursor": 4, "fingerprint": "f", "seq_len": 4, "seed": 0}
    state = TrainerState(3, 2, TrainConfig().to_json(), data)
    return folder / runs.write_trainer_state(folder, state)


def _read_trainer(path: Path) -> None:
    state = runs.read_trainer_state(path.parent)
    if state is None:
        raise ValueError("no trainer")
    check_options(TrainConfig.from_json(state.config))
    sizes = {"seq_len": 4, "global_batch_size": 2, "rank": 0, "world_size": 1, "seed": 0}
    tokens = torch.zeros(200, dtype=torch.uint8)
    ShardedBatches(tokens, fingerprint="f", **sizes).load_state_dict(state.data)


def _write_metrics(folder: Path) -> Path:
    lines = [json.dumps({"step": i, "loss": 1 / (i + 1)}) for i in range(5)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder / "metrics.jsonl"


def _read_metrics(path: Path) -> None:
    metrics._truncate(path, 3)


def _write_safetensors(folder: Path) -> Path:
    save_file({"a": torch.ones(3, 2), "b": torch.ones(4)}, folder / "one.safetensors")
    save_file({"c": torch.ones(5)}, folder / "two.safetensors")
    return folder / "one.safetensors"


def _write_index(folder: Path) -> Path:
    file = _write_safetensors(folder)
    names = {"a": file.name, "b": file.name, "c": "two.safetensors"}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": names}))
    return path


def _write_indexed(folder: Path) -> Path:
    return _write_index(folder).with_name("one.safetensors")


def _read_safetensors(path: Path) -> None:
    for name, entry in entries_of(path.parent).items():
        with opened(entry.file) as tensors:
            tensors.get_tensor(name)


def _write_program(folder: Path) -> Path:
    text = (
        "input x: 64\nresident p: 16\n"
        "start g(p) -> full: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 fqns=fc.weight\n"
        "wait w(full) -> weight: 64 @full\ncompute mm(x, weight) -> y: 64\noutput y\n"
    )
    (folder / "program.txt").write_text(text)
    return folder / "program.txt"


def _read_program(path: Path) -> None:
    parse(path.read_text())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def _write_checkpoint(folder: Path, *, sums: bool = False) -> None:
    values = {"model": _model().state_dict(), "lr": 0.1}
    writer = ChecksumWriter(folder) if sums else dcp.FileSystemWriter(folder)
    dcp.save(values, storage_writer=writer, no_dist=True)


def _written(name: str, *, sums: bool = False) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        _write_checkpoint(folder, sums=sums)
        return folder / name

    return write


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """All that is saved of the model, as the command ``export`` reads it."""
    checkpoint, model = open_checkpoint(path.parent), _model()
    check_model(checkpoint, model, "a model of no trainer")
    verify(checkpoint.files, alone=True)
    tensors = model.state_dict()
    keys = model_keys(checkpoint, tensors)
    fill(checkpoint.files, {keys[fqn]: t for fqn, t in tensors.items()}, no_dist=True)
    return tensors


def _read_whole_checkpoint(path: Path) -> None:
    """What loads although its checksums were changed is what was saved."""
    wanted = _model().state_dict()
    found = _read_checkpoint(path)
    if not all(torch.equal(found[name], value) for name, value in wanted.items()):
        raise AssertionError("other values were loaded than were saved")


TARGETS = {
    "cluster": Target(_write_cluster, change_json, _read_cluster),
    "trace of a device": Target(_write_trace, change_json, _read_trace),
    "trace of a CPU": Target(partial(_write_trace, first=3), change_json, _read_trace),
    "trainer.json": Target(_write_trainer, change_json, _read_trainer),
    "metrics.jsonl": Target(_write_metrics, change_bytes, _read_metrics),
    "safetensors": Target(_write_indexed, change_bytes, _read_safetensors),
    "index": Target(_write_index, change_json, _read_safetensors),
    "program": Target(_write_program, change_bytes, _read_program),
    "metadata": Target(_written(".metadata"), change_metadata, _read_checkpoint),
    "shard": Target(_written("__0_0.distcp"), change_bytes, _read_checkpoint),
    "metadata, summed": Target(
        _written(".metadata", sums=True), change_metadata, _read_checkpoint, detects=True
    ),
    "shard, summed": Target(
        _written("__0_0.distcp", sums=True), change_bytes, _read_checkpoint, detects=True
    ),
    "checksums.json": Target(
        _written(checksums.NAME, sums=True), change_json, _read_whole_checkpoint
    ),
}
