"""Fixtures: modules of ``benchmarks/gpu``, and a run of it with other parts."""

from __future__ import annotations

import importlib
import sys

import pytest
from kit_parts import KIT


@pytest.fixture
def module(monkeypatch):
    """``module("run")`` of the kit's folder."""
    for folder in (KIT.parent, KIT):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in ("run", "ledger"):
        sys.modules.pop(name, None)


@pytest.fixture
def kit_of(module, monkeypatch, tmp_path):
    """``kit_of(name=(script, limit_s))``: ``run.py`` has these parts, and runs all of them."""
    run = module("run")
    out = str(tmp_path / "out")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--smallest", "--device", "cpu", "--out", out])

    def make(**parts):
        for name, (script, _) in parts.items():
            (tmp_path / f"part_{name}.py").write_text(script)
        known = [run.Part(name[0], name, limit_s) for name, (_, limit_s) in parts.items()]
        monkeypatch.setattr(run, "PARTS", known)

    return make
