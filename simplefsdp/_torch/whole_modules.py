"""``module.compile(backend=...)`` for modules whose classes are torch's own."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_TORCHS = str(Path(torch.__file__).parent) + os.sep


def compile_modules_of_torch_too(backend: str, function: str = "") -> None:
    """Have ``module.compile(backend=backend)`` compile a module of torch's own as one graph.

    Dynamo starts at no function of torch's, so ``nn.Sequential(...).compile()`` runs as it is, and
    the backend never hears of it. ``torch.compile(module)`` puts a function in front, where Dynamo
    starts; so does this, for ``backend`` only. If this is called because the backend is being
    looked up by such a ``compile``, it holds for that one, too. Since 2.15 torch does so itself.

    Args:
        backend: its name.
        function: full name of the function that it is, for who gives that.
    """
    if torch.__version__ >= "2.14":
        return
    original = nn.Module.compile

    def is_meant(given: Any) -> bool:
        if isinstance(given, str):
            return given == backend
        names = (getattr(given, part, "") for part in ("__module__", "__qualname__"))
        return bool(function) and ".".join(map(str, names)) == function

    @functools.wraps(original)
    def compile_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_meant(kwargs.get("backend")) and _is_torchs_own(self):
            self._compiled_call_impl = torch.compile(_in_front(self), *args, **kwargs)

    nn.Module.compile = compile_module  # type: ignore[assignment,method-assign]
    code = original.__code__
    frame = _frame_of(code)
    if frame is not None and is_meant(frame.f_locals["kwargs"].get("backend")):
        module = frame.f_locals["self"]
        if _is_torchs_own(module):
            _put_in_front_once(module, code)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def _frame_of(code: CodeType) -> FrameType | None:
    """The innermost call of ``code`` that is under way."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _is_torchs_own(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS)


def _in_front(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _put_in_front_once(meant: nn.Module, compile_code: CodeType) -> None:
    """Of the ``torch.compile`` that ``compile_code``, under way for ``meant``, calls.

    What is replaced is called at its end. If it raises before, the next ``torch.compile``, be it
    somebody else's, finds the replacement, which then does nothing but take itself away.
    """
    import torch._dynamo

    original = torch._dynamo.optimize
    awaited = weakref.ref(meant)

    def optimize(*args: Any, **kwargs: Any) -> Any:
        if torch._dynamo.optimize is optimize:
            torch._dynamo.optimize = original
        decorate = original(*args, **kwargs)
        caller = _frame_of(compile_code)
        module = awaited()
        if caller is None or module is None or caller.f_locals["self"] is not module:
            return decorate
        in_front = _in_front(module)

        def decorated(function: Any) -> Any:
            is_it = getattr(function, "__self__", None) is module
            return decorate(in_front if is_it else function)

        return decorated

    torch._dynamo.optimize = optimize
