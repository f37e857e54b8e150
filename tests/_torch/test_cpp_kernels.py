"""The C++ kernels of a graph are compiled together, and compute what they compute one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError
from torch.distributed.device_mesh import DeviceMesh

from simplefsdp import simple_fsdp
from simplefsdp._torch import cpp_kernels, prepare_cpp
from simplefsdp._torch.cpp_kernels import (
    _Asked,
    _can_be_joined,
    _in_parts,
    _StandIn,
    compiled_beside,
    kernels_together,
)

ADDS = """
// adds
#include <cstdint>
extern "C"  void  kernel(const float* in, float* out)
{
    for (int64_t i = 0; i < 4; ++i) { out[i] += in[i]; }
}
"""
FILLS = 'extern "C" void kernel(float* out)\n{ for (int i = 0; i < 4; ++i) out[i] = 7.0f; }\n'
SCALES = """
extern "C" void kernel(const float* in, const int64_t n, float* out)
{ for (int64_t i = 0; i < n; ++i) out[i] = 2 * in[i]; }
"""


@contextmanager
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The sources that are compiled to libraries inside, those of each once."""
    sources: list[str] = []
    load = CppPythonBindingsCodeCache.load_pybinding_async

    def noted(argtypes: list[str], source: str, *args: Any, **kwargs: Any) -> Any:
        sources.append(source)
        return load(argtypes, source, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", noted)
        yield sources


def module(**kernels: tuple[list[str], str]) -> dict[str, Any]:
    """What a generated module does as it is loaded."""
    asks = AsyncCompile()
    scope = {name: asks.cpp_pybinding(*kernel) for name, kernel in kernels.items()}
    asks.wait(scope)
    return scope


def ask_for_all() -> tuple[dict[str, Any], dict[str, Any]]:
    adds, fills = (["const float*", "float*"], ADDS), (["float*"], FILLS)
    scales = (["const float*", "const int64_t", "float*"], SCALES)
    return module(adds=adds, fills=fills), module(more=adds, scales=scales)


def check(first: dict[str, Any], second: dict[str, Any]) -> None:
    out, ones = torch.zeros(4), torch.ones(4)
    first["fills"](out)
    assert out.tolist() == [7.0] * 4
    first["adds"](ones, out)
    second["more"](ones, out)
    assert out.tolist() == [9.0] * 4
    second["scales"](out, 2, ones)
    assert ones.tolist() == [18.0, 18.0, 1.0, 1.0]


@pytest.mark.slow
def test_kernels_of_several_modules_are_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with libraries(monkeypatch) as sources:
        with kernels_together():
            first, second = ask_for_all()
            assert isinstance(first["adds"], _StandIn)
            assert not isinstance(second["scales"], _StandIn)
        assert type(first["adds"]) is partial and first["adds"] is second["more"]
        assert len(sources) == 2  # the other has a size among its arguments
    check(first, second)


def test_a_module_may_run_before_the_end() -> None:
    with kernels_together():
        first, second = ask_for_all()
        check(first, second)
        assert type(first["adds"]) is partial
    check(first, second)


def test_a_kernel_that_is_called_while_its_module_is_loaded() -> None:
    asks = AsyncCompile()
    with kernels_together():
        scope = {"fills": asks.cpp_pybinding(["float*"], FILLS)}
        scope["fills"](torch.zeros(4))
        asks.wait(scope)
        assert type(scope["fills"]) is partial


def test_kernels_of_a_graph_are_compiled_beside_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with libraries(monkeypatch) as sources, compiled_beside():
        with kernels_together():
            first, second = ask_for_all()
        begun = len(sources)
        assert begun == 2 and isinstance(first["fills"], _StandIn)  # nobody waited
        with kernels_together():
            third, fourth = ask_for_all()
        check(first, second)  # who does not wait for the end has it now
        assert type(first["fills"]) is partial and isinstance(third["fills"], _StandIn)
    assert type(third["fills"]) is partial and third["adds"] is fourth["more"]
    check(third, fourth)
    assert len(sources) == 4  # of which torch compiles the last two no more


def test_a_kernel_that_does_not_compile_beside_says_so_at_the_end() -> None:
    broken = 'extern "C" void kernel(float* out)\n{ out[0] = missing; }\n'
    reached: list[bool] = []

    def compile_all() -> None:
        with compiled_beside():
            with kernels_together():
                module(broken=(["float*"], broken))
            reached.append(True)

    with pytest.raises(CppCompileError, match="missing"):
        compile_all()
    assert reached


def test_another_thread_gets_what_torch_gives() -> None:
    found: list[Any] = []
    with kernels_together():
        thread = Thread(target=lambda: found.extend(ask_for_all()))
        thread.start()
        thread.join()
    assert len(found) == 2 and not any(isinstance(k, _StandIn) for m in found for k in m.values())


def test_a_module_of_a_compilation_that_failed_runs() -> None:
    found: list[dict[str, Any]] = []

    def fail() -> None:
        with kernels_together():
            found.extend(ask_for_all())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert callable(found[0]["adds"]) and not isinstance(ask_for_all()[0]["adds"], _StandIn)
    check(*found)


def test_a_library_that_does_not_compile_is_made_of_kernels(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpp_kernels, "_joined", lambda part: (["float*"], "no C++ at all"))
    with caplog.at_level("DEBUG", logger=cpp_kernels.__name__), kernels_together():
        first, second = ask_for_all()
    assert "one by one" in caplog.text
    check(first, second)


def test_a_kernel_that_does_not_compile_says_so() -> None:
    broken = 'extern "C" void kernel(float* out)\n{ out[0] = nothing; }\n'
    with pytest.raises(CppCompileError, match="nothing"), kernels_together():
        module(broken=(["float*"], broken))


@pytest.mark.parametrize(
    ("argtypes", "source"),
    [
        (["const float*", "const int64_t", "float*"], SCALES),
        (["float*"], "static int help() { return 1; }\n" + FILLS),
        (["float*"], FILLS + "static int help() { return 1; }\n"),
        (["float*"], FILLS.replace("void", "__declspec(dllexport) void")),
        (["float*"], FILLS.replace("}", "", 1)),
    ],
)
def test_what_is_not_one_function_of_pointers_is_left_to_torch(argtypes, source) -> None:
    assert not _can_be_joined(argtypes, source)
    assert _can_be_joined(["float*"], FILLS)


def test_parts_take_about_as_long_and_are_not_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [_StandIn((), "x" * size, _Asked()) for size in (5, 9, 1, 4, 3, 2)]
    assert len(_in_parts(kernels, 2)) == len(_in_parts(kernels * 4, 1)) == 1
    assert len(_in_parts(kernels * 4, 32)) == 3 and _in_parts([], 4) == []
    monkeypatch.setattr(cpp_kernels, "_FEW", 1)
    parts = [[len(kernel.source) for kernel in part] for part in _in_parts(kernels, 2)]
    assert parts == [[9, 3], [5, 4, 2, 1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.nn.functional.gelu(self.one(self.norm(x))))


def gradients(mesh: DeviceMesh, executor: str) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = simple_fsdp(nn.Sequential(Block(), Block()), mesh)
    options = {"executor": executor, "bucketing": "manual"}
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    loss: Tensor = torch.compile(model, backend="simplefsdp", options=options)(x).square().sum()
    loss.backward()
    grads = [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]
    return [loss.detach(), *grads]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inductor", "regions"])
def test_a_model_computes_the_same_bits(executor, solo_mesh, monkeypatch) -> None:
    prepare_cpp().join()
    with torch._inductor.config.patch(force_disable_caches=True):
        with libraries(monkeypatch) as sources:
            together = gradients(solo_mesh, executor)
        assert (
            len(sources) == 2 and sum(source.count("case ") for source in sources) > 4
        )  # forward and backward
        with monkeypatch.context() as patch:
            patch.setattr(cpp_kernels, "_can_be_joined", lambda argtypes, source: False)
            with libraries(monkeypatch) as sources:
                apart = gradients(solo_mesh, executor)
        assert len(sources) > 4
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)
