"""Changed files, a few hundred of those that ``benchmarks/mutations.py`` makes by the thousand."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mutations
from mutate import change_bytes
from mutated_files import TARGETS, Target
from mutations import try_files


@pytest.mark.slow
def test_changed_files_are_read_or_refused_in_one_line() -> None:
    found = try_files(30 * len(TARGETS), seed=1)
    assert found.bad == []
    assert all(found.refused[name] for name in TARGETS if name != "metrics.jsonl")
    assert sum(found.read.values()) > 30


def _write(folder: Path) -> Path:
    (folder / "x").write_bytes(pickle.dumps([print, 1]))
    return folder / "x"


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda path: pickle.loads(pickle.dumps(print)), "ran pickle.find_class"),
        (lambda path: {}["x"] if path.read_bytes() != pickle.dumps([print, 1]) else 0, "KeyError"),
        (lambda path: 0, "loaded although it was changed"),
    ],
)
def test_findings_are_found(monkeypatch: pytest.MonkeyPatch, read, said: str) -> None:
    bad = {"bad": Target(_write, change_bytes, read, detects=True)}
    monkeypatch.setattr(mutations, "TARGETS", bad)
    assert any(said in line for line in try_files(5, seed=0).bad)
