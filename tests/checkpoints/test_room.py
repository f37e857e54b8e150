"""A disk without room for checkpoints: refused at the start, warned of, and never written to."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from simplefsdp.checkpoints.saving import ChecksumWriter
from simplefsdp.launcher import launch
from simplefsdp.launcher.ranks import Rank
from simplefsdp.train import room, session
from simplefsdp.train.checkpoint import CheckpointWriter
from simplefsdp.train.config import TrainConfig
from simplefsdp.train.metrics import EvalRecord, MetricsWriter
from simplefsdp.train.runs import TrainerState

MB = 1_000_000


@pytest.fixture
def disk(monkeypatch):
    """A disk with so much free space, and so many inodes of 100 that are left."""

    def has(free_mb: float, inodes: int = 50) -> None:
        found = SimpleNamespace(
            f_bavail=int(free_mb * 1000), f_frsize=1000, f_files=100, f_favail=inodes
        )
        monkeypatch.setattr(os, "statvfs", lambda path: found)

    return has


def test_less_than_one_checkpoint_is_refused(disk, tmp_path):
    disk(12)
    with pytest.raises(ValueError, match=r"has 12\.0 MB of free space, .* takes 39\.1 MB; free"):
        room.check_room(tmp_path / "not" / "there", 37 * MB)
    disk(39.2)
    room.check_room(tmp_path, 37 * MB)


def test_a_disk_without_inodes_is_full(disk, tmp_path):
    disk(100, inodes=0)
    assert "no inodes left" in str(room.shortage(tmp_path, MB))


@pytest.mark.parametrize(
    ("free_mb", "keep", "there", "warned"),
    [(100, 2, 0, True), (130, 2, 0, False), (50, 2, 2, False), (85, 1, 0, False), (70, 1, 0, True)],
)
def test_what_is_kept_and_one_more_must_fit(disk, tmp_path, free_mb, keep, there, warned):
    disk(free_mb)
    told = room.warning(tmp_path, 40 * MB, keep, there)
    assert bool(told) == warned
    if told:
        more = "1 more checkpoint" if free_mb == 70 else "2 more checkpoints"
        assert f"room for {more} of 42.2 MB" in told
        assert f"--keep {keep}" in told


def test_a_disk_that_cannot_be_looked_at_is_told_and_ends_nothing(monkeypatch, tmp_path):
    said: list[str] = []
    plan = SimpleNamespace(
        config=TrainConfig(),
        layout=SimpleNamespace(replicate=1, shard=2, tp=1),
        out=tmp_path,
        checkpoint_nbytes=MB,
        batch=SimpleNamespace(notice=None),
    )
    rank = Rank(0, 2, torch.device("cpu"))

    def is_stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "statvfs", is_stale)
    session._describe(plan, rank, SimpleNamespace(say=said.append))
    assert (
        f"room for checkpoints cannot be seen: [Errno {errno.ESTALE}] Stale file handle" in said[-1]
    )


def test_bytes_of_a_checkpoint():
    model = nn.Linear(10, 10)
    model.bias.requires_grad_(False)
    assert room.nbytes_of_model(model) == 4 * (110 + 2 * 100)


STATE = TrainerState(step=3, world_size=1, config={}, data={})


def writer_of(run: Path, nbytes: int = MB, say=print) -> CheckpointWriter:
    return CheckpointWriter(run, 1, torch.device("cpu"), nbytes, say)


def test_a_save_without_room_writes_nothing_and_is_told(disk, solo_mesh, tmp_path):
    said: list[str] = []
    writer = writer_of(tmp_path, 4 * MB, said.append)
    disk(1)
    writer.save({"a": torch.ones(MB)}, STATE)
    assert "1.0 MB of free space, a checkpoint takes 5.1 MB" in str(writer.error)
    assert said == [f"warning: checkpoint of step 3 failed: {writer.error}"]
    writer.wait()
    assert len(said) == 1 and list((tmp_path / "checkpoints").iterdir()) == []
    disk(10)
    writer.save({"a": torch.ones(MB)}, STATE)
    writer.wait()
    assert writer.error is None and (tmp_path / "checkpoints" / "step-00000003").is_dir()


def test_a_checkpoint_takes_no_more_than_is_asked_for(solo_mesh, tmp_path):
    tensors = {f"layers.{i}.weight": torch.ones(i) for i in range(200)}  # headers outweigh them
    writer = writer_of(tmp_path)
    writer.save(tensors, STATE)
    writer.wait()
    taken = sum(path.stat().st_size for path in tmp_path.glob("checkpoints/*/*"))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert 2 * nbytes < taken <= room.on_disk(nbytes)


@pytest.mark.parametrize(
    ("error", "free_mb"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 20),  # what fits a smaller part
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 10**6),
        (RuntimeError("[enforce fail] unexpected pos 704 vs 598"), 0),  # torch, of a full disk
    ],
)
def test_a_disk_that_fills_during_a_save_is_named(
    error, free_mb, disk, monkeypatch, solo_mesh, tmp_path
):
    def fails(*args):
        disk(free_mb)
        raise error

    monkeypatch.setattr(ChecksumWriter, "write_data", fails)
    writer = writer_of(tmp_path)
    writer.save({"a": torch.ones(1)}, STATE)
    writer.wait()
    told = str(writer.error)
    assert told.startswith(f"rank 0: the disk of {tmp_path} had no free space left while it was")
    assert told.endswith(f"({type(error).__name__}: {error})")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_left_of_a_checkpoint_does_not_stand_in_the_way(solo_mesh, tmp_path):
    left = tmp_path / "checkpoints" / "step-00000003"
    left.mkdir(parents=True)
    (left / "a shard").touch()
    writer = writer_of(tmp_path)
    writer.save({"a": torch.ones(3)}, STATE)
    writer.wait()
    assert writer.error is None
    assert not (left / "a shard").exists() and (left / "trainer.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_metrics_on_a_full_disk(tmp_path):
    hook = threading.excepthook
    said: list[str] = []
    metrics = MetricsWriter(tmp_path, 0, said.append)
    metrics._file.close()
    metrics._file = Path("/dev/full").open("w")  # noqa: SIM115
    metrics.write(EvalRecord(1, 2.0, 3.0))
    metrics.close()
    assert threading.excepthook is hook
    assert ["No space left" in line for line in said] == [True, True]
    assert said[0].startswith("warning: metrics of step 1 are not written: ")
    assert said[1].startswith("warning: the last metrics are lost: ")


def test_tensorboard_without_its_file_is_told_once(tmp_path):
    said: list[str] = []
    metrics = MetricsWriter(tmp_path, 0, said.append)

    def fail(*args):
        raise FileNotFoundError("events")

    metrics._tensorboard.add_scalar = fail
    metrics.write(EvalRecord(1, 2.0, 3.0))
    metrics.write(EvalRecord(2, 2.0, 3.0))
    metrics.close()
    assert said == ["warning: metrics of step 1 are not written: events"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("RunFailed: the disk is full", "error: the disk is full"),
        ("KeyError: 'x'", "Traceback: 'x'\nerror: rank 1 failed; what it printed: its.log"),
    ],
)
def test_another_rank_than_the_first_says_in_a_line_what_is_one(said, told, tmp_path):
    message = {"message": said, "extraInfo": {"py_callstack": "Traceback: 'x'\n"}}
    assert launch._why(1, SimpleNamespace(message=message), {1: "its.log"}) == told
