"""``benchmarks/gpu --side-by-side``: parts at the same time, of which one is timed at a time."""

from __future__ import annotations

import fcntl
import json
import sys
from contextlib import contextmanager

import pytest
from kit_parts import KIT, QUICK, SLOW

pytestmark = pytest.mark.timeout(600)
_ROWS = f"""
import os, sys
sys.path[:0] = [{str(KIT)!r}, {str(KIT.parent)!r}]
from ledger import part
run = part("")
for name, row in run.each({{"one": 1, "two": 2, "three": 3}}):
    if name == os.environ.get("KILLED"):
        os._exit(3)
    run.cell(name, run.alone(lambda row=row: {{"n": row // (2 - row)}}))
run.finish("well")
"""


@pytest.mark.slow
def test_rows_side_by_side_write_into_one_file(module, kit_of, monkeypatch, tmp_path, capsys):
    """A row that fails is told; one that is killed leaves the part undone."""
    run = module("run")
    kit_of(rows=(_ROWS, 120.0), quick=(QUICK, 60.0))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--side-by-side"])
    monkeypatch.setenv("KILLED", "three")
    assert run.main() == 1
    assert "r rows: FAILED with exit code 1" in capsys.readouterr().out
    (path,) = tmp_path.glob("out/*/rows.json")
    assert not json.loads(path.read_text())["finished"]
    monkeypatch.delenv("KILLED")
    assert run.main() == 1
    data = json.loads(path.read_text())
    assert data["cells"]["one"]["n"] == 1 and data["cells"]["three"]["n"] == -3
    assert data["failed"] == ["two"] and data["line"] == "well; FAILED: two"


@pytest.mark.slow
def test_parts_side_by_side_have_limits_of_their_own(module, kit_of, monkeypatch, capsys):
    kit_of(long=("import time\ntime.sleep(4)", 60.0), over=(SLOW, 2.0), quick=(QUICK, 60.0))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--side-by-side"])
    assert module("run").main() == 1
    told = capsys.readouterr().out.splitlines()
    assert [line[0] for line in told[:3]] == ["q", "o", "l"]
    assert "STOPPED at its limit, 2 s" in told[1]


def test_a_runner_times_alone_and_builds_beside_others(module):
    measure = module("measure")
    happened = []

    def turn(name):
        @contextmanager
        def during():
            happened.append(name)
            yield
            happened.append("end")

        return during

    turns = measure.Turns(shared=turn("shared"), alone=turn("alone"))
    runner = measure.Runner(None, lambda line: None, {}, turns)
    runner._build = happened.append
    runner._rounds = lambda warmup, rounds: happened.append("rounds")
    runner._memory = lambda name: happened.append(f"memory of {name}")
    runner.build(["auto"])
    runner.variants["auto"] = None
    runner.rounds(0, 1)
    runner.memory()
    assert happened == [
        *("shared", "auto", "end", "alone", "rounds", "end", "alone", "memory of auto", "end")
    ]


def test_what_is_timed_is_alone(module, tmp_path):
    ledger = module("ledger")
    parts = [ledger.Part(tmp_path / f"{n}.json", ledger.torch.device("cpu"), True) for n in "ab"]
    one, other = (part.turns for part in parts)
    with (tmp_path / "device.lock").open("a") as third:
        with one.shared(), other.shared(), pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with one.alone(), pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_SH | fcntl.LOCK_NB)
