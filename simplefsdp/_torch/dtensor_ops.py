"""Handlers for operators on DTensors, which DTensor calls instead of what it would do itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

DTensorOp = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def handle_dtensor_op(op: Callable[..., Any], handler: DTensorOp) -> None:
    """Have DTensor call ``handler(op, args, kwargs)`` for the operator ``op``, unless a handler is
    set already."""
    _dtensor_handlers().setdefault(op, handler)


def default_dtensor_op(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an operator on DTensors without the handler that :func:`handle_dtensor_op` set."""
    handlers = _dtensor_handlers()
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def watch_writes_to_dtensors(written: Callable[[Any], None]) -> None:
    """Have ``written`` called with each DTensor, or list of DTensors, that an operator has written
    to in place. Call this again if other code may have restored the handlers that were there."""
    handlers = _dtensor_handlers()
    for op in _operators_in_place():
        handler: Any = handlers.get(op)
        if getattr(handler, "func", None) is not _write:
            handlers[op] = functools.partial(_write, written, handler)


def _write(
    written: Callable[[Any], None],
    handler: DTensorOp | None,
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    result = (default_dtensor_op if handler is None else handler)(op, args, kwargs)
    written(args[0])
    return result


@functools.cache
def _operators_in_place() -> list[Any]:
    """torch's operators that write to their first argument, including ``torch._foreach_*_`` and the
    fused steps of optimizers."""
    found = []
    for whole in torch._C._dispatch_get_all_op_names():
        name, _, overload = whole.removeprefix("aten::").partition(".")
        if "::" in name or not name.endswith("_") or name.endswith("__"):
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        if op._schema.arguments and op._schema.arguments[0].is_write:
            found.append(op)
    return found


def _dtensor_handlers() -> dict[Any, DTensorOp]:
    return DTensor._op_dispatcher._custom_op_handlers  # type: ignore[return-value]
