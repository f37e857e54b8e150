"""Forwards of wrapped modules: their casts, and forwards that are set on a module itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp._torch import cast_floating_point
from simplefsdp.frontend.after_wrap import check_before_eager_forward
from simplefsdp.frontend.eager_guard import eager_forward
from simplefsdp.frontend.reading import (
    Forward,
    is_marked,
    marked_own,
    name_of,
    plain,
    shards_explained,
    with_mark,
)
from simplefsdp.frontend.wrapped import POLICY


def set_on(module: nn.Module, forward: Any) -> Any:
    """What ``module`` stores if ``forward`` is set on it itself, be it before or after the wrap."""
    if not callable(forward) or isinstance(forward, nn.Module):  # which is a submodule
        return forward
    if isinstance(forward, MethodType) and forward.__self__ is module and is_marked(forward):
        return forward  # it is ours, and set again after another took its place for a while
    own = marked_own(module, forward)
    return MethodType(casting(lambda: own, name_of(forward)), module)


def casting(forward_of: Callable[[], Forward], name: str) -> Forward:
    """What ``forward_of`` gives, marked. If the module is a wrapped root, inputs and outputs are
    cast by its policy, and an eager forward is checked for mistakes that nobody would notice.

    All this is one function: where a graph breaks in a loop, Dynamo compiles each function on the
    stack by itself, and each time traces all that this function calls.

    Args:
        forward_of: is called at each call, and gives a function of the module and its inputs.
        name: of that function, for tracebacks.
    """

    def forward_of_wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        policy = self.__dict__.get(POLICY)
        if policy is None:  # an inner instance of the root's class
            return forward_of()(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            args, kwargs = _cast_inputs(policy, args, kwargs)
            return _cast_output(policy, forward_of()(self, *args, **kwargs))
        check_before_eager_forward(self)
        with eager_forward(), shards_explained():
            args, kwargs = _cast_inputs(policy, args, kwargs)
            return plain(_cast_output(policy, forward_of()(self, *args, **kwargs)))

    functools.update_wrapper(forward_of_wrapped, forward_of())
    return with_mark(forward_of_wrapped, f"{name}, cast")


def _cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> Any:
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        return cast_floating_point((args, kwargs), policy.param_dtype)
    return args, kwargs


def _cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    if policy.output_dtype is not None:
        return cast_floating_point(output, policy.output_dtype)
    return output
