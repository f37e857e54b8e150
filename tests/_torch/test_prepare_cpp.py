"""What Inductor does before its first C++ kernel is begun early, and is what it then looks for."""

from __future__ import annotations

import json
import os
import platform
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
from simplefsdp._torch.cpp import _is_of_context
from simplefsdp.compiler.compilation import begin_preparing


def read_source(command: str) -> str:
    return "".join(Path(w).read_text() for w in command.split() if w.endswith(".cpp"))


def as_of_users() -> dict[str, str]:
    """Tests are run without vector instructions."""
    return {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"}


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


@pytest.mark.slow
def test_inductor_finds_everything_but_its_kernel(tmp_path: Path) -> None:
    environment = as_of_users() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
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
    kernels = [command for command in before if "c++-header" not in command]
    # No program for each set of instructions: torch's own are the only ones with that symbol.
    tried = [command for command in kernels if "__avx_chk_kernel" in read_source(command)]
    assert kernels and bool(tried) == (not _is_of_context(config))
    assert len(after) == 1 and "c++-header" not in after[0]


CHOSEN = """
import json, sys, torch
import torch.utils.cpp_extension
from torch._inductor import codecache, cpu_vec_isa
from simplefsdp import _torch
if sys.argv[1] == "ours":
    _torch.prepare_cpp().join()
elif sys.argv[1] == "fails":
    load = codecache.CppPythonBindingsCodeCache.load_pybinding
    def fail(*args): raise RuntimeError("no kernel")
    codecache.CppPythonBindingsCodeCache.load_pybinding = fail
    _torch.prepare_cpp().join()
isa = cpu_vec_isa.pick_vec_isa()
print(json.dumps([str(isa), isa.build_arch_flags(), isa.build_macro()]))
"""


@pytest.mark.slow
def test_the_instructions_are_those_that_torch_picks(tmp_path: Path) -> None:
    """Also where the kernel does not compile: torch then tries each set of them."""
    found = []
    for how, folder in (("torch", "torchs"), ("ours", "ours"), ("fails", "torchs")):
        # In its folder are the programs that torch has tried; ours would be found there, too.
        environment = as_of_users() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        found.append(
            subprocess.run(
                [sys.executable, "-c", CHOSEN, how],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert found[0] == found[1] == found[2]


@pytest.mark.skipif(not _is_of_context(config), reason="torch tries all")
def test_where_the_user_wants_no_vectors_nothing_is_tried(
    not_begun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpu_vec_isa

    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: 1 / 0)
    cpu_vec_isa.valid_vec_isa_list.cache_clear = None
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", lambda *args: None)
    _torch.prepare_cpp().join()
    assert not cpu_vec_isa.pick_vec_isa()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with pytest.raises(ZeroDivisionError):  # who wants others later is given torch's list
        cpu_vec_isa.pick_vec_isa()


@pytest.mark.skipif(not _is_of_context(config), reason="torch tries all")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch tries all")
@pytest.mark.parametrize("widest", ["avx2", "avx512"])
def test_what_compiled_is_not_tried_again(
    widest: str, not_begun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpu_vec_isa

    isas = {"avx2": cpu_vec_isa.VecAVX2(), "avx512": cpu_vec_isa.VecAVX512()}
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [isas["avx512"], isas["avx2"]])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: [widest, "avx2"])
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", lambda *args: None)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *args: 1 / 0)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    asked = [cpu_vec_isa.VecISA._VecISA__bool__impl, cpu_vec_isa.VecAVX512.__bool__]
    for caches in asked:
        caches.cache_clear()
    try:
        _torch.prepare_cpp().join()
        assert isas[widest]
    finally:
        for caches in asked:
            caches.cache_clear()


@pytest.fixture
def not_begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cpu_vec_isa.valid_vec_isa_list)
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
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", lambda *args: done.wait(30))
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
