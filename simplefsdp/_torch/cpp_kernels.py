"""The C++ kernels of a graph, compiled by few calls of g++: at most one for each thread.

Inductor calls g++ once per kernel. Four fifths of such a call are spent on a header of 160 MB and
on linking: 13 s for the 24 kernels of a small Llama, but 2 s if they are compiled together. A
generated module asks for its kernels while it is loaded, and waits for them at its end. Inside
:func:`kernels_together` it gets stand-ins instead. These are replaced by functions of a shared
library when all modules of the graph are loaded (``executor="regions"`` has one module per region).
Inside :func:`compiled_beside`, g++ compiles a forward's kernels while Inductor lowers its backward.

A library has one function, whose first argument selects the kernel. It has as many pointer
parameters as the kernel with most; a kernel with fewer takes its arguments from the last ones::

    void kernel(int64_t which, void* p0, void* p1, void* p2) {
        switch (which) {
            case 0: kernel_0((const float*) p0, (const float*) p1, (float*) p2); break;
            case 1: kernel_1((float*) p2); break;
        }
    }
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from threading import RLock
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

_log = logging.getLogger(__name__)
_FEW = 8  # kernels that take g++ about as long as the fixed cost of a call: not worth dividing
Function = Callable[..., None]

# Nothing but comments, directives and one function, so that it can stand beside others.
_KERNEL = re.compile(
    r"(?P<before>(?:\s|//[^\n]*\n|#[^\n]*\n)*)"
    r'extern\s+"C"\s+void\s+kernel(?P<after>\(.*)',
    re.DOTALL,
)


@dataclass(eq=False)
class _StandIn:
    """Stands for a kernel that modules asked for, until it is compiled."""

    argtypes: tuple[str, ...]  # C++ types of its arguments
    source: str  # C++, one function named ``kernel``
    asked: _Asked  # all kernels of the same graph; this one is among them
    # Where it stands: the dictionary of each module, and its name in that.
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    function: Function | None = None  # None until it is compiled

    def be(self, function: Function) -> None:
        """Put the compiled ``function`` in the place of this stand-in in all modules."""
        self.function = function
        for scope, name in self.places:
            scope[name] = function

    def __call__(self, *args: Any) -> None:
        """Finish compiling and call the kernel, for a module that runs before the compilation is
        over, or although it failed."""
        if self.function is None:
            self.asked.finish()
        cast(Function, self.function)(*args)

    def put(self, scope: dict[str, Any], name: str) -> None:
        """Note that a module has this stand-in under ``name``; if the kernel is compiled already,
        put its function there at once."""
        self.places.append((scope, name))
        if self.function is not None:
            self.be(self.function)


@dataclass(eq=False)
class _Asked:
    """The kernels that a graph asked for, each source once."""

    kernels: dict[tuple[tuple[str, ...], str], _StandIn] = field(default_factory=dict)
    begun: list[Callable[[], None]] = field(default_factory=list)  # each waits for a call of g++
    lock: Any = field(default_factory=RLock)

    def kernel(self, argtypes: Sequence[str], source: str) -> _StandIn:
        """The stand-in of a kernel; one for all modules that ask for the same source."""
        key = tuple(argtypes), source
        return self.kernels.setdefault(key, _StandIn(*key, self))

    def begin(self) -> None:
        """Start g++ for the kernels that are not compiled yet; in the background if Inductor has
        more than one compile thread."""
        self.begun += _begin([k for k in [*self.kernels.values()] if k.function is None])

    def finish(self) -> None:
        """Wait for g++, and put the compiled functions into the modules."""
        with self.lock:
            if not self.begun:
                self.begin()
            while self.begun:
                self.begun.pop()()


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)
_beside: ContextVar[list[_Asked] | None] = ContextVar("beside", default=None)


@contextmanager
def kernels_together() -> Iterator[None]:
    """Inside, Inductor modules that this thread loads get stand-ins for their kernels. At the end
    all kernels are compiled; or, inside :func:`compiled_beside`, g++ has been started for all."""
    _give_stand_ins()
    asked, beside = _Asked(), _beside.get()
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)
    if beside is None:
        asked.finish()
    else:
        asked.begin()
        beside.append(asked)


@contextmanager
def compiled_beside() -> Iterator[None]:
    """Inside, nothing waits for the kernels of a graph; at the end those of all graphs are
    compiled."""
    graphs: list[_Asked] = []
    token = _beside.set(graphs)
    try:
        yield
    finally:
        _beside.reset(token)
    for asked in graphs:
        asked.finish()


@cache
def _give_stand_ins() -> None:
    """Patch Inductor, once for all threads. Modules that are loaded outside of
    :func:`kernels_together` get torch's own kernels."""
    from torch._inductor.async_compile import AsyncCompile, kernel_code_log

    ask_torch, wait_for_torch = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        asked = _asked.get()
        if asked is None or not _can_be_joined(argtypes, source_code):
            return ask_torch(self, argtypes, source_code)
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        return asked.kernel(argtypes, source_code)

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        wait_for_torch(self, scope)
        for name, value in scope.items():
            if isinstance(value, _StandIn):
                value.put(scope, name)

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    AsyncCompile.wait = wait  # type: ignore[method-assign]


def _can_be_joined(argtypes: Sequence[str], source: str) -> bool:
    """Whether a source consists of one function, all of whose arguments are pointers."""
    found = _KERNEL.fullmatch(source)
    if found is None or not all(argtype.endswith("*") for argtype in argtypes):
        return False
    return _is_one_block(found["after"])


def _is_one_block(source: str) -> bool:
    """Whether the first brace is closed at the very end."""
    depth = 0
    for brace in re.finditer(r"[{}]", source):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return not source[brace.end() :].strip()
    return False


def _begin(kernels: Sequence[_StandIn]) -> list[Callable[[], None]]:
    """Start the calls of g++; gives one function for each call, which waits for it."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    threads = get_compile_threads()
    submit = AsyncCompile.submit if threads > 1 else None
    load = partial(CppPythonBindingsCodeCache.load_pybinding_async, submit_fn=submit)
    return [partial(_finish, part, load(*_joined(part))) for part in _in_parts(kernels, threads)]


def _finish(kernels: Sequence[_StandIn], load: Callable[[], Function]) -> None:
    """Replace the stand-ins of a library's kernels by its functions. ``load`` waits for g++ and
    gives the library; if it raises CppCompileError, the kernels are compiled one by one."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.exc import CppCompileError

    try:
        functions = _functions(load(), kernels)
    except CppCompileError:
        _log.debug("kernels are compiled one by one", exc_info=True)
        functions = [
            CppPythonBindingsCodeCache.load_pybinding(list(kernel.argtypes), kernel.source)
            for kernel in kernels
        ]
    for kernel, function in zip(kernels, functions, strict=True):
        kernel.be(function)


def _in_parts(kernels: Sequence[_StandIn], most: int) -> list[list[_StandIn]]:
    """Divide kernels into up to ``most`` parts that take about equally long to compile. The
    division is the same in every process, so that the cache finds the libraries again."""
    parts: list[list[_StandIn]] = [[] for _ in range(min(max(most, 1), -(-len(kernels) // _FEW)))]
    for kernel in sorted(kernels, key=lambda kernel: -len(kernel.source)):
        min(parts, key=lambda part: sum(len(k.source) for k in part)).append(kernel)
    return parts


def _joined(kernels: Sequence[_StandIn]) -> tuple[list[str], str]:
    """The argument types, and the source, of the library of ``kernels``."""
    most = max(len(kernel.argtypes) for kernel in kernels)
    sources, cases = [], []
    for i, kernel in enumerate(kernels):
        sources.append(_KERNEL.sub(rf"\g<before>static void kernel_{i}\g<after>", kernel.source))
        first = most - len(kernel.argtypes)
        args = ", ".join(f"({argtype}) p{first + j}" for j, argtype in enumerate(kernel.argtypes))
        cases.append(f"case {i}: kernel_{i}({args}); break;")
    parameters = ", ".join(["int64_t which", *(f"void* p{j}" for j in range(most))])
    choice = "\n".join(["switch (which) {", *cases, "}"])
    body = f'extern "C" void kernel({parameters})\n{{\n{choice}\n}}\n'
    return ["int64_t", *["void*"] * most], "\n".join([*sources, body])


def _functions(library: Function, kernels: Sequence[_StandIn]) -> list[Function]:
    """For each kernel of a library, a function with the kernel's own arguments."""
    most = max(len(kernel.argtypes) for kernel in kernels)
    with _disable_current_modes():  # a fake tensor would have no address
        unused = torch.empty(0, device="cpu")
    return [
        partial(library, i, *[unused] * (most - len(kernel.argtypes)))
        for i, kernel in enumerate(kernels)
    ]
