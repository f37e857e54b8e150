"""What Inductor does once per machine before its first C++ kernel, begun while a graph is traced.

It tries which vector instructions the compiler knows, and compiles the header of all kernels: 6 s
of g++ on a new machine (10 if each set of instructions is tried), 0.2 s of looking on a known one,
and the model waits for it just before its code is generated.

Torch compiles, loads and forgets a program of 2 s of g++ for each set of instructions that the
processor has, before it takes the widest. A kernel with the widest set, which has to be compiled
anyway for the header, tells as much: where it compiles and loads, the others need not be asked.
Where it does not, torch asks for each of them, as ever.
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
"""As torch's: it needs the headers of vectors, and a symbol of theirs from torch's libraries."""


@functools.cache
def prepare_cpp() -> Thread:
    """Begin, in a thread of its own; once per process. Inductor finds what is done by then, and
    waits for the rest by the locks of its cache; what fails here fails there, and is told.

    The interpreter waits for the thread as it ends: a compiler that is left alone may be killed,
    and its half of a header would stay.
    """
    # Here, since two threads that import torch at once find half of it.
    import torch.utils.cpp_extension
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    load = CppPythonBindingsCodeCache.load_pybinding
    # Loading sets it to that, and a variable that is new moves those that C code reads meanwhile.
    guards: Any = torch._C._dynamo.guards
    tensor_data_ptr = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(tensor_data_ptr)

    def prepare() -> None:
        try:
            pick_by_kernel(partial(load, ["float*"], KERNEL))
        except Exception:
            _log.debug("C++ kernels were not prepared", exc_info=True)

    # The user's settings of Inductor are the context's: with others it would prepare, and torch
    # remember, something else.
    thread = Thread(target=copy_context().run, args=(prepare,), name="simplefsdp-cpp")
    thread.start()
    return thread


def let_compiler_finish() -> None:
    """For a process that is about to leave without its threads."""
    if prepare_cpp.cache_info().currsize:
        prepare_cpp().join(_AT_MOST_S)


def pick_by_kernel(compile_kernel: Callable[[], object]) -> None:
    """Have Inductor take the widest instructions if ``compile_kernel`` succeeds with them, which
    compiles :data:`KERNEL` as Inductor does, and loads it. Others who ask meanwhile wait."""
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
    """What the user says of instructions."""
    return config.cpp.simdlen, config.cpp.vec_isa_ok, os.getenv("ATEN_CPU_CAPABILITY")


def _none_or_widest() -> list[Any] | None:
    """The widest instructions that the processor has, if it has some, and the user wants them; None
    if the user chose others, or nobody can say."""
    *chosen, capability = _wanted()
    is_x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_x86 or chosen != [None, None] or not _is_of_context(config):
        return None
    if capability:
        return [] if capability == "default" else None
    has = cpu_vec_isa.x86_isa_checker()
    known = (isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(has))
    # Asked now, it tries what it has beside vectors of float, each a program of a few lines.
    with config.patch({"cpp.vec_isa_ok": True}):
        return list(islice(filter(bool, known), 1))


def _is_of_context(config: Any) -> bool:
    """Whether a setting is the context's: since torch 2.13. Other threads would see it before."""
    entry = config._config["cpp.vec_isa_ok"]
    return isinstance(getattr(entry, "user_override", None), ContextVar)


def _remember_that_it_compiles(isa: Any) -> None:
    """Where Inductor asks the instructions themselves, AVX2 would try its program after all."""
    isa.check_build = lambda code: True
    try:
        bool(isa)
    finally:
        del isa.check_build


def _forget(isa: Any) -> None:
    for cls in type(isa).__mro__:
        if clear := getattr(vars(cls).get("__bool__"), "cache_clear", None):
            clear()
