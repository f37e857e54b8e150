"""Where a parameter is read decides what the reader gets.

::

    in a forward of a wrapped module, compiled or eager      the full parameter, gathered
    in an initialiser (``reset_parameters``, ``apply``, ..)   the full parameter, written back
    anywhere else                                            the sharded DTensor itself, as FSDP2

So ``module.weight`` in a training script is the parameter that the optimizer has: its ``.grad`` is
the gradient's shard, what is written to it stays, and reading it sends nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from simplefsdp import _torch
from simplefsdp.frontend.eager_guard import number_of_forward
from simplefsdp.frontend.placement import share_memory

Forward = Callable[..., Any]
# Begins the names of marked forwards, which are found on the stack by it. No function that is
# written in Python has such a name.
_MARK = "forward of wrapped "
_OWN = "_simple_fsdp_own_forward"  # with a number, on a module: a forward that was set on it


def plain_method(cls: type[nn.Module], name: str) -> Callable[[], Forward]:
    """A function that gives the method ``name`` of ``cls``. It looks the method up at each call, so
    that a later ``cls.forward = ...`` takes effect."""
    fixed = _fixed(cls, name)
    return lambda: getattr(cls, name) if fixed is None else fixed


def _fixed(cls: type[nn.Module], name: str) -> Forward | None:
    """The method ``name``, if ``cls`` is allowed in Dynamo's graphs: Dynamo does not trace it."""
    return getattr(cls, name) if _torch.is_allowed_in_graph(cls) else None


def marked(cls: type[nn.Module], name: str = "forward") -> Forward:
    """The method ``name`` of ``cls``, so that :func:`in_forward` finds it on the stack."""
    fixed = _fixed(cls, name)

    # Not by plain_method: Dynamo would follow one function more in each module of a model.
    def forward_of_wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if fixed is not None:
            return fixed(self, *args, **kwargs)
        return getattr(cls, name)(self, *args, **kwargs)

    functools.update_wrapper(forward_of_wrapped, getattr(cls, name))
    return with_mark(forward_of_wrapped, f"{cls.__qualname__}.{name}")


def name_of(function: Any) -> str:
    """A function's name for tracebacks; for what has none, such as a partial, that of its class."""
    return getattr(function, "__qualname__", type(function).__name__)


def with_mark(function: Any, name: str) -> Forward:
    """``function`` under a name by which :func:`in_forward` finds it on the stack."""
    return cast(Forward, _torch.with_own_code(function, f"{_MARK}{name}"))


def is_marked(function: Any) -> bool:
    """Whether ``function`` was made by :func:`with_mark`."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name.startswith(_MARK)


def marked_own(module: nn.Module, forward: Forward) -> Forward:
    """As :func:`marked`, for a forward that is set on ``module`` itself."""
    if isinstance(forward, MethodType) and forward.__self__ is module:
        function = forward.__func__

        def forward_of_wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

    elif isinstance(forward, FunctionType):
        function = forward

        def forward_of_wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    else:
        function = forward
        # On the module, so that a copy of the module gets a copy of what the forward is bound to.
        # Each has a name of its own: it may call the one that was set before.
        name = f"{_OWN}_{sum(key.startswith(_OWN) for key in module.__dict__)}"
        module.__dict__[name] = forward

        def forward_of_wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, name)(*args, **kwargs)

    functools.update_wrapper(forward_of_wrapped, function)
    for key in [key for key in vars(forward_of_wrapped) if key.startswith("_torchdynamo")]:
        delattr(forward_of_wrapped, key)  # by it Dynamo would call ``function`` directly
    if function is forward:
        _tell_arguments(forward_of_wrapped, forward)
    return with_mark(forward_of_wrapped, name_of(forward))


def _tell_arguments(method: Any, forward: Forward) -> None:
    """Give ``method`` the signature of ``forward``: trainers ask for the names of its arguments."""
    with suppress(TypeError, ValueError):
        ours = inspect.signature(forward)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = ours.replace(parameters=[first, *ours.parameters.values()])


def in_forward() -> bool:
    """Whether the caller runs inside a marked forward, or where a backward recomputes a part of
    one that was checkpointed.

    Looks at the stack: a counter would be wrong in what runs eagerly after a graph break, where
    the frames of the forward stand on the stack, but their code was replaced by the compiler's.
    """
    recomputes = _torch.in_backward()
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        code = caller.f_code
        if code.co_name.startswith(_MARK):
            return True
        if recomputes and code.co_filename == checkpoint.__file__:
            return True
        frame = caller
    return False


@torch.compiler.assume_constant_result
def in_traced_forward() -> bool:
    """As :func:`in_forward`, for what Dynamo traces, asked while it traces. A function that is
    compiled by itself has a guard: where the answer is another one, it is traced anew."""
    return _torch.inlines(_MARK) or _torch.guarded(in_forward)


@torch.compiler.assume_constant_result
def is_traced_for_us() -> bool:
    """Whether Dynamo traces for our backend, whose code looks at each call at what is kept and what
    is deferred. What other backends compile gathers each parameter and reduces each gradient."""
    return _torch.traces_for("simplefsdp")


def accessors(cls: type[nn.Module]) -> dict[str, Any]:
    """For the subclass of ``cls``: torch's methods that read parameters by their paths."""
    return {"get_parameter": _get_parameter} if cls.get_parameter is _OF_TORCH else {}


_OF_TORCH = nn.Module.get_parameter


def _get_parameter(self: nn.Module, target: str) -> Any:
    reads = in_traced_forward() if torch.compiler.is_compiling() else in_forward()
    if not reads:
        return _OF_TORCH(self, target)
    owner, _, name = target.rpartition(".")
    return getattr(self.get_submodule(owner), name)


# Parts of torch's errors where a shard comes in the place of a plain tensor.
_OF_SHARDS = ("mixed torch.Tensor and DTensor", "sharding strategy")


@contextmanager
def shards_explained() -> Iterator[None]:
    """Around a forward: explains torch's error that shards and plain tensors are mixed."""
    try:
        yield
    except RuntimeError as error:
        if any(text in str(error) for text in _OF_SHARDS):
            error.add_note(
                "if it is of what parameters() or named_parameters() gave: in forward these give "
                "shards; read each parameter by its name (self.weight), or by "
                "self.get_parameter(name). Parametrize (weight_norm, spectral_norm), prune and "
                "fuse before simple_fsdp"
            )
        raise


_torch.run_as_it_is(shards_explained.__wrapped__)  # type: ignore[attr-defined]


class ReadOnlyParameter(Tensor):
    """A gathered parameter in an eager forward, or a view of it: a write to it raises, since it
    would be lost; and so does its use in a later forward. Compiled code never sees this class."""

    _fqn: str
    _forward: int  # number of the forward in which it was gathered

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with _torch.no_torch_function():
            if getattr(func, "__name__", "") == "__set__" and isinstance(args[0], cls):
                _refuse_write(args[0]._fqn, f"assigning to .{func.__self__.__name__}")
            held: list[ReadOnlyParameter] = []
            _torch.tree_map_only(ReadOnlyParameter, held.append, (args, kwargs or {}))
            _refuse_of_another_forward(held)
            versions = [tensor._version for tensor in held]
            result = func(*args, **(kwargs or {}))
            for tensor, version in zip(held, versions, strict=True):
                if tensor._version != version:
                    _refuse_write(tensor._fqn, f"{getattr(func, '__name__', func)}()")
            return result if func in _NO_VIEWS else _still_read_only(result, held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


_torch.run_as_it_is(ReadOnlyParameter.__torch_function__)
# At import, not later: Dynamo compiles anew what it compiled under other settings.
_torch.trace_without(ReadOnlyParameter)
# Functions whose result shares the memory, but is not there to be written to.
_NO_VIEWS = {vars(torch._C.TensorBase)["_base"].__get__}


def plain(value: Any) -> Any:
    """``value``, any nesting of containers, with what is read-only in it as plain tensors."""
    with _torch.no_torch_function():
        return _torch.tree_map_only(ReadOnlyParameter, lambda t: t.as_subclass(Tensor), value)


_torch.run_as_it_is(plain)


def read_only(full: Tensor, fqn: str) -> Tensor:
    """``full``, the gathered parameter ``fqn``, such that a write to it raises."""
    made: ReadOnlyParameter = full.as_subclass(ReadOnlyParameter)
    made._fqn, made._forward = fqn, number_of_forward()
    return made


def _still_read_only(result: Any, held: list[ReadOnlyParameter]) -> Any:
    if type(result) in (list, tuple):
        return type(result)(_still_read_only(item, held) for item in result)
    if type(result) is Tensor:
        for tensor in held:
            if share_memory(result, tensor):
                return read_only(result, tensor._fqn)
    return result


def _refuse_of_another_forward(held: list[ReadOnlyParameter]) -> None:
    """Raise if one was gathered in another forward: it has old values, and its gradient is lost."""
    now = number_of_forward()
    for tensor in held:
        if 0 < tensor._forward != now > 0:
            raise ValueError(
                f"{tensor._fqn}: what another forward has gathered is used in this one: it was "
                "stored, as by `self.other = self.weight` in forward; read the parameter by its "
                "own name in each forward, or give it both names before simple_fsdp"
            )


def _refuse_write(fqn: str, write: str) -> None:
    raise ValueError(
        f"{fqn}: {write} in forward changed the gathered copy, not the parameter, so that what it "
        "wrote would be lost; update parameters outside of forward, or inside "
        "`with simplefsdp.unsharded(model):`"
    )
