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
    if _is_ours(module, forward):  # and comes back: another took its place for a while
        return forward
    return MethodType(casting(marked_own(module, forward)), module)


def _is_ours(module: nn.Module, forward: Any) -> bool:
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    code = getattr(forward.__func__, "__code__", None)
    return code is not None and code.co_filename in _FILES


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
