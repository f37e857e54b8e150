"""How often Dynamo compiles a function, and which functions it has given up on.

Once a function has reached Dynamo's recompile limit, it runs eagerly whenever no code that was
compiled for it matches. Each rank counts for itself.
"""

import functools
import sys
from types import CodeType, FrameType
from typing import Any

import torch._dynamo
from torch import nn
from torch._dynamo import convert_frame, eval_frame
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals

from simplefsdp._torch.dynamo import is_backend

_UNCOMPILED = ("force_eager", "eager_on_recompile", "eager_then_compile")
"""Stances (``torch.compiler.set_stance``) in which what was compiled may run as it is."""

_given_up: set[CodeType] = set()


@functools.cache
def watch_recompiling(at_least: int) -> None:
    """Raise Dynamo's recompile limit to ``at_least``, unless the user has set it; and note the
    functions that Dynamo gives up on."""
    config: Any = torch._dynamo.config
    if config._is_default("recompile_limit") and config.recompile_limit < at_least:
        config.recompile_limit = at_least
    original = convert_frame.exceeds_recompile_limit  # type: ignore[attr-defined]

    @functools.wraps(original)
    def exceeds(*args: Any) -> Any:
        exceeded, limit = original(*args)
        if exceeded:
            _given_up.add(sys._getframe(1).f_locals["code"])
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = exceeds  # type: ignore[assignment,attr-defined]


def forget_given_up() -> None:
    """Forget the noted functions, when Dynamo is reset and compiles all functions again."""
    _given_up.clear()


def given_up_on() -> str:
    """The outermost function on the caller's stack that Dynamo has given up on, for messages; empty
    if there is none. That is the usual case, in which the stack is not walked."""
    found = ""
    frame: FrameType | None = sys._getframe(1) if _given_up else None
    while frame is not None:
        if frame.f_code in _given_up:
            owner = frame.f_locals.get("self")
            of_module = isinstance(owner, nn.Module)
            found = type(owner).__name__ if of_module else frame.f_code.co_qualname
        frame = frame.f_back
    return found


def told_to_run_uncompiled(backend: str) -> str:
    """What the user has set on this rank, by which Dynamo runs the function that the caller is in,
    and that is compiled by the backend of that name, uncompiled; for messages. Empty if nothing is
    set, or if the caller is in no such function."""
    told = ""
    if (stance := eval_frame._stance.stance) in _UNCOMPILED:
        told = f"torch.compiler.set_stance({stance!r}) is in effect"
    elif is_in_any_mode_without_ignore_compile_internals():
        told = "a TorchDispatchMode is active, such as FlopCounterMode"
    return told if told and _in_function_compiled_by(backend) else ""


def _in_function_compiled_by(backend: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__:
            if frame.f_code.co_name == "compile_wrapper":
                return is_backend(frame.f_locals["callback"], backend)
            if frame.f_code.co_name == "_fn":  # of torch.compiler.disable
                return False
        frame = frame.f_back
    return False
