"""``benchmarks/gpu`` in its smallest form, on CPU: that it works before somebody holds a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pack_checks import cases

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from faults_run import until
from kit_parts import KIT, QUICK, SLOW

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # the whole kit, on a machine that may be busy
# What a machine with a GPU may lack.
_HIDDEN = """
import sys

GONE = {"numpy", "plotly", "pytest", "rich", "safetensors", "tensorboard", "tyro"}


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in GONE else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
_NOT_INSTALLED = """
import importlib.metadata

of = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **how: of(**{**how, "name": "nothing"})
"""
CELLS = {
    "machine": {"versions", "attention", "calibration"},
    "correct": {"eager", "hybrid auto", "checkpointed in full", "every other member packed"}
    | {"cudagraphs", "regions", "packing"},
    "wire": {"smallest, 1 blocks", "24 blocks", "graphs"},
    "predicted": {"smallest, steps", "smallest, buckets of manual"},
    "host": {"optimizer and clip", "mm.dtype", "host, fsdp2_eager", "host, auto"},
    "step": {"smallest"},
    "kernels": {"kernels"},
}


def kit(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run it as on a machine that has torch and no more, this package not installed."""
    (path / "sitecustomize.py").write_text(_HIDDEN)
    command = [sys.executable, str(KIT / "run.py"), "--smallest", "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    # As conftest.py sets it, so that Inductor soon compiles; of which torch 2.13 has no attention,
    # nor has any in bf16 on a CPU that has instructions for that. What is compiled is other code.
    if torch.__version__.startswith("2.13") or torch.cpu._is_avx512_bf16_supported():
        environment.pop("ATEN_CPU_CAPABILITY", None)
        environment["TORCHINDUCTOR_CACHE_DIR"] += "_vectors"
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=560, check=False
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What a first run said, and where its results are."""
    path = tmp_path_factory.mktemp("kit")
    return kit("--out", str(path / "out"), path=path), path


@pytest.mark.slow
def test_each_part_writes_what_it_found(found):
    said, path = found
    (folder,) = (path / "out").iterdir()
    assert said.returncode == 0, f"{said.stdout}{said.stderr}{(folder / 'log.txt').read_text()}"
    heads = [line[:2] for line in said.stdout.splitlines()]
    assert heads == ["a ", "b ", "c ", "d ", "e ", "f ", "g ", "re"]
    for name, cells in CELLS.items():
        text = (folder / f"{name}.json").read_text()
        data = json.loads(text)
        assert data["finished"] and not data["failed"] and cells <= data["cells"].keys()
        assert data["environment"]["device"] == "cpu" and str(ROOT) not in text
    correct = json.loads((folder / "correct.json").read_text())["cells"]
    ranks = [rank for cell in correct.values() for rank in cell.get("ranks", ())]
    assert len(ranks) == 12 and all(rank["ok"] for rank in ranks)
    assert all(0 < rank["collectives"] <= 30 for rank in ranks)
    packs = [rank["packs"] for rank in correct["every other member packed"]["ranks"]]
    assert all(len(called) == 3 and min(called.values()) > 0 for called in packs)
    assert correct["packing"]["cases"].keys() == cases().keys()
    host = json.loads((folder / "host.json").read_text())["cells"]
    sends = [cell["sends"] for name, cell in host.items() if "forward_host_s" in cell]
    assert sends == [False] * 2  # the copies and the clock of the modelled wire would count
    wire = json.loads((folder / "wire.json").read_text())["cells"]["smallest, 1 blocks"]["variants"]
    assert all("step_s" in wire[name] for name in ("floor", "none", "fsdp2_eager", "manual"))
    step = json.loads((folder / "step.json").read_text())["cells"]["smallest"]["variants"]
    assert step["step_manual"]["losses"] == pytest.approx(step["fsdp2_eager"]["losses"], abs=1e-3)


@pytest.mark.slow
def test_what_is_done_is_left_out(found):
    _, path = found
    files = {file: file.stat().st_mtime_ns for file in path.glob("out/*/*.json")}
    said = kit("--out", str(path / "out"), path=path)
    assert said.returncode == 0 and said.stdout.count("is there") == 7
    assert files == {file: file.stat().st_mtime_ns for file in path.glob("out/*/*.json")}


@pytest.mark.slow
def test_a_part_out_of_time_is_told_and_the_others_go_on(module, kit_of, tmp_path, capsys):
    kit_of(slow=(SLOW, 3.0), broken=("raise SystemExit(3)", 60.0), quick=(QUICK, 60.0))
    assert module("run").main() == 1
    slow, broken, quick, _ = capsys.readouterr().out.splitlines()
    assert slow.startswith("s slow: STOPPED at its limit") and "1 cells are written" in slow
    assert broken.startswith("b broken: FAILED with exit code 3")
    assert quick.startswith("q quick: well")
    (child,) = tmp_path.glob("out/*/child")
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or " Z " in state.read_text(), "what the part had started runs on"


def test_what_failed_is_done_again_and_what_was_found_is_not(module, monkeypatch, tmp_path, capsys):
    ledger = module("ledger")
    out = tmp_path / "part.json"
    arguments = ["part.py", "--out", str(out), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(ledger.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(ledger, "follow", lambda parent: None)

    def fail():
        raise subprocess.TimeoutExpired("pytest\n-q", 240)

    def a_part(commit, second):
        monkeypatch.setattr(ledger, "git_commit", lambda: commit)
        part = ledger.part("")
        part.cell("first", lambda: {"n": commit})
        part.cell("second", second)
        part.finish("well")
        return json.loads(out.read_text())

    data = a_part("one", fail)
    assert data["cells"]["second"]["failure"].startswith("TimeoutExpired: ")
    assert data["failed"] == ["second"] and data["line"] == "well; FAILED: second"
    assert not data["finished"]
    data = a_part("two", lambda: {"n": 2})
    assert "first: is there" in capsys.readouterr().out
    assert (data["finished"], data["failed"], data["line"]) == (True, [], "well")
    commits = {name: cell["git_commit"] for name, cell in data["cells"].items()}
    assert commits == {"first": "one", "second": "two"} and data["cells"]["first"]["n"] == "one"


def test_a_variant_that_failed_is_told_and_its_cell_stays(module, monkeypatch, tmp_path):
    ledger = module("ledger")
    part = ledger.Part(tmp_path / "part.json", ledger.torch.device("cpu"), True)
    part.cell("row", lambda: {"variants": {"auto": {"failure": "no memory"}, "manual": {}}})
    part.finish("well")
    data = json.loads(part.out.read_text())
    assert data["finished"] and part.has("row")
    assert data["failed"] == ["row: auto"] and data["line"] == "well; FAILED: row: auto"


_FAILS_ONCE = """
import json, sys
from pathlib import Path
out = Path(sys.argv[2])
failed = [] if out.exists() else ["suite"]
said = {"finished": not failed, "failed": failed, "line": "well", "cells": {}}
out.write_text(json.dumps(said))
"""


def test_a_failure_is_told_by_the_exit_code_until_it_is_mended(module, kit_of):
    kit_of(weak=(_FAILS_ONCE, 60.0))
    assert [module("run").main() for _ in range(3)] == [1, 0, 0]


@pytest.mark.slow
def test_a_part_that_has_said_its_line_is_done_however_long_it_takes_to_leave(
    module, kit_of, capsys
):
    kit_of(late=(f"{QUICK}\nimport time\ntime.sleep(60)", 3.0))
    assert module("run").main() == 0
    assert capsys.readouterr().out.startswith("l late: well")


def test_what_a_gpu_machine_lacked_is_looked_for_again(module, monkeypatch, tmp_path):
    ledger = module("ledger")
    monkeypatch.setattr(ledger.Part, "_environment", lambda part: {})
    for device, finished in (("cpu", True), ("cuda", False)):
        part = ledger.Part(tmp_path / "part.json", ledger.torch.device(device), smallest=False)
        part.put("suite", {"needs": "needs pytest"})
        part.finish("well")
        assert json.loads(part.out.read_text())["finished"] is finished


_TORCH = """
__version__ = "2.15"


class cuda:
    is_available = staticmethod(lambda: False)
"""


@pytest.mark.slow(quick=["15"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_takes_its_part_along(tmp_path, ending):
    """Of what it does itself, another part says the same; by SIGKILL the part is to notice."""
    folder = KIT
    if ending != signal.SIGKILL:
        folder = tmp_path / "kit"
        folder.mkdir()
        (folder / "run.py").write_bytes((KIT / "run.py").read_bytes())
        (folder / "torch.py").write_text(_TORCH)
        (folder / "part_machine.py").write_text(SLOW)
    command = [sys.executable, str(folder / "run.py"), "--smallest", "--device", "cpu"]
    run = subprocess.Popen(
        [*command, "--parts", "a", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A suite that a shell has begun in the background ignores Ctrl-C, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    until(lambda: list(tmp_path.glob("*/machine.json")), "the first cell of part a")
    (part,) = children.read_text().split()
    run.send_signal(ending)
    said, _ = run.communicate(timeout=60)
    command = Path(f"/proc/{part}/cmdline")  # empty, once it is only to be waited for
    until(lambda: not command.exists() or not command.read_text(), "the end of part a")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("out", "why"),
    [("", "expected a folder, got nothing"), ("file/below", "Not a directory.*another folder")],
)
def test_a_folder_that_cannot_be_written_is_told(module, monkeypatch, tmp_path, out, why, capsys):
    run = module("run")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--smallest", "--device", "cpu", "--out", out])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert re.search(why, f"{ended.value}{capsys.readouterr().err}")


def test_what_depends_on_the_blocks_is_built_again(module):
    part_wire = module("part_wire")
    names = ("floor", "none", *part_wire.VARIANTS)
    assert set(names) <= part_wire.BUILDERS.keys() | part_wire.GRAPHED.keys()
    built = []
    runner = SimpleNamespace(
        results=dict.fromkeys(names), variants=dict.fromkeys(names), build=built.extend
    )
    part_wire.Steps(None, "", None)._build_again(runner)
    planned, graphs = {"auto", "auto_regions", "auto_cudagraphs"}, set(part_wire.GRAPHED)
    assert set(built) == planned | graphs & set(names) and runner.results.keys().isdisjoint(built)
    assert len(runner.results) == len(runner.variants) == len(names) - len(built)


@pytest.mark.slow
def test_the_tests_on_a_device_need_pytest_alone(tmp_path):
    """The suite of part b, where this package is not installed either: no backend has its name."""
    hidden = _HIDDEN.replace('"pytest", ', "") + _NOT_INSTALLED
    (tmp_path / "sitecustomize.py").write_text(hidden)
    command = [sys.executable, "-m", "pytest", "-q", "--slow", "-o", "addopts="]
    said = subprocess.run(
        [*command, "tests/test_on_device.py", "-k", "uneven or packs"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert said.returncode == 0 and "2 passed" in said.stdout, f"{said.stdout}{said.stderr}"


def test_without_a_gpu_it_says_what_to_do(module, monkeypatch):
    run = module("run")
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu"])
    with pytest.raises(SystemExit, match="--smallest"):
        run.main()
