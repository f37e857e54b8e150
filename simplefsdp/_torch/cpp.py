"""What Inductor does once per machine before its first C++ kernel, begun while a graph is traced.

Inductor tries which vector instructions g++ supports, and precompiles the header of all kernels.
That takes 6 s of g++ on a new machine (10 s if each instruction set is tried), and 0.2 s of looking
up on a known one; without this file, the model waits for it just before its code is generated.

To choose an instruction set, torch compiles and loads a test program, 2 s of g++, for each set that
the processor has, and takes the widest. A kernel with the widest set has to be compiled anyway for
the header, and tells as much: if it compiles and loads, the other sets need not be tried. If it
does not, torch tries each of them, as usual.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import sys
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import islice
from threading import Event, Thread, get_ident
from typing import Any

from torch._inductor import config, cpu_vec_isa

_log = logging.getLogger(__name__)
_AT_MOST_S = 30

KERNEL = """
extern "C" void kernel(float* out) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    at::vec::Vectorized<float>(1).exp().store(out);
#endif
}
"""
"""Like torch's test program: it needs the vector headers, and a symbol from torch's libraries."""


@functools.cache
def prepare_cpp() -> Thread:
    """Begin the preparation in a thread; once per process. Inductor later uses the results, and
    waits for unfinished ones by the locks of its cache. What fails here fails there again, and is
    reported there.

    At exit the interpreter waits for this thread: a compiler that is left running may be killed,
    and would leave half a header.
    """
    # Imported before the thread starts: two threads that import at once see half-made modules.
    import torch.utils.cpp_extension
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    load = CppPythonBindingsCodeCache.load_pybinding
    # load_pybinding sets this variable to this value. It is set here already, because adding a new
    # variable in the thread would move the environment while C code of other threads reads it.
    guards: Any = torch._C._dynamo.guards
    tensor_data_ptr = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(tensor_data_ptr)

    def prepare() -> None:
        try:
            pick_by_kernel(partial(load, ["float*"], KERNEL))
        except Exception:
            _log.debug("C++ kernels were not prepared", exc_info=True)

    # The user's settings of Inductor live in the context. With other settings the thread would
    # prepare the wrong thing, and torch would remember it.
    thread = Thread(target=copy_context().run, args=(prepare,), name="simplefsdp-cpp")
    thread.start()
    return thread


def let_compiler_finish() -> None:
    """Wait for the thread of :func:`prepare_cpp`, up to 30 s, in a process that is about to exit
    without waiting for threads."""
    if prepare_cpp.cache_info().currsize:
        prepare_cpp().join(_AT_MOST_S)


def pick_by_kernel(compile_kernel: Callable[[], object]) -> None:
    """Have Inductor take the widest instruction set if ``compile_kernel``, which compiles and loads
    :data:`KERNEL` as Inductor does, succeeds with it. Other threads that ask Inductor for
    instruction sets meanwhile wait for the answer."""
    choices = _none_or_widest()
    if choices is None:
        cpu_vec_isa.pick_vec_isa()
        compile_kernel()
        return
    known, here, original = Event(), get_ident(), cpu_vec_isa.valid_vec_isa_list
    failed: list[bool] = []
    wanted = _wanted()

    def valid_vec_isa_list() -> list[Any]:
        if get_ident() != here:
            known.wait()
        return original() if failed or _wanted() != wanted else list(choices)

    valid_vec_isa_list.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]
    try:
        compile_kernel()
    except BaseException:
        failed.append(True)
        for isa in choices:
            _forget(isa)
        raise
    else:
        for isa in choices:
            _remember_that_it_compiles(isa)
    finally:
        known.set()


def _wanted() -> tuple[object, ...]:
    """The user's settings that choose instruction sets."""
    return config.cpp.simdlen, config.cpp.vec_isa_ok, os.getenv("ATEN_CPU_CAPABILITY")


def _none_or_widest() -> list[Any] | None:
    """The widest instruction set that the processor has, as a list of one; an empty list if it has
    none or the user wants none; None if the user chose a set, or if the widest is not known."""
    *chosen, capability = _wanted()
    is_x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_x86 or chosen != [None, None] or not _is_of_context(config):
        return None
    if capability:
        return [] if capability == "default" else None
    has = cpu_vec_isa.x86_isa_checker()
    known = (isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(has))
    # With this setting bool(isa) compiles no float vectors. It still compiles the programs for
    # further features of the set, such as AMX, which have a few lines each.
    with config.patch({"cpp.vec_isa_ok": True}):
        return list(islice(filter(bool, known), 1))


def _is_of_context(config: Any) -> bool:
    """Whether ``config.patch`` holds in the current context only, as since torch 2.13. Before that,
    other threads would see the patched setting."""
    entry = config._config["cpp.vec_isa_ok"]
    return isinstance(getattr(entry, "user_override", None), ContextVar)


def _remember_that_it_compiles(isa: Any) -> None:
    """Cache in ``isa`` that it compiles: Inductor may also call ``bool(isa)`` directly, which would
    otherwise compile the test program after all, for AVX2."""
    isa.check_build = lambda code: True
    try:
        bool(isa)
    finally:
        del isa.check_build


def _forget(isa: Any) -> None:
    for cls in type(isa).__mro__:
        if clear := getattr(vars(cls).get("__bool__"), "cache_clear", None):
            clear()
