"""Slices and copies that a forward makes of lists and dicts of parameters.

torch makes a new parameter of each tensor in them that is none, and what a forward reads is none:
it is what was gathered. A gradient would end at the new parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simplefsdp.frontend.reading import in_forward, in_traced_forward
from simplefsdp.frontend.wrapped import is_wrapped


def members(cls: type[nn.Module]) -> dict[str, Any]:
    """Methods for the subclass of ``cls``, if that is a class of lists or dicts of parameters."""
    parent: Any = cls

    def set_in_list(self: Any, index: int, value: Any) -> None:
        if _is_gathered(self, value):
            setattr(self, self._get_abs_string_index(index), value)
        else:
            parent.__setitem__(self, index, value)

    def copy(self: Any) -> Any:
        if not _is_in_forward():
            return parent.copy(self)
        found = _Copy()
        for key in self:
            found[key] = self[key]
        return found

    if issubclass(cls, nn.ParameterList):
        return {"__setitem__": set_in_list}
    return {"copy": copy} if issubclass(cls, nn.ParameterDict) else {}


class _Copy(nn.ParameterDict):
    def __setitem__(self, key: str, value: Any) -> None:
        if _is_gathered(self, value):
            self._keys[key] = None
            setattr(self, self._key_to_attr(key), value)
        else:
            super().__setitem__(key, value)


def _is_gathered(container: nn.Module, value: Any) -> bool:
    return isinstance(value, Tensor) and not is_wrapped(container) and _is_in_forward()


def _is_in_forward() -> bool:
    return in_traced_forward() if torch.compiler.is_compiling() else in_forward()
