"""What Inductor does once per machine before its first C++ kernel, begun while a graph is traced.

It tries which vector instructions the compiler knows, and compiles the header of all kernels: 6 s
of g++ on a new machine (10 if each set of instructions is tried, see ``instructions.py``), 0.2 s of
looking on a known one, and the model waits for it just before its code is generated.
"""

from __future__ import annotations

import functools
import logging
import os
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import Any

from simplefsdp._torch.instructions import KERNEL, pick_by_kernel

_log = logging.getLogger(__name__)
_AT_MOST_S = 30


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
