"""Slices and copies of lists and dicts of parameters, as a forward makes them.

torch makes a new parameter of each tensor in them that is none, and what a forward reads is none:
it is what was gathered. A gradient would end at the new parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from simplefsdp.frontend.wrapped import is_wrapped


def members(cls: type[nn.Module]) -> dict[str, Any]:
    """Methods for the subclass of ``cls``, a class of lists or dicts of parameters."""

    set_item: Any = getattr(cls, "__setitem__", None)

    def __setitem__(self: Any, key: Any, value: Any) -> None:
        if not isinstance(value, Tensor) or is_wrapped(self):
            set_item(self, key, value)
        elif isinstance(self, nn.ParameterDict):
            self._keys[key] = None
            setattr(self, self._key_to_attr(key), value)
        else:
            setattr(self, self._get_abs_string_index(key), value)

    def copy(self: Any) -> Any:
        found = type(self)()
        for key in self:
            found[key] = self[key]
        return found

    if issubclass(cls, nn.ParameterDict):
        return {"__setitem__": __setitem__, "copy": copy}
    return {"__setitem__": __setitem__} if issubclass(cls, nn.ParameterList) else {}
