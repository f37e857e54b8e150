"""What the keys of Inductor's caches say about the machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch.fx import GraphModule

from inductor_passes.adapters.loops import tensors_of

_by_version: ContextVar[bool] = ContextVar("by_version", default=False)


@contextmanager
def triton_by_version(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, cache keys hold the version of Triton instead of a hash of its files, if the graph
    and its inputs are on the CPU, where Triton makes no code. The hash takes each process half a
    second."""
    _ask_here()
    all_on_cpu = _devices(gm, example_inputs) == {"cpu"} and config.cpu_backend != "triton"
    token = _by_version.set(all_on_cpu)
    try:
        yield
    finally:
        _by_version.reset(token)


def _devices(gm: GraphModule, example_inputs: Sequence[Any]) -> set[str]:
    found = {value.device.type for value in example_inputs if isinstance(value, Tensor)}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            value = node.meta.get("val", node.meta.get("example_value"))
            found.update(tensor.device.type for tensor in tensors_of(value))
            device = node.kwargs.get("device")
            if device is not None and not isinstance(device, torch.fx.Node):
                found.add(torch.device(device).type)
    return found


@functools.cache
def _ask_here() -> None:
    """Patch torch's ``get_system``, once for all threads. Its own answer is computed once per
    process, and must stay complete for a later compilation for a GPU."""
    from torch._inductor.codecache import CacheBase

    own = CacheBase.get_system

    def get_system() -> Any:
        return _system() if _by_version.get() else own()

    get_system.cache_clear = own.cache_clear  # type: ignore[attr-defined]
    CacheBase.get_system = staticmethod(get_system)  # type: ignore[method-assign,assignment]


@functools.cache
def _system() -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {"version": {"triton": triton}, "hash": f"cpu-triton-{triton}"}
