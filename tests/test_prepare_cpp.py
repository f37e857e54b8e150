"""What Inductor does before its first C++ kernel is begun early, and is what it then looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import _torch, simple_fsdp
from simplefsdp._torch import cpp
from simplefsdp.train import build
from simplefsdp.train.config import CompileOptions

RECORDED = """
import json, subprocess, sys, torch
made, real = [], subprocess.run
def run(command, *args, **kwargs):
    words = command.split() if isinstance(command, str) else list(map(str, command))
    if "c++-header" in words or any(word.endswith(".so") for word in words):
        made.append(" ".join(words))
    return real(command, *args, **kwargs)
subprocess.run = run
from simplefsdp import _torch
_torch.prepare_cpp().join()
before = len(made)
torch.compile(lambda x: x.sin() + 1)(torch.ones(100))
print(json.dumps([made[:before], made[before:]]))
"""


def test_inductor_finds_everything_but_its_kernel(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert len(before) >= 2  # instructions that are tried, and our kernel
    assert len(after) == 1 and "c++-header" not in after[0]


def test_what_fails_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def fail(*args: object) -> None:
        asked.append(args)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fail)
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: None)
    cpp._prepare()
    assert len(asked) == 1


def test_it_is_begun_once() -> None:
    first = _torch.prepare_cpp()
    assert isinstance(first, Thread) and first.daemon and _torch.prepare_cpp() is first
    first.join()


@pytest.mark.parametrize(
    ("options", "device", "begun"),
    [
        (CompileOptions(), "cpu", 1),
        (CompileOptions(executor="regions"), "cpu", 1),
        (CompileOptions(), "cuda", 0),
        (CompileOptions(compile=False), "cpu", 0),
        (CompileOptions(executor="aot_eager"), "cpu", 0),
    ],
)
def test_the_trainer_begins_it_where_c_is_generated(
    options: CompileOptions, device: str, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(_torch, "prepare_cpp", lambda: asked.append(None))
    build.prepare(options, device)
    assert len(asked) == begun


@pytest.mark.parametrize("executor", ["regions", "aot_eager"])
def test_the_backend_begins_it_where_c_is_generated(
    executor: str, solo_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(_torch, "prepare_cpp", lambda: asked.append(None))
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    torch.compile(model, backend="simplefsdp", options={"executor": executor})(torch.ones(2, 4))
    assert len(asked) == (executor != "aot_eager")
