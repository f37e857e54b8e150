"""Where a parameter is read decides what the reader gets.

::

    in a forward of a wrapped module, compiled or eager      the full parameter, gathered
    in an initialiser (``reset_parameters``, ``apply``, ..)   the full parameter, written back
    anywhere else                                            the sharded DTensor itself, as FSDP2

So ``module.weight`` in a training script is the parameter that the optimizer has: its ``.grad`` is
the gradient's shard, what is written to it stays, and reading it sends nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from simplefsdp._torch import in_backward, no_torch_function, run_as_it_is
from simplefsdp.wrapped import is_wrapped

Forward = Callable[..., Any]


def marked(cls: type[nn.Module], name: str = "forward") -> Forward:
    """The method ``name`` of ``cls``, so that :func:`in_forward` finds it on the stack.

    It is looked up at each call, so that a later ``cls.forward = ...`` takes effect.
    """

    @functools.wraps(getattr(cls, name))
    def forward_of_wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(cls, name)(self, *args, **kwargs)

    return forward_of_wrapped


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let the method ``name`` of a wrapped module compute with gathered parameters, as forward.

    For a model that is also called by another name: ``model.encode_text(x)``. As FSDP2's
    ``register_fsdp_forward_method``. Methods that call ``self(...)``, such as ``generate``, or only
    submodules, need it not.

    Args:
        module: wrapped by :func:`simplefsdp.simple_fsdp`, itself or as a part of a model.
        name: of a method that computes.

    Raises:
        ValueError: ``module`` is not wrapped, or has no such method.
    """
    if not is_wrapped(module):
        raise ValueError(
            f"module: expected a module wrapped by simple_fsdp, got {type(module).__name__}"
        )
    cls = type(module)
    if not callable(getattr(cls, name, None)):
        raise ValueError(f"name: {cls.__name__} has no method {name!r}")
    module.__dict__[name] = MethodType(marked(cls, name), module)


def in_forward() -> bool:
    """Whether the caller runs inside a marked forward, or inside a backward, which may recompute
    a part of one.

    Looks at the stack: a counter would be wrong in what runs eagerly after a graph break, where
    the frames of the forward stand on the stack, but their code was replaced by the compiler's.
    """
    if in_backward():
        return True
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        code = caller.f_code
        if code.co_name == "forward_of_wrapped" and code.co_filename == __file__:
            return True
        frame = caller
    return False


class ReadOnlyParameter(Tensor):
    """A gathered parameter in an eager forward: what is written to it would be lost, so it raises.

    Views of it are read-only, too. Compiled code never sees this class.
    """

    _fqn: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with no_torch_function():
            if getattr(func, "__name__", "") == "__set__" and isinstance(args[0], cls):
                _refuse_write(args[0]._fqn, f"assigning to .{func.__self__.__name__}")
            held = [a for a in _flat((args, kwargs or {})) if isinstance(a, ReadOnlyParameter)]
            versions = [tensor._version for tensor in held]
            result = func(*args, **(kwargs or {}))
            for tensor, version in zip(held, versions, strict=True):
                if tensor._version != version:
                    _refuse_write(tensor._fqn, f"{getattr(func, '__name__', func)}()")
            return _still_read_only(result, held)


run_as_it_is(ReadOnlyParameter.__torch_function__)


def read_only(full: Tensor, fqn: str) -> Tensor:
    """``full``, the gathered parameter ``fqn``, such that a write to it raises."""
    made: ReadOnlyParameter = full.as_subclass(ReadOnlyParameter)
    made._fqn = fqn
    return made


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _still_read_only(result: Any, held: list[ReadOnlyParameter]) -> Any:
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(_still_read_only(item, held) for item in result)
    if type(result) is Tensor:
        for tensor in held:
            if _same_storage(result, tensor):
                return read_only(result, tensor._fqn)
    return result


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def _refuse_write(fqn: str, write: str) -> None:
    raise ValueError(
        f"{fqn}: {write} in forward changed the gathered copy, not the parameter, so that what it "
        "wrote would be lost; update parameters outside of forward, or inside "
        "`with simplefsdp.unsharded(model):`"
    )
