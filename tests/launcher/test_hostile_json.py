"""JSON from somebody else: clusters, traces, indexes, trainers. One line says what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.ir import json_file
from inductor_passes.ir.json_file import parse_json, read_json
from inductor_passes.machine.cluster_file import as_json, load
from inductor_passes.machine.presets import preset
from simplefsdp.cache_folder import leave_unusable_cache_folder
from simplefsdp.cli import main
from simplefsdp.inspection.profile import read_profiles
from simplefsdp.pretrained.files import entries_of
from simplefsdp.train import metrics, runs
from simplefsdp.train.checkpoint import CheckpointWriter
from simplefsdp.train.config import TrainConfig
from simplefsdp.train.runs import TrainerState

DEEP = "[" * 200_000 + "]" * 200_000
BOMBS = {
    "nested": DEEP,
    "nested a little": "[" * 300 + "]" * 300,
    "nested objects": '{"a":' * 200_000 + "1" + "}" * 200_000,
    "5,000 digits": "[" + "9" * 5_000 + "]",
    "400 digits": "[" + "9" * 400 + "]",
    "an unfinished string": '["' + "x" * 1000,
    "no text": "\udcff\udcfe",
    "nothing": "",
}


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize("bomb", BOMBS)
def test_json_is_read_within_bounds(tmp_path: Path, bomb: str) -> None:
    path = write(tmp_path / "x.json", BOMBS[bomb])
    with pytest.raises(ValueError, match=r"^(the JSON|this is) .*") as error:
        read_json(path, 10**6)
    assert len(str(error.value)) < 200


def test_json_is_no_larger_than_it_may_be(tmp_path: Path) -> None:
    text = json.dumps(["x" * 1000] * 3000)
    path = tmp_path / "x.json"
    for data in (text.encode(), gzip.compress(text.encode()), gzip.compress(b" " * 50_000_000)):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="larger than the 1 MiB"):
            read_json(path, json_file.MIB)
    path.write_bytes(gzip.compress(b"[1,") + gzip.compress(b"2]"))
    assert read_json(path, 100) == [1, 2]
    path.write_bytes(gzip.compress(b"[1,2]")[:12] + b"broken")
    with pytest.raises(ValueError, match="the compressed file is"):
        read_json(path, 100)


def test_what_might_never_end_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="no regular file"):
            read_json(path, 10)
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path, 10)


def test_as_deep_as_it_may_be() -> None:
    assert parse_json("[" * 64 + "]" * 64)
    with pytest.raises(ValueError, match="deeper than 64"):
        parse_json("[" * 66 + "]" * 66)


def cluster() -> dict[str, Any]:
    return json.loads(json.dumps(as_json(preset("a100"))))


def bad_clusters() -> dict[str, str]:
    found = {name: text for name, text in BOMBS.items() if name != "no text"}

    def changed(name: str, change: Callable[[dict[str, Any]], None]) -> None:
        data = cluster()
        change(data)
        found[name] = json.dumps(data)

    changed("1e-320 GB/s", lambda c: c["wires"][0]["link"].update(gb_s=1e-320))
    changed("1e308 GB/s", lambda c: c["wires"][0]["link"].update(gb_s=1e308))
    changed("1e308 of memory", lambda c: c.update(memory_gb_s=1e308))
    changed("tiny peaks", lambda c: c["peaks"]["float32"].update(tflops=1e-320))
    changed("a huge number of ranks", lambda c: c.update(ranks_per_node=10**18))
    changed("a name of a list", lambda c: c.update(name=[1, 2]))
    changed("a long name", lambda c: c.update(name="x" * 10_000))
    changed("a long figure", lambda c: c.update(memory_gb="9" * 10_000))
    changed("a source", lambda c: c.update(source={}))
    changed("a kind", lambda c: c["wires"][0].update(kind=["gather"]))
    changed("points", lambda c: c["wires"][0]["link"].update(ramp=[[1, 1]] * 20_000))
    changed("points of objects", lambda c: c["wires"][0]["link"].update(ramp=[{}]))
    changed("a long list", lambda c: c.update(memory_gb=[0] * 100_000))
    changed("a longer list", lambda c: c.update(peaks=[0] * 3_000_000))
    return found


@pytest.mark.parametrize("name", bad_clusters())
def test_clusters_of_somebody_else(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "cluster.json", bad_clusters()[name])
    with pytest.raises(ValueError, match=r"cluster\.json: ") as error:
        load(path)
    assert len(str(error.value).replace(str(tmp_path), "")) < 400 and "\n" not in str(error.value)


def gathered(**changes: Any) -> list[dict[str, Any]]:
    """The events of a rank that gathers while it computes; the gather's changed."""
    args = {"device": 0, "correlation": 1, "In msg nelems": 4, "dtype": "Float"}
    gather = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 1, "dur": 9}
    compute = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 5, "args": dict(args)}
    return [compute, {**gather, "args": args, **changes}]


BAD_EVENTS = {
    "ts": gathered(ts=[1]),
    "no ts": gathered(ts=None),
    "ts of words": gathered(ts="soon"),
    "ts beyond floats": gathered(ts="9" * 400),
    "NaN": gathered(ts=float("nan")),
    "infinite": gathered(dur=float("inf")),
    "dur": gathered(dur={}),
    "numbers": [1, 2, 3],
    "lists": [[], [[]]],
}
ODD_EVENTS = {
    "a name of a list": [*gathered(), {"ph": "X", "ts": 0, "dur": 1, "name": [1]}],
    "no name": [*gathered(), {"ph": "X", "ts": 0, "dur": 1}],
    "others": [*gathered(), 1, None, "x", [{}]],
    "lists to compare by": gathered(pid=[1], tid={}, args={"device": [], "correlation": [2]}),
    "args": gathered(args=[1]),
    "dims": gathered() + [
        {"ph": "X", "ts": 0, "dur": 1, "name": "c10d::allgather", "args": {"Input Dims": dims}}
        for dims in (3, {"a": 1}, ["x", 10**9], [[[1, [2]]]], [[10**18] * 1000])
    ],
    "gloo": [
        {"ph": "X", "ts": 0, "dur": 1, "name": "gloo:all_gather", "tid": 1,
         "args": {"Input type": 3, "Input Dims": [["x", 10**9]]}},
    ],
    "a wire": [
        *gathered(),
        {"ph": "X", "ts": 0, "dur": 1, "name": "wire:gather nbytes=" + "9" * 5000
         + " begins_after_us=1..2 takes_us=1"},
    ],
    "plans": [
        *gathered(),
        {"ph": "M", "name": "process_name", "args": {"name": "simplefsdp, x"}},
        {"ph": "M", "name": "process_name", "pid": [1], "args": {"name": "simplefsdp, y"}},
        {"ph": "X", "ts": 0, "dur": 1, "cat": "gather", "args": {"bytes": "many"}},
    ],
    "markup": gathered(name="ncclDevKernel_AllGather[/x] [bold"),
    "escapes": gathered(name="ncclDevKernel_AllGather\x1b[31m"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BOMBS, *BAD_EVENTS])
def test_traces_of_somebody_else(tmp_path: Path, name: str) -> None:
    text = BOMBS[name] if name in BOMBS else json.dumps({"traceEvents": BAD_EVENTS[name]})
    path = write(tmp_path / "trace.json", text)
    with pytest.raises(ValueError, match=r"trace\.json: ") as error:
        read_profiles(path)
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ODD_EVENTS)
def test_traces_with_odd_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """What does not matter is passed over; the rest is reported."""
    path = write(tmp_path / "trace.json", json.dumps(ODD_EVENTS[name]))
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", "--trace", str(path)])
    assert exit_.value.code == 0
    assert "exposed" in (printed := capsys.readouterr().out) and "\x1b" not in printed


@pytest.mark.parametrize("name", BOMBS)
def test_indexes_of_somebody_else(tmp_path: Path, name: str) -> None:
    write(tmp_path / "model.safetensors.index.json", BOMBS[name])
    with pytest.raises(ValueError, match=r"index\.json: is damaged"):
        entries_of(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [[], 3, {"a": 1}, {"a": ["b"]}, {"a": "../b"}, {"a": ".."}, {"a": "x\0"}]
)
def test_indexes_stay_in_their_folder(tmp_path: Path, weight_map: Any) -> None:
    text = json.dumps({"weight_map": weight_map})
    write(tmp_path / "model.safetensors.index.json", text)
    with pytest.raises(ValueError, match=r"index\.json: is damaged"):
        entries_of(tmp_path)


def saved(**changes: Any) -> str:
    state = TrainerState(3, 2, TrainConfig().to_json(), {"epoch": 0})
    return json.dumps({"format": 2, **asdict(state), **changes})


@pytest.mark.parametrize(
    "text",
    [
        *BOMBS.values(), "[]", "3", '{"format": 1}', saved(step="3"), saved(step=-1),
        saved(world_size=None), saved(config=[]), saved(config={"model": []}), saved(data=3),
        saved(config={"model": {"model": ["8b"]}}), saved(config={"optim": {"steps": "many"}}),
        saved(config={"optim": {"lr": True}}), saved(config={"compile": {"executor": {}}}),
        saved(more=1), saved(format="1"), saved(checksums=1), saved(format=1, config=3),
        saved(format=1, config={"model": 3}),
    ],
)  # fmt: skip
def test_trainers_of_somebody_else(tmp_path: Path, text: str) -> None:
    write(tmp_path / "trainer.json", text)
    with pytest.raises(ValueError, match=r"trainer\.json is damaged") as error:
        runs.read_trainer_state(tmp_path)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


def test_trainers_of_ours_are_read_as_they_were_written(tmp_path: Path) -> None:
    config = TrainConfig.from_json(
        {"data": {"data": "text"}, "optim": {"lr": 1, "warmup_steps": None}, "new": {"x": 1}}
    )
    assert config.data.data == Path("text") and config.optim.lr == 1.0
    state = TrainerState(3, 2, config.to_json(), {"epoch": 0})
    runs.write_trainer_state(tmp_path, state)
    assert runs.read_trainer_state(tmp_path) == state
    write(tmp_path / "trainer.json", saved(format=3))
    with pytest.raises(ValueError, match="later simplefsdp"):
        runs.read_trainer_state(tmp_path)


def test_metrics_with_bombs_are_cut_where_they_were_whole(tmp_path: Path) -> None:
    lines = ['{"step": 1}', DEEP, "\udcff", '{"step": ' + "9" * 400 + "}", '{"step": 3}', "[1]"]
    metrics._truncate(write(tmp_path / "metrics.jsonl", "\n".join(lines)), step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_link_in_place_of_a_leftover_is_removed_and_not_followed(
    solo_mesh: DeviceMesh, tmp_path: Path
) -> None:
    """It made a run that nobody could resume."""
    folder, elsewhere = tmp_path / runs.CHECKPOINTS, tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (folder / ".step-00000001.tmp").symlink_to(elsewhere)
    (folder / ".step-00000002.tmp").symlink_to(tmp_path / "nowhere")
    (folder / ".step-00000003.tmp").touch()
    (folder / ".step-00000004.tmp").mkdir()
    (folder / ".step-00000004.tmp" / "half").touch()
    writer = CheckpointWriter(tmp_path, 2, torch.device("cpu"), nbytes=1, say=print)
    assert list(folder.iterdir()) == []
    assert (elsewhere / "precious").exists()
    weight = nn.Parameter(torch.ones(2))
    writer.save({"weight": weight}, TrainerState(1, 1, {}, {}))
    writer.wait()
    assert writer.error is None


@pytest.mark.parametrize("named", ["/proc/nowhere", "file/inside", "file", "a folder"])
def test_a_compiler_cache_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a folder").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder := str(tmp_path / named))
    leave_unusable_cache_folder()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    said = capsys.readouterr().err
    why = "has a space in it" if named == "a folder" else "cannot be written ("
    assert said.startswith(f"warning: TORCHINDUCTOR_CACHE_DIR={folder} {why}")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_compiler_cache_that_cannot_be_written_is_left_on_import(tmp_path: Path) -> None:
    """Torch fails on import, with a traceback."""
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file")
    code = "import simplefsdp, torch._dynamo, os; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip() != folder, done.stderr
    assert done.stderr.startswith(f"warning: TORCHINDUCTOR_CACHE_DIR={folder} cannot be written (")
    assert done.stderr.count("\n") == 1
