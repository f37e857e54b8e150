"""Checkpoints from somebody else: nothing in them runs, nothing outside is read, one line tells."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_checkpoint import load_plain
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import simple_fsdp
from simplefsdp.checkpoints.opened import fill
from simplefsdp.cli import main
from simplefsdp.integrations import checkpoint as integration
from simplefsdp.launcher import launch
from simplefsdp.models.build import plain_model
from simplefsdp.models.options import ModelOptions
from simplefsdp.train import runs
from simplefsdp.train.config import TrainConfig
from simplefsdp.train.restore import open_checkpoint
from simplefsdp.train.runs import TrainerState

STEP = 3


class Evil:
    """Makes a folder of its name where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the debug model."""
    folder = runs.step_folder(tmp_path_factory.mktemp("good"), STEP)
    state = plain_model(ModelOptions()).to_empty(device="cpu").state_dict()
    dcp.save({"model": state, "n": 1}, checkpoint_id=str(folder), no_dist=True)
    runs.write_trainer_state(folder, TrainerState(STEP, 1, TrainConfig().to_json(), data={}))
    return folder


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in a run folder in the current one, to be spoilt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start_local_ranks", lambda *args, **kwargs: 0)
    Path("text").write_text("once upon a time there was a shard\n" * 4000)
    return Path(shutil.copytree(good, runs.step_folder(Path("run"), STEP)))


def said_by(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a command that finds bad input prints: one line, beside warnings."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    lines = capsys.readouterr().err.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith("warning: "))
    assert exit_.value.code == 2, said
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


def respoil(checkpoint: Path, change: Any) -> None:
    """Rewrite ``.metadata``: ``change`` gets it, and returns another."""
    path = checkpoint / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))


COMMANDS = {
    "resume": ("train", "--resume", "run", "--data", "text"),
    "export": ("export", "--checkpoint", "run", "--out", "exported"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["instead", "inside"])
def test_metadata_runs_no_code(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], command: str, where: str
) -> None:
    def spoil(metadata: Any) -> Any:
        metadata.planner_data["more"] = Evil(Path("ran").resolve())
        return metadata if where == "inside" else Evil(Path("ran").resolve())

    respoil(checkpoint, spoil)
    said = said_by(capsys, *COMMANDS[command])
    assert not Path("ran").exists()
    assert ".metadata" in said and "posix.mkdir" in said and "nothing of it was run" in said


def test_metadata_asks_for_no_class_that_it_does_not_need(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(metadata: Any) -> Any:
        metadata.storage_meta.modules = [Path]
        return metadata

    respoil(checkpoint, spoil)
    assert f"'{Path.__module__}.Path'" in said_by(capsys, *COMMANDS["export"])


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "", "x\0y"])
def test_data_is_in_the_folder(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copy(checkpoint / "__0_0.distcp", checkpoint.parent / "secret")

    def spoil(metadata: Any) -> Any:
        for place in metadata.storage_data.values():
            place.relative_path = name
        return metadata

    respoil(checkpoint, spoil)
    for command in COMMANDS.values():
        assert "which is not in its folder" in said_by(capsys, *command)


def spoil_chunks(metadata: Any) -> Any:
    metadata.state_dict_metadata["model.norm.weight"].chunks.clear()
    return metadata


def spoil_sizes(metadata: Any) -> Any:
    entry = metadata.state_dict_metadata["model.norm.weight"]
    entry.size = torch.Size([2**60])
    entry.chunks[0].sizes = torch.Size([2**60])
    return metadata


def spoil_places(metadata: Any) -> Any:
    metadata.storage_data = {}
    return metadata


def spoil_offsets(metadata: Any) -> Any:
    metadata.state_dict_metadata["model.norm.weight"].chunks[0].offsets = torch.Size([1])
    return metadata


def spoil_overlap(metadata: Any) -> Any:
    """Two halves, of which both are the first: the other one was not loaded."""
    entry = metadata.state_dict_metadata["model.norm.weight"]
    entry.chunks[0].sizes = torch.Size([entry.size[0] // 2])
    entry.chunks *= 2
    return metadata


def spoil_transforms(metadata: Any) -> Any:
    """One long list for all places, of which each had a copy."""
    shared = ["zstd"] * 1000
    for place in metadata.storage_data.values():
        place.transform_descriptors = shared
    return metadata


def spoil_names(metadata: Any) -> Any:
    """One long name for all places, which was taken apart for each."""
    shared = "a/" * 5000 + "b"
    for place in metadata.storage_data.values():
        place.relative_path = shared
    return metadata


def spoil_types(metadata: Any) -> Any:
    next(iter(metadata.storage_data.values())).offset = "0"
    return metadata


def spoil_keys(metadata: Any) -> Any:
    return {"metadata": metadata}


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_chunks, spoil_sizes, spoil_places, spoil_offsets, spoil_overlap, spoil_transforms,
        spoil_names, spoil_types, spoil_keys,
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit_together(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], spoil: Any
) -> None:
    """Tensors without data were loaded as whatever the memory held."""
    respoil(checkpoint, spoil)
    for command in COMMANDS.values():
        assert "is damaged: " in said_by(capsys, *command)


def test_metadata_is_read_once(checkpoint: Path) -> None:
    """What torch goes by is what was checked."""
    opened = open_checkpoint(checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(Path("ran").resolve())))
    weight = torch.empty(opened.tensors["model.norm.weight"].size)
    fill(opened.files, {"model.norm.weight": weight}, no_dist=True)
    assert not Path("ran").exists()


def test_what_should_be_a_tensor_runs_no_code(checkpoint: Path) -> None:
    """A shard may hold any object, if the metadata says that it is one."""
    evil = Path("ran").resolve()
    torch.save(Evil(evil), checkpoint / "__0_0.distcp")
    nbytes = (checkpoint / "__0_0.distcp").stat().st_size

    def spoil(metadata: Any) -> Any:
        metadata.state_dict_metadata = dict.fromkeys(
            metadata.state_dict_metadata, BytesStorageMetadata()
        )
        for index, place in list(metadata.storage_data.items()):
            place.offset, place.length = 0, nbytes
            metadata.storage_data[type(index)(index.fqn)] = place
        return metadata

    respoil(checkpoint, spoil)
    model = plain_model(ModelOptions()).to_empty(device="cpu")
    with pytest.raises(ValueError, match="is of another model"):
        load_plain(checkpoint, model)
    # Even if all else failed to see that these are no tensors.
    targets = {"model.norm.weight": model.state_dict()["norm.weight"]}
    with pytest.raises(ValueError, match=r"model\.norm\.weight is a posix\.mkdir"):
        fill(open_checkpoint(checkpoint).files, targets, no_dist=True)
    assert not evil.exists()


def test_a_damaged_shard_is_told_in_one_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch tells in a hundred lines how to load it without ``weights_only``."""
    shard = checkpoint / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    for i in range(0, len(data) - 50):
        if data[i : i + 2] == b"\x80\x02":  # the begin of a pickle
            data[i + 2 : i + 40] = b"cos\nsystem\n(S'x'\ntR.".ljust(38, b".")
    shard.write_bytes(data)
    said = said_by(capsys, *COMMANDS["export"])
    assert "__0_0.distcp cannot be read: it is damaged" in said
    assert "move that folder elsewhere" in said


def test_objects_of_a_library_s_checkpoint_run_no_code(
    solo_mesh: DeviceMesh, tmp_path: Path
) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    model = nn.Sequential(Extra(2, 2))
    model[0].extra = [1, "two", (3.0, None)]
    simple_fsdp(model, solo_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    integration.save(tmp_path / "a", [model], [optimizer])
    model[0].extra, optimizer.param_groups[0]["lr"] = None, 0.1
    integration.load(tmp_path / "a", [model])
    integration.load_optimizers(tmp_path / "a", [model], [optimizer])
    assert model[0].extra == [1, "two", (3.0, None)]
    assert optimizer.param_groups[0]["lr"] == 0.5

    model[0].extra = Evil(tmp_path / "ran")
    integration.save(tmp_path / "b", [model], [optimizer])
    with pytest.raises(ValueError, match=r"_extra_state is a posix\.mkdir") as error:
        integration.load(tmp_path / "b", [model])
    assert "add_safe_globals" in str(error.value) and "remove" not in str(error.value)
    assert not (tmp_path / "ran").exists()
