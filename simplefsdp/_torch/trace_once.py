"""Has Dynamo check, at each call of a layer, whether it is like a call that it has traced.

See ``repeated_calls.py`` for the idea, and ``traced_calls.py`` for the comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from simplefsdp._torch.dynamo import backends_in
from simplefsdp._torch.repeated_calls import INSIDE, REFUSED, REPEATED, kind_of


def trace_repeated_calls_once(backend: Callable[..., Any]) -> None:
    """Have Dynamo trace, of the modules that are marked ``REPEATED`` and alike, only one; if this
    torch can. It does so for ``backend``, which must first call :func:`inline_repeated_calls`."""
    if can_trace_once():
        backend.inlines_repeated_calls = True  # type: ignore[attr-defined]
        _patch()


def can_trace_once() -> bool:
    """Whether this torch can reuse a traced call in a graph, and tells differing calls apart. 2.12
    and 2.13 have the parts, but fail; 2.14 takes layers to be alike that differ in -0.0 and 0.0."""
    return torch.__version__ >= "2.15"


@functools.cache
def _patch() -> None:
    from simplefsdp._torch.traced_calls import called

    original = UnspecializedNNModuleVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if REPEATED in self.value.__dict__ and _can_be_called(self, tx):
            return called(self, tx, args, kwargs)
        return original(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]


def _can_be_called(layer: Any, tx: Any) -> bool:
    output = tx.output
    return (
        not output.export
        and INSIDE not in output.__dict__
        and layer.source is not None
        and kind_of(layer.value) not in REFUSED
        and any(hasattr(x, "inlines_repeated_calls") for x in backends_in(output.compiler_fn))
    )
