"""An H100 that is not there: Inductor writes its CUDA code on a machine without a GPU.

Nothing runs on it. torch asks for its CUDA hooks once, so this is for a process of its own, which
imports this module before torch. It replaces what torch asks a device, in private places too: if a
release of torch asks something new, the error says which function is missing here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "total_memory": 85_000_000_000,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "gcnArchName": "",
}
H100 = namedtuple("Properties", list(PROPERTIES))(**PROPERTIES)  # type: ignore[misc]


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("torch")  # which does not import it
    assert spec is not None and spec.origin is not None
    torch_folder, out = Path(spec.origin).parent, Path(tempfile.mkdtemp()) / "guard.so"
    include = torch_folder / "include"
    paths = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{torch_folder}/lib"]
    paths.append(f"-Wl,-rpath,{torch_folder}/lib")
    source = str(Path(__file__).with_name("guard.cpp"))
    flags = ["-shared", "-fPIC", "-std=c++20", "-O0", *paths, "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", source, "-o", str(out), *flags], check=True)
    return ctypes.CDLL(str(out))


_guard = _library()
_guard.register_hooks()
import torch  # noqa: E402

torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[assignment]
_guard.register_guard()


class _Generator(torch.Generator):
    """Of random numbers on the device."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    def clone_state(self) -> _Generator:
        return _Generator()

    def graphsafe_get_state(self) -> _Generator:
        return self


_DEVICE = {
    "get_device_properties": lambda device=None: H100,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: H100.name,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "synchronize": lambda device=None: None,
}
_IN_TORCH_CUDA = {
    **_DEVICE,
    "_lazy_init": lambda: None,
    "default_generators": (_Generator(),),
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
}
_IN_INTERFACE = {
    **_DEVICE,
    "is_available": lambda: True,
    "get_compute_capability": lambda device=None: 90,
    "is_triton_capable": lambda device=None: True,
    "raise_if_triton_unavailable": lambda device=None: None,
    "get_raw_stream": lambda index: 0,
    "is_bf16_supported": lambda including_emulation=False: True,
}


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside, Inductor believes in one H100. ``torch.cuda.is_available()`` stays False, so that
    fake tensors keep a guard that does nothing."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.codegen.triton as triton_code
    import torch.utils._triton as triton
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties

    stack = ExitStack()

    def replace(target: type | ModuleType, name: str, value: object) -> None:
        if hasattr(target, name):  # of some releases
            stack.enter_context(mock.patch.object(target, name, value))

    for name, value in _IN_TORCH_CUDA.items():
        replace(torch.cuda, name, value)
    for name, function in _IN_INTERFACE.items():
        replace(interfaces.CudaInterface, name, staticmethod(function))
        replace(interfaces.CudaInterface.Worker, name, staticmethod(function))
    for module in (triton, scheduler, compile_fx):
        replace(module, "has_triton", lambda *_, **__: True)
    for module in (triton, triton_code):
        replace(module, "triton_hash_with_backend", lambda: "not there")
    replace(triton, "triton_backend", lambda: None)
    replace(compile_fx, "get_cuda_device_context", lambda graph: nullcontext())
    replace(triton_helpers, "set_driver_to_gpu", lambda: None)
    if hasattr(DeviceProperties.create, "cache_clear"):
        DeviceProperties.create.cache_clear()
    with stack:
        yield


class NotRun(Exception):
    """Raised where generated code would be called."""


class _NeverRun:
    """Stands for a module of generated code, and for what calls its partitions."""

    __file__ = __file__

    def __init__(self, written: Written) -> None:
        self.written = written
        self.partitions: list[object] = []  # which torch deletes

    @property
    def runner(self) -> _NeverRun:
        return self

    def call(self, *_: object, **__: object) -> None:
        raise NotRun

    def recursively_apply_fns(self, functions: list[Any]) -> None:
        """Where a CUDA graph would be made of each partition."""
        for function in functions:
            given = function.keywords
            inputs, static = len(given["placeholders"]), len(given["static_input_idxs"])
            self.written.copied.append(inputs - static)


@dataclass
class Written:
    """What Inductor made.

    Attributes:
        codes: of each graph that was lowered.
        copied: of each CUDA graph, how many inputs are copied before it is launched.
    """

    codes: list[str] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


@contextmanager
def written() -> Iterator[Written]:
    """The code of the graphs that are lowered inside; it is neither compiled nor run."""
    from torch._inductor.graph import GraphLowering

    found = Written()

    def compile_to_module(self: GraphLowering) -> _NeverRun:
        code, _ = self.codegen()
        found.codes.append(str(getattr(code, "value", code)))
        return _NeverRun(found)

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield found
