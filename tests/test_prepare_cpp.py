"""What Inductor does before its first C++ kernel is begun early, and is what it then looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import _torch, simple_fsdp
from simplefsdp._torch import cpp
from simplefsdp._torch.cache_files import broken_files_removed
from simplefsdp.compiler.compilation import begin_preparing

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
    # Headers are kept beside that folder, for all caches.
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert sum("c++-header" in command for command in before) == 1
    assert len(before) >= 3  # instructions that are tried, the header, our kernel
    assert len(after) == 1 and "c++-header" not in after[0]


@pytest.fixture
def not_begun() -> Iterator[None]:
    _torch.prepare_cpp.cache_clear()
    yield
    _torch.prepare_cpp.cache_clear()


def test_what_fails_is_left_to_inductor(
    not_begun: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fail)
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: None)
    with caplog.at_level("DEBUG", logger=cpp.__name__):
        _torch.prepare_cpp().join()
    assert "no compiler" in caplog.text


def test_it_is_prepared_with_the_users_settings(
    not_begun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch remembers what instructions there are, and asks only once."""
    seen: list[object] = []
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", lambda *args: None)
    monkeypatch.setattr(
        "torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: seen.append(config.cpp.simdlen)
    )
    with config.patch({"cpp.simdlen": 128}):
        _torch.prepare_cpp().join()
    assert seen == [128]


def test_it_is_begun_once_and_waited_for_at_the_end(
    not_begun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Event()
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", lambda *args: None)
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: done.wait(30))
    cpp.let_compiler_finish()  # there is none
    thread = _torch.prepare_cpp()
    assert _torch.prepare_cpp() is thread and thread.is_alive() and not thread.daemon
    Timer(0.1, done.set).start()
    cpp.let_compiler_finish()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("executor", "device", "begun"),
    [
        ("inductor", "cpu", 1),
        ("regions", "cpu", 1),
        ("inductor", "cuda", 0),
        ("aot_eager", "cpu", 0),
    ],
)
def test_it_is_begun_where_c_is_generated(
    executor: str, device: str, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(_torch, "prepare_cpp", lambda: asked.append(None))
    begin_preparing(executor, device)
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


@pytest.mark.parametrize("said", ["cannot read PCH file", "while reading precompiled header"])
def test_a_header_that_is_cut_short_is_made_anew(said: str, tmp_path: Path) -> None:
    header = tmp_path / "precompiled_headers" / "abc.h"
    header.parent.mkdir()
    compiled = header.with_name("abc.h.gch")
    compiled.write_bytes(b"short")
    command = ["g++", "kernel.cpp", "-include", str(header), "-o", "kernel.so"]
    told = rf"{compiled}, .* cut short \({said}\).* start again"
    with pytest.raises(ValueError, match=told), broken_files_removed():
        raise CppCompileError(command, f"cc1plus: fatal error: {said}")
    assert not compiled.exists()
    with pytest.raises(CppCompileError), broken_files_removed():
        raise CppCompileError(command, "cc1plus: fatal error: no such name")
