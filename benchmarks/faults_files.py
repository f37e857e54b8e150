"""Faults of files that somebody else wrote, or that were damaged: checkpoints, clusters, traces.

Whatever is wrong with a file, a command says so in one line, with the right exit code; it runs
nothing of the file, and leaves nothing behind.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import faults_rows
import torch
from faults_ranks import end_together
from faults_rows import Skip
from faults_run import COMPILED, EAGER, End, Scene

from inductor_passes.machine.cluster_file import as_json
from inductor_passes.machine.presets import preset
from simplefsdp.checkpoints import checksums
from simplefsdp.train import runs

_STEP = 2
fault = functools.partial(faults_rows.fault, bound_s=120.0)  # several commands start at once
_RESUME = "train --resume run"
_EXPORT = "export --checkpoint run --out exported"
_VERIFY = "verify run"
_REFUSED = {_EXPORT: 2, _VERIFY: 2, _RESUME: 2}
_IN_ONE_LINE = "refused in one line, exit 2"
_RUNS_NOTHING = "refused, 0 code executed, exit 2"


class _Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


@functools.cache
def _trained() -> Path:
    """A run folder with one checkpoint; made once."""
    folder = Path(tempfile.mkdtemp(prefix="simplefsdp-files-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    end = Scene(folder).train("--stop-after", str(_STEP)).end(180)
    assert end.code == 0, end.text
    return folder / "run"


def _checkpoint(scene: Scene) -> Path:
    """A checkpoint of the scene's own, to be spoilt."""
    shutil.copytree(_trained(), scene.run)
    return runs.step_folder(scene.run, _STEP)


def _as_if_written(checkpoint: Path) -> None:
    """Make the checksums anew, as whoever changes a file on purpose does."""
    names = checksums.read(checkpoint)
    assert names
    checksums.write(checkpoint, {n: checksums.checksum_of(checkpoint / n) for n in names})


def _rewrite(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Put what ``change`` makes of ``.metadata`` in its place."""
    path = checkpoint / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    _as_if_written(checkpoint)


def _told(scene: Scene, commands: Mapping[str, int], words: str) -> End:
    """Start commands; each ends with its code and one line, which has ``words``, and writes
    nothing."""
    before = _there(scene)
    started = {
        command: scene.start([sys.executable, "-m", "simplefsdp", *command.split()])
        for command in commands
    }
    end = end_together([*started.values()])
    for command, run in started.items():
        code, name = run.process.returncode, command.split()[0]
        told = [line for line in run.lines if line.startswith("error: ") or words in line]
        end = end.expect(code == commands[command], f"{name}: exit code {code}")
        end = end.expect(len(told) == 1 and words in told[0], f"{name}: {len(told)} lines tell it")
    return end.expect(_there(scene) == before, "something is left behind, or gone")


def _there(scene: Scene) -> set[Path]:
    """What is in the scene's folder and in its checkpoints, which nobody writes to."""
    return {*scene.folder.iterdir(), *scene.run.glob("checkpoints/**/*")}


@fault("in place of .metadata", _RUNS_NOTHING, codes={2}, says="nothing of it was run")
def metadata_that_runs_code(scene: Scene) -> End:
    checkpoint, marker = _checkpoint(scene), scene.folder / "marker"
    _rewrite(checkpoint, lambda _: _Evil(marker))
    end = _told(scene, _REFUSED, "posix.mkdir")
    return end.expect(not marker.exists(), "code of a file ran")


@fault("in a shard, in place of a tensor", _RUNS_NOTHING, codes={2}, says="cannot be read")
def shard_that_runs_code(scene: Scene) -> End:
    checkpoint, marker = _checkpoint(scene), scene.folder / "marker"
    shard = max(checkpoint.glob("*.distcp"))
    begin = shard.stat().st_size
    with shard.open("ab") as file:  # as long as any tensor, or the metadata alone would tell
        torch.save((_Evil(marker), torch.zeros(begin // 4)), file)
    length = shard.stat().st_size - begin

    def point_to_it(metadata: Any) -> Any:
        for index, place in metadata.storage_data.items():
            if index.fqn.startswith("model.") and place.relative_path == shard.name:
                place.offset, place.length = begin, length
        return metadata

    _rewrite(checkpoint, point_to_it)
    end = _told(scene, {_EXPORT: 2, _RESUME: 2}, "cannot be read")
    return end.expect(not marker.exists(), "code of a file ran")


@fault("data in ../secret, says .metadata", _IN_ONE_LINE, codes={2}, says="not in its folder")
def data_outside_of_the_checkpoint(scene: Scene) -> End:
    checkpoint = _checkpoint(scene)
    shutil.copy(max(checkpoint.glob("*.distcp")), checkpoint.parent / "secret")

    def point_to_it(metadata: Any) -> Any:
        for place in metadata.storage_data.values():
            place.relative_path = "../secret"
        return metadata

    _rewrite(checkpoint, point_to_it)
    return _told(scene, _REFUSED, "'../secret'")


@fault("in the middle of a shard", "refused, names the file", codes={1, 2}, says="other bytes")
def bit_flips(scene: Scene) -> End:
    shard = max(_checkpoint(scene).glob("*.distcp"))
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return _told(scene, {_EXPORT: 2, _VERIFY: 1, _RESUME: 2}, f"{shard.name} has other bytes")


@fault("checksums.json of the newest", _IN_ONE_LINE, codes={1, 2}, says="damaged")
def checksums_are_gone(scene: Scene) -> End:
    (_checkpoint(scene) / checksums.NAME).unlink()
    return _told(scene, {_EXPORT: 2, _VERIFY: 1, _RESUME: 2}, "checksums.json is missing")


@fault(".metadata cut to half", _IN_ONE_LINE, codes={1, 2}, says="damaged")
def metadata_is_truncated(scene: Scene) -> End:
    path = _checkpoint(scene) / ".metadata"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return _told(scene, {_EXPORT: 2, _VERIFY: 1, _RESUME: 2}, ".metadata")


@fault("named like a newer checkpoint", _IN_ONE_LINE, codes={2}, says="no complete checkpoint")
def empty_folder_as_a_checkpoint(scene: Scene) -> End:
    empty = runs.step_folder(scene.run, _STEP)
    empty.mkdir(parents=True)
    return _told(scene, _REFUSED, "holds no complete checkpoint")


@fault("named like a leftover", "removed, not followed, exit 0", codes={0}, loses=0)
def link_in_place_of_a_leftover(scene: Scene) -> End:
    checkpoint, elsewhere = _checkpoint(scene), scene.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    link = checkpoint.with_name(f".step-{_STEP + 1:08d}.tmp")
    link.symlink_to(elsewhere)
    end = scene.train("--resume", "run", "--stop-after", str(_STEP + 1)).end(120)
    end = end.expect(not link.is_symlink(), "the link is still there")
    return end.expect((elsewhere / "precious").exists(), "the link was followed")


@fault("TORCHINDUCTOR_CACHE_DIR is a file", "says so, goes on, exit 0", codes={0}, loses=0)
def compiler_cache_is_a_file(scene: Scene) -> End:
    cache = scene.folder / "cache"
    cache.touch()
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "below")}
    end = scene.train("--stop-after", "1", options=COMPILED, env=env).end(120)
    told = end.text.count("TORCHINDUCTOR_CACHE_DIR")
    return end.expect(told == 1, f"{told} lines tell of the cache")


@fault("where the run is to be: below a file", _IN_ONE_LINE, codes={2}, says="--out")
def out_below_a_file(scene: Scene) -> End:
    (scene.folder / "file").touch()
    options = [*EAGER, "--out", "file/run"]
    end = scene.train(options=options).end()
    return end.expect(len(end.text.splitlines()) == 1, "says more than one line")


def _cluster(scene: Scene, text: str | bytes, words: str) -> End:
    """The commands that read a cluster read this one."""
    data = text if isinstance(text, bytes) else text.encode()
    (scene.folder / "cluster.json").write_bytes(data)
    inspect = "inspect --model debug --ranks 2 --cluster cluster.json"
    train = " ".join(["train", *COMPILED, "--cluster", "cluster.json"])
    return _told(scene, {inspect: 2, train: 2}, words)


def _changed(**figures: float) -> str:
    """A cluster of ours, with other figures of its first wire."""
    cluster = json.loads(json.dumps(as_json(preset("a100"))))
    cluster["wires"][0]["link"] |= figures
    return json.dumps(cluster)


_WRONG = as_json(preset("a100")) | {"memory_gb": [[], {}]}
for name, where, text, words in (
    ("nested_deeply", "100,000 brackets", "[" * 100_000 + "]" * 100_000, "nested deeper than"),
    ("with_a_long_number", "a number of 5,000 digits", "9" * 5000, "thousands of digits"),
    ("with_a_slow_wire", "1e-320 GB/s", _changed(gb_s=1e-320), "gb_s"),
    ("with_a_fast_wire", "1e308 GB/s", _changed(gb_s=1e308), "gb_s"),
    ("of_wrong_types", "lists where figures belong", json.dumps(_WRONG), "memory_gb"),
    ("is_binary", "bytes that are no text", bytes(range(256)) * 16, "this is no"),
):
    faults_rows.add(
        f"cluster_{name}",
        functools.partial(_cluster, text=text, words=words),
        where,
        _IN_ONE_LINE,
        codes={2},
        says="error: cluster file cluster.json: ",
        bound_s=120.0,
        quick=name == "nested_deeply",
    )


@fault("100,000 brackets, and words for times", _IN_ONE_LINE, codes={2}, says="error: ")
def traces_of_somebody_else(scene: Scene) -> End:
    (scene.folder / "nested.json").write_text("[" * 100_000 + "]" * 100_000)
    event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": "soon", "dur": 1}
    (scene.folder / "soon.json").write_text(json.dumps({"traceEvents": [event]}))
    commands = {f"inspect --trace {name}": 2 for name in ("nested.json", "soon.json")}
    return _told(scene, commands, ".json: ")


@fault("config.json of 100,000 brackets", _IN_ONE_LINE, codes={2}, says="error: --hf config.json: ")
def config_of_somebody_else(scene: Scene) -> End:
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    (scene.folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    return _told(scene, {"inspect --fit --hf config.json": 2}, "nested deeper than")
