"""Saves the compiled code of a Dynamo graph as bytes that another process can load and run.

Torch's AOTAutogradCache makes an entry for compiled code: the wrappers around forward and backward,
and how to find the code of both. We take that entry from it, but do not use it as a cache: its keys
do not cover what our passes read, and it does not consider other ranks. We put the code itself into
the entry. Device meshes in it are replaced, on loading, by those of the process that loads it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import logging
import operator
import pickle
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import cpu_vec_isa
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from inductor_passes.adapters._torch_code import (
    codes_in,
    is_kept_code,
    revive,
    run_below_autograd,
    without_callables,
)
from simplefsdp._torch.cpp_kernels import kernels_together
from simplefsdp._torch.processes import in_backward

log = logging.getLogger("simplefsdp")

Keep = Callable[[Any], None]


def can_save_code() -> bool:
    """Whether this torch has all that is needed. Up to 2.14 it makes entries in another way."""
    return torch.__version__ >= "2.15"


class _Key(str):
    """A key for AOTAutogradCache under which nothing is stored: the entry goes to ``keep``."""

    keep: Keep


_wanted: ContextVar[list[Keep] | None] = ContextVar("wanted", default=None)


@contextmanager
def giving_entry(keep: Keep | None) -> Iterator[None]:
    """Inside, the next graph that AOTAutograd compiles is not looked up in its cache, and ``keep``
    gets its entry once forward and backward are compiled, which may be after this context has
    ended. ``keep`` is never called if Inductor has no cache key for the graph."""
    if keep is not None:
        _give_entries()
    token = _wanted.set([keep] if keep is not None else None)
    try:
        with functorch_config.patch(enable_autograd_cache=keep is not None):
            yield
    finally:
        _wanted.reset(token)


@contextmanager
def backward_compiled_at_once() -> Iterator[None]:
    """Inside, a backward graph is compiled with its forward, not when it first runs. Its code does
    not overwrite tensors that the forward saved, as ``backward(retain_graph=True)`` may need them
    again, which is not known yet."""
    from torch._functorch._aot_autograd import graph_compile

    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: []),
    ):
        yield


class BackwardLaterError(Exception):
    """Raised by a backward compiler to postpone its work. Where sizes are symbolic, AOTAutograd
    calls it together with the forward's; if it fails, it is called again when the backward first
    runs."""

    def __str__(self) -> str:
        return "the backward is compiled when it first runs"


def may_be_compiled_later() -> bool:
    """Whether AOTAutograd, which has called a backward compiler, would call it again later."""
    return not in_backward() and not functorch_config.force_non_lazy_backward_lowering


@functools.cache
def expect_backward_later() -> None:
    """Keep AOTAutograd from logging a warning about a BackwardLaterError."""

    def wanted(record: logging.LogRecord) -> bool:
        raised = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(raised, BackwardLaterError)

    logging.getLogger("torch._functorch._aot_autograd.graph_compile").addFilter(wanted)


@functools.cache
def _give_entries() -> None:
    """Patch AOTAutogradCache, once for all threads. Outside of :func:`giving_entry` it works as
    before."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo

    cache = autograd_cache.AOTAutogradCache
    load, save = cache.try_load, cache.save

    def try_load(mod: Any, args: Any, aot_config: Any, *rest: Any, **options: Any) -> Any:
        wanted = _wanted.get()
        if wanted is None:
            return load(mod, args, aot_config, *rest, **options)
        if not wanted:  # a graph inside of ours
            return None, aot_config
        key = _Key("simplefsdp")
        key.keep = wanted.pop()
        info = AOTAutogradCacheInfo(key, time.time_ns(), forward_symints=[])
        return None, dataclasses.replace(aot_config, cache_info=info)

    def save_or_give(key: str, entry: Any, remote: bool) -> None:
        if not isinstance(key, _Key):
            return save(key, entry, remote)
        try:
            key.keep(entry)
        except Exception as error:  # saved code only saves time, so a failure is no error
            log.debug("compiled code is not kept: %r", error)

    cache.try_load = staticmethod(try_load)  # type: ignore[method-assign,assignment]
    cache.save = staticmethod(save_or_give)  # type: ignore[method-assign,assignment]


def dump_code(entry: Any, codes: Mapping[bool, Any], meshes: Sequence[DeviceMesh]) -> bytes:
    """Pickle an entry that :func:`giving_entry` gave, with the code of the forward (False) and the
    backward (True) graph in it. A mesh is written as its index in ``meshes``. Raises a ValueError
    if the code holds for some inputs only, and other errors if the entry cannot be pickled."""
    backward = entry.compiled_bw
    context = TracingContext.try_get()
    # AOTAutograd may have had Dynamo guard on which inputs are the same tensor.
    has_duplicates = context is not None and bool(context.guards_context.aotautograd_guards)
    if entry.guards_expr or has_duplicates:
        raise ValueError("the code holds for some inputs only")
    whole = copy.copy(entry)
    whole.compiled_fw = _Forward(codes[False])
    whole.serialized_bw_module = None  # compiled autograd then raises, with advice
    if not is_kept_code(codes.get(True)):  # regions write over none of their inputs
        whole.runtime_metadata = copy.copy(entry.runtime_metadata)
        whole.runtime_metadata.bw_donated_idxs = []
    if backward is not None:
        indices, symbols = backward.backward_state_indices, backward.num_symints_saved_for_bw_
        whole.compiled_bw = _Backward(codes[True], indices, symbols)
    file = io.BytesIO()
    _Pickler(file, meshes).dump((_instructions(whole), whole))
    return file.getvalue()


def load_code(content: bytes, meshes: Sequence[DeviceMesh]) -> Callable[..., Any]:
    """The compiled function that :func:`dump_code` saved. ``meshes`` are those of this process, in
    the same order as there. Raises if the bytes are damaged or what they name cannot be loaded."""
    from torch._functorch.aot_autograd import AOT_COUNTER
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    instructions, entry = _Unpickler(io.BytesIO(content), meshes).load()
    if instructions != _instructions(entry):
        raise ValueError(f"it is of a machine with {instructions}")
    aot_config = dataclasses.replace(entry.sanitized_aot_config, aot_id=next(AOT_COUNTER))
    no_cudagraphs = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
    }
    run = entry.wrap_post_compile([], aot_config, no_cudagraphs)
    return lambda *args: run(list(args))


def _instructions(entry: Any) -> str:
    """The processor's vector instruction set, which C++ kernels are made for; "" if no code runs on
    the CPU. This is no part of the key, because it is found out in a thread while Dynamo traces."""
    graphs = [part.code for part in (entry.compiled_fw, entry.compiled_bw) if part is not None]
    if not any("cpu" in code.device_types for graph in graphs for code in codes_in(graph)):
        return ""
    return f"{platform.machine()} {cpu_vec_isa.pick_vec_isa()}"


@dataclasses.dataclass
class _Forward:
    """Holds the code of a graph in an entry, where torch has a lookup key for the code."""

    code: Any
    is_backward = False

    def load(self, example_inputs: Sequence[Any]) -> Any:
        """The code, after loading the modules and kernels that it names."""
        with kernels_together():
            for code in codes_in(self.code):
                revive(code, is_backward=self.is_backward)
        run_below_autograd(self.code)
        return self.code

    def post_compile(self, result: Any, fx_config: Mapping[str, Any]) -> Any:
        """The function that AOTAutograd calls: the code as it is."""
        return result


@dataclasses.dataclass
class _Backward(_Forward):
    backward_state_indices: list[int]
    num_symints_saved_for_bw_: int
    is_backward = True

    def post_compile(self, result: Any, fx_config: Mapping[str, Any]) -> Any:
        """Wrap the code as AOTAutograd does when it has compiled a backward graph."""
        return torch._dynamo.disable(result, reason="do not trace generated backwards pass")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._place = {id(mesh): place for place, mesh in enumerate(meshes)}

    def persistent_id(self, value: Any) -> int | None:
        mesh = getattr(value, "real_obj", value)
        if not isinstance(mesh, DeviceMesh):
            return None
        if id(mesh) not in self._place:
            raise pickle.PicklingError("a mesh that no parameter has")
        return self._place[id(mesh)]

    def reducer_override(self, value: Any) -> Any:
        if is_kept_code(value):
            return _kept_code, (type(value), without_callables(value))
        if isinstance(value, torch._ops.OpOverload):
            return _operator_named, (str(value),)
        if isinstance(value, (GraphModule, torch._subclasses.FakeTensor)):
            raise pickle.PicklingError(f"a {type(value).__name__}")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__(file)
        self._meshes = meshes

    def persistent_load(self, place: int) -> DeviceMesh:
        return self._meshes[place]


def _kept_code(cls: Any, state: dict[str, Any]) -> Any:
    code = cls.__new__(cls)
    vars(code).update(state)
    return code


def _operator_named(name: str) -> Any:
    return operator.attrgetter(name)(torch.ops)
