"""Constants compared as code sees them, not as ``==`` does."""

from __future__ import annotations

from types import NoneType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, NoneType)


def exactly(value: Any) -> Any:
    """A value that is equal for two constants only if no code can tell these apart: 1, 1.0 and True
    differ, and so do 0.0 and -0.0. An argument that is no constant is returned unchanged."""
    if type(value) in (tuple, list):
        return type(value), tuple(map(exactly, value))
    return (type(value), repr(value)) if is_plain(value) else value


def is_plain(value: object) -> bool:
    """Whether a value is a constant of Python's own."""
    return type(value) in _PLAIN
