"""transformers' models that drop layers at random (LayerDrop) keep them where ranks share a model.

Each rank draws for itself which layers it drops, and those that drop other layers would wait in
each other's gathers. Such models ask ``is_fsdp_managed_module``, and under FSDP2 drop none. It
looks for a mark of FSDP2's, by which Dynamo would guard less; so they ask here first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from simplefsdp.rank_logging import say

_QUESTION = "is_fsdp_managed_module"
_KEEPS = "_simple_fsdp_keeps_layers"  # on a wrapped module that asks, and on what it then asks


def keep_layers(module: nn.Module) -> None:
    """Have a module that is wrapped drop no layers, if its forward asks the question."""
    names = _globals_of(type(module).forward)
    asked: Any = names.get(_QUESTION)
    if not str(getattr(asked, "__module__", "")).startswith("transformers."):
        return
    module.__dict__[_KEEPS] = True
    if not hasattr(asked, _KEEPS):
        names[_QUESTION] = _asking_here_first(asked)
    if getattr(getattr(module, "config", None), "layerdrop", 0):
        say(
            "%s: layerdrop drops no layer of a sharded model, as under FSDP2", type(module).__name__
        )


def _globals_of(forward: Any) -> dict[str, Any]:
    """Those of a function that reads the question among them; none of others."""
    function = inspect.unwrap(forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return function.__globals__ if _QUESTION in names else {}


def _asking_here_first(asked: Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    @functools.wraps(asked)
    def is_fsdp_managed_module(module: nn.Module) -> bool:
        return getattr(module, _KEEPS, False) or asked(module)

    setattr(is_fsdp_managed_module, _KEEPS, True)
    return is_fsdp_managed_module
