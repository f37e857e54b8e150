"""A checkpoint that a disk or a copy has changed: on all ranks, by verify, and in older ones."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain_checkpoint import load_plain
from ranks import RankPool
from test_checkpoint import MICRO, train_here
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import simple_fsdp
from simplefsdp.checkpoints import checksums, opened
from simplefsdp.checkpoints.checksums import Checksum
from simplefsdp.checkpoints.opened import open_files
from simplefsdp.checkpoints.saving import ChecksumWriter
from simplefsdp.cli import main
from simplefsdp.integrations import checkpoint as integration
from simplefsdp.launcher.errors import UserError
from simplefsdp.models import CONFIGS
from simplefsdp.models.build import plain_model
from simplefsdp.models.llama3 import Llama
from simplefsdp.models.options import ModelOptions
from simplefsdp.train import runs


@pytest.fixture(scope="module")
def pool(pools: Any) -> RankPool:
    return pools(2)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Holds ``text`` and ``run``, of two steps."""
    folder = tmp_path_factory.mktemp("checksums")
    (folder / "text").write_bytes(Path(__file__).read_bytes() * 3)
    pool.run(train_here, str(folder), f"{MICRO} --steps 4 --stop-after 2 --out run")
    return folder


@pytest.fixture
def checkpoint(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkpoint, in a run folder in the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "text", "text")
    return Path(
        shutil.copytree(runs.step_folder(folder / "run", 2), runs.step_folder(Path("r"), 2))
    )


def flip(file: Path, at: float = 0.5) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 4
    file.write_bytes(data)


def resume(folder: str) -> str:
    """What a rank says that cannot resume; on others than rank 0, the exit code."""
    try:
        train_here(folder, "--resume r --data text")
    except UserError as error:
        return str(error)
    except SystemExit as error:
        return str(error.code)
    return "resumed"


def verify(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["verify", *args])
    return int(exit_.value.code or 0)


def test_every_file_has_a_checksum_that_other_tools_compare(checkpoint: Path) -> None:
    files = json.loads((checkpoint / "checksums.json").read_text())["files"]
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "trainer.json"]
    for name, of in files.items():
        data = (checkpoint / name).read_bytes()
        assert of == {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_flipped_bit_in_a_shard_ends_all_ranks(checkpoint: Path, pool: RankPool) -> None:
    """It was trained on, and nobody was told."""
    flip(checkpoint / "__1_0.distcp")
    first, second = pool.run(resume, str(Path.cwd()))
    assert "is damaged: __1_0.distcp has other bytes than were written" in first
    assert "use an earlier checkpoint" in first and "\n" not in first
    assert second == "2"


def make_older(checkpoint: Path) -> None:
    """As it was written before there were checksums."""
    (checkpoint / "checksums.json").unlink()
    state = json.loads((checkpoint / "trainer.json").read_text())
    assert state.pop("checksums") is True
    state["format"], model = 1, state["config"]["model"]
    model["config"] = model.pop("model")
    (checkpoint / "trainer.json").write_text(json.dumps(state))


def test_checksums_that_are_lost_are_damage(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer knows that it wrote them."""
    (checkpoint / "checksums.json").unlink()
    line = "is damaged: checksums.json is missing; copy it again, or move that folder elsewhere"
    with pytest.raises(ValueError, match=line):
        load_plain(checkpoint, Llama(CONFIGS["micro"]))
    for command in (["train", "--resume", "r"], ["export", "--checkpoint", "r", "--out", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert line in capsys.readouterr().err
    assert verify("r") == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "missing: checksums.json is missing"


def test_metadata_is_compared_before_it_is_believed(checkpoint: Path) -> None:
    """A tensor's name with a changed bit made it a checkpoint of another model."""
    path = checkpoint / ".metadata"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"norm.weight", b"lorm.weight"))
    with pytest.raises(
        ValueError, match=r"is damaged: \.metadata has other bytes .*; copy it again, or move that"
    ):
        open_files(checkpoint)


def test_an_older_checkpoint_resumes_with_a_line_that_says_so(
    checkpoint: Path,
    pool: RankPool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_older(checkpoint)
    line = "has no checksums, as dcp.save or an older program wrote it"
    assert line in str(load_plain(checkpoint, Llama(CONFIGS["micro"])))
    with pytest.raises(SystemExit):
        main(["export", "--checkpoint", "r", "--out", "exported"])
    assert capsys.readouterr().err.count(line) == 1
    assert pool.run(resume, str(Path.cwd())) == ["resumed"] * 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "trainer.json", ".metadata"])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.999])
def test_verify_finds_a_flipped_bit(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], name: str, at: float
) -> None:
    assert verify("r") == 0
    assert "4 files, " in capsys.readouterr().out
    flip(checkpoint / name, at)
    assert verify(str(checkpoint)) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"damaged: {name} has other bytes")
    assert "1 of 4 files are damaged, missing or unverified" in last


def test_verify_has_a_line_for_each_file(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    (checkpoint / "__1_0.distcp").write_bytes(b"short")
    (checkpoint / ".metadata").unlink()
    (checkpoint / "sub").mkdir()
    (checkpoint / "sub" / "note").touch()
    assert verify(str(checkpoint)) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "missing: .metadata is missing",
        "missing: __0_0.distcp is missing",
        f"damaged: __1_0.distcp has 5 bytes where {_nbytes(checkpoint)} were written",
        "unknown: sub/note was not written with the checkpoint",
    ]


def _nbytes(checkpoint: Path) -> int:
    sums = checksums.read(checkpoint)
    assert sums is not None
    return sums["__1_0.distcp"].nbytes


def remove_checksums(checkpoint: Path, *names: str) -> None:
    sums = checksums.read(checkpoint)
    assert sums is not None
    checksums.write(checkpoint, {n: of for n, of in sums.items() if n not in (names or sums)})


def test_a_file_without_a_checksum_ends_all_ranks(checkpoint: Path, pool: RankPool) -> None:
    """It was trained on, whatever was in it."""
    remove_checksums(checkpoint, "__1_0.distcp")
    first, second = pool.run(resume, str(Path.cwd()))
    assert "is damaged: __1_0.distcp has no checksum; copy it again, or move that folder" in first
    assert second == "2"


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["__0_0.distcp"], ["unverified: __0_0.distcp has no checksum"]),
        ([".metadata"], ["interrupted: .metadata has no checksum, as the save was interrupted"]),
        (
            [],
            [
                "unverified: .metadata has no checksum",
                "unverified: __0_0.distcp has no checksum",
                "unverified: __1_0.distcp has no checksum",
                "unknown: trainer.json was not written with the checkpoint",
            ],
        ),
    ],
)
def test_a_file_without_a_checksum_is_not_as_it_was_written(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], names: list[str], lines: list[str]
) -> None:
    """The file was called unknown, and the checkpoint as it was written."""
    remove_checksums(checkpoint, *names)
    assert verify("r") == 1
    assert capsys.readouterr().out.splitlines()[:-1] == lines
    first = lines[0].partition(": ")[2]
    with pytest.raises(
        ValueError, match=f"is damaged: {first}.*; copy it again, or move that folder"
    ):
        load_plain(checkpoint, Llama(CONFIGS["micro"]))


def test_metadata_that_nobody_can_read_is_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_checksums(checkpoint, ".metadata")
    (checkpoint / ".metadata").write_bytes(b"x")
    assert verify("r") == 2
    assert "is damaged: .metadata: " in capsys.readouterr().err


def test_verify_says_what_it_cannot_compare(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_older(checkpoint)
    assert verify("r") == 2
    assert (
        "has no checksums.json, as dcp.save or an older program wrote it" in capsys.readouterr().err
    )
    assert verify("nowhere") == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert verify("--help") == 0
    assert "Exit status: 0 if all files" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": "simplefsdp checksums", "version": 1, "files": []}',
        '{"format": "simplefsdp checksums", "version": 1, "files": {"../x": {}}}',
        '{"format": "simplefsdp checksums", "version": 1, "files": {"x": 1}}',
        '{"format": "simplefsdp checksums", "version": 1, "files": {"x": {"nbytes": -1}}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_damaged_checksums(checkpoint: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (checkpoint / "checksums.json").write_text(text)
    for command in (["verify", "r"], ["export", "--checkpoint", "r", "--out", "x"]):
        with pytest.raises(SystemExit) as exit_:
            main(command)
        assert exit_.value.code == 2
        said = capsys.readouterr().err
        assert "checksums.json: " in said and said.count("\n") == 1


def test_files_are_shared_out_by_size_and_each_to_one_rank() -> None:
    sums = {f"{i}": Checksum(nbytes, "") for i, nbytes in enumerate([5, 1, 0, 9, 4, 0, 3])}
    shares = [opened.share_of(sums, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(sums)
    assert sorted(max(sums[name].nbytes for name in share) for share in shares) == [4, 5, 9]
    assert opened.share_of({}, 0, 2) == []


def test_progress_is_told_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(1000))
    sums = {name: checksums.checksum_of(tmp_path / name) for name in "abc"}
    told: list[tuple[int, int]] = []
    assert opened.faults_in(tmp_path, sums, "abc", lambda *n: told.append(n)) == []
    assert told == []  # it took no time
    monkeypatch.setattr(opened, "_PATIENCE_S", 0.0)
    opened.faults_in(tmp_path, sums, "abc", lambda *n: told.append(n))
    assert told == [(1000, 3000), (2000, 3000), (3000, 3000)]


def load_integration(folder: str) -> str:
    model = simple_fsdp(nn.Linear(4, 4))
    if not Path(folder).exists():
        dist.barrier()
        integration.save(folder, [model])
        integration.load(folder, [model])
        dist.barrier()
        if dist.get_rank() == 0:
            flip(Path(folder, "__1_0.distcp"), 0.4)
        dist.barrier()
    try:
        integration.load(folder, [model])
    except ValueError as error:
        return str(error)
    return ""


def test_libraries_checkpoints_are_compared_on_all_ranks(tmp_path: Path, pool: RankPool) -> None:
    said = pool.run(load_integration, str(tmp_path / "saved"))
    assert all("is damaged: __1_0.distcp has other bytes" in line for line in said)


def test_a_save_into_the_same_folder_has_new_checksums(
    solo_mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = simple_fsdp(nn.Linear(2, 2), solo_mesh)
    for _ in range(2):
        integration.save(tmp_path, [model])
        integration.load(tmp_path, [model])
        with torch.no_grad():
            model.weight.mul_(2)


@pytest.mark.slow
def test_the_launcher_says_no_more_than_rank_0(tmp_path: Path) -> None:
    """The other rank was reported as failed, too, and might have ended rank 0 before it spoke."""
    folder = runs.step_folder(tmp_path / "r", 3)
    model = plain_model(ModelOptions()).to_empty(device="cpu")
    dcp.save({"model": model.state_dict()}, storage_writer=ChecksumWriter(folder), no_dist=True)
    (tmp_path / "text").write_text("once upon a time there was a shard\n" * 4000)
    flip(folder / "__0_0.distcp")
    done = subprocess.run(
        [sys.executable, "-m", "simplefsdp", "train", "--resume", str(folder), "--data", "text"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: checkpoint ") and "__0_0.distcp has other bytes" in line
