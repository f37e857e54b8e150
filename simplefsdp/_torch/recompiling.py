"""How often Dynamo compiles a function, and which ones it has given up on.

A function that was compiled as often as it may runs as it is from there on, where no code that
there is serves. Dynamo counts on each rank for itself.
"""

import functools
import sys
from types import CodeType, FrameType
from typing import Any

import torch._dynamo
from torch import nn
from torch._dynamo import convert_frame

_given_up: set[CodeType] = set()


@functools.cache
def watch_recompiling(at_least: int) -> None:
    """Have Dynamo compile each function so often, unless somebody has said how often; and note
    those that it gives up on."""
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
    """Dynamo compiles all functions again."""
    _given_up.clear()


def given_up_on() -> str:
    """The outermost function that the caller runs in and that Dynamo has given up on, for messages;
    empty if there is none, as mostly, which takes no time then."""
    found = ""
    frame: FrameType | None = sys._getframe(1) if _given_up else None
    while frame is not None:
        if frame.f_code in _given_up:
            owner = frame.f_locals.get("self")
            of_module = isinstance(owner, nn.Module)
            found = type(owner).__name__ if of_module else frame.f_code.co_qualname
        frame = frame.f_back
    return found
