"""What Inductor does once per machine before its first C++ kernel, begun while a graph is traced.

It tries which vector instructions the compiler knows, and compiles the header of all kernels: 10 s
of g++ on a new machine, 1 s of looking on a known one, and the model waits for it just before its
code is generated.
"""

from __future__ import annotations

import functools
import logging
from threading import Thread

_log = logging.getLogger(__name__)
_KERNEL = 'extern "C" void kernel(float* out) { out[0] = 0.0f; }'


@functools.cache
def prepare_cpp() -> Thread:
    """Begin, in a thread of its own; once per process. Inductor finds what is done by then, and
    waits for the rest by the locks of its cache; what fails here fails there, and is told."""
    thread = Thread(target=_prepare, name="simplefsdp-prepare-cpp", daemon=True)
    thread.start()
    return thread


def _prepare() -> None:
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()
        CppPythonBindingsCodeCache.load_pybinding(["float*"], _KERNEL)
    except Exception:
        _log.debug("C++ kernels were not prepared", exc_info=True)
