"""Which vector instructions Inductor's C++ kernels may use, found out by one compilation.

Torch compiles, loads and forgets a program of 2 s of g++ for each set of instructions that the
processor has, before it takes the widest. A kernel with the widest set, which has to be compiled
anyway (``cpp.py``), tells as much: where it compiles and loads, the others need not be asked. Where
it does not, torch asks for each of them, as ever.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextvars import ContextVar
from itertools import islice
from threading import Event, get_ident
from typing import Any

KERNEL = """
extern "C" void kernel(float* out) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    at::vec::Vectorized<float>(1).exp().store(out);
#endif
}
"""
"""As torch's: it needs the headers of vectors, and a symbol of theirs from torch's libraries."""


def pick_by_kernel(compile_kernel: Callable[[], object]) -> None:
    """Have Inductor take the widest instructions if ``compile_kernel`` succeeds with them.

    Others who ask meanwhile wait.

    Args:
        compile_kernel: compiles :data:`KERNEL` as Inductor compiles kernels, and loads it.
    """
    from torch._inductor import cpu_vec_isa

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
    finally:
        known.set()


def _wanted() -> tuple[object, ...]:
    """What the user says of instructions."""
    from torch._inductor import config

    return config.cpp.simdlen, config.cpp.vec_isa_ok, os.getenv("ATEN_CPU_CAPABILITY")


def _none_or_widest() -> list[Any] | None:
    """The widest instructions that the processor has, if it has some, and the user wants them.

    None if the user chose others, or nobody can say.
    """
    from torch._inductor import config, cpu_vec_isa

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


def _forget(isa: Any) -> None:
    for cls in type(isa).__mro__:
        if clear := getattr(vars(cls).get("__bool__"), "cache_clear", None):
            clear()
