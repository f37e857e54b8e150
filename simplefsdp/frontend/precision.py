"""The dtypes of each parameter: FSDP2's ``MixedPrecisionPolicy``, as this torch reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp import _torch


class Dtypes(NamedTuple):
    """What one parameter is gathered, and its gradient reduced, in.

    Attributes:
        param_dtype: on the wire and in compute; None keeps the parameter's own.
        reduce_dtype: of the reduce; None keeps the gradient's own.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


def check_policy(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Refuse a policy that says no dtypes, or that could not be followed.

    Raises:
        TypeError: a dtype is none, or not of floating-point numbers.
        ValueError: it casts what goes into ``model`` or comes out, which has no forward.
    """
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"mp_policy.{name}: expected a floating-point torch.dtype or None, got {dtype!r}"
            )
    casts_inputs = policy.cast_forward_inputs and policy.param_dtype is not None
    has_no_forward = type(model).forward is nn.Module.forward
    if has_no_forward and (casts_inputs or policy.output_dtype is not None):
        raise ValueError(
            f"mp_policy: casts the inputs or outputs of the model, but {type(model).__name__} has "
            "no forward; wrap the modules in it one by one, or the module around it, or pass "
            "cast_forward_inputs=False and no output_dtype"
        )


def dtypes_of(fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> Dtypes:
    """The dtypes of one parameter under ``policy``.

    Without a ``reduce_dtype`` a gradient is reduced as this torch's FSDP2 reduces one that is in a
    group by itself: since 2.15 in the parameter's own dtype, before in ``param_dtype``.

    Raises:
        ValueError: ``policy.param_dtype_override_fn`` gives something else than it may.
    """
    param_dtype = _param_dtype(fqn, param, policy)
    if policy.reduce_dtype is not None:
        return Dtypes(param_dtype, policy.reduce_dtype)
    if _torch.reduces_in_param_dtype():
        return Dtypes(param_dtype, param_dtype)
    if (override := _torch.grad_dtype_override(param)) is not None:
        return Dtypes(param_dtype, override.dtype)
    # Not named where nothing is cast: the gradient follows a later model.to(dtype).
    return Dtypes(param_dtype, None if param_dtype in (None, param.dtype) else param.dtype)


def without_override(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy`` less its function of parameters, which has been asked: what is left is data."""
    if getattr(policy, "param_dtype_override_fn", None) is None:
        return policy
    return replace(policy, param_dtype_override_fn=None)  # type: ignore[call-arg]


def _param_dtype(fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype | None:
    override = getattr(policy, "param_dtype_override_fn", None)  # since 2.15
    dtype = None if override is None else override(param)
    if dtype is None:
        return policy.param_dtype
    if dtype not in (policy.param_dtype, param.dtype):
        raise ValueError(
            f"{fqn}: param_dtype_override_fn: expected None, mp_policy.param_dtype "
            f"({policy.param_dtype}) or the parameter's own {param.dtype}, got {dtype!r}"
        )
    return dtype  # type: ignore[no-any-return]
