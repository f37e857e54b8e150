"""Forwards of wrapped modules: casts of inputs and outputs, and those that are set on a module."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import nn

from simplefsdp._torch import cast_floating_point, with_own_code
from simplefsdp.frontend import reading
from simplefsdp.frontend.after_wrap import check_before_eager_forward
from simplefsdp.frontend.eager_guard import eager_forward
from simplefsdp.frontend.reading import Forward, marked_own, plain, shards_explained
from simplefsdp.frontend.wrapped import POLICY

_FILES = {__file__, reading.__file__}


def set_on(module: nn.Module, forward: Any) -> Any:
    """What ``module`` is to have as its own ``forward``, before or after the wrap."""
    if not callable(forward) or isinstance(forward, nn.Module):  # which is a submodule
        return forward
    file = _file_of(module, forward)
    # One of ours comes back: somebody else's took its place for a while.
    function = forward.__func__ if file in _FILES else marked_own(module, forward)
    casts = POLICY in module.__dict__ and file != __file__
    return MethodType(casting(function) if casts else function, module)


def _file_of(module: nn.Module, forward: Any) -> str | None:
    """Where the code of a method of ``module`` is."""
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return None
    code = getattr(forward.__func__, "__code__", None)
    return None if code is None else code.co_filename


def casting(forward: Forward) -> Forward:
    """``forward``, marked, with inputs and outputs cast by the policy of the module, if it is a
    wrapped root; the outermost one checks what nobody would notice."""

    @functools.wraps(forward)
    def cast_and_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        policy = self.__dict__.get(POLICY)
        if policy is None:  # an inner instance of the root's class
            return forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            check_before_eager_forward(self)
            with eager_forward(), shards_explained():
                return plain(cast_around(self, policy, args, kwargs))
        return cast_around(self, policy, args, kwargs)

    def cast_around(self: nn.Module, policy: Any, args: Any, kwargs: Any) -> Any:
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating_point((args, kwargs), policy.param_dtype)
        output = forward(self, *args, **kwargs)
        if policy.output_dtype is not None:
            output = cast_floating_point(output, policy.output_dtype)
        return output

    # What Dynamo gives up on is a code: after an exception in one model, not that of all models.
    return with_own_code(cast_and_forward, f"{forward.__module__}.{forward.__qualname__}")
