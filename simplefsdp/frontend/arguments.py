"""Checks what users pass to ``simple_fsdp``, with errors that say what to pass instead; and finds
the dtypes of each parameter by FSDP2's ``MixedPrecisionPolicy``, as this torch applies it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.nn.parallel import DistributedDataParallel

from simplefsdp import _torch
from simplefsdp.frontend.wrapped import is_wrapped


def check_arguments(
    model: object, policy: object, reshard_after_forward: object, offload_policy: object
) -> None:
    """Refuse a model that cannot be wrapped, and arguments of the wrong type."""
    if isinstance(model, (list, tuple)):
        raise TypeError(
            f"model: expected a torch.nn.Module, got a {type(model).__name__}; wrap its modules "
            "one by one, or the module that holds them (the compiler decides what is gathered "
            "together, see options['buckets'])"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model: a ScriptModule cannot be wrapped; wrap the module it came from")
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy: expected torch.distributed.fsdp.MixedPrecisionPolicy or None, got "
            f"{type(policy).__name__}"
        )
    _check_policy(model, policy)
    if not isinstance(reshard_after_forward, int) and reshard_after_forward != "auto":
        raise TypeError(
            "reshard_after_forward: expected True, False, 'auto' or a number of ranks, got "
            f"{reshard_after_forward!r}"
        )
    if is_wrapped(model):
        raise ValueError(
            f"model: this {type(model).__name__} is already wrapped by simple_fsdp, itself or as a "
            "part of a model; wrap each module once, inner modules before the one around them (and "
            "copy a wrapped model outside of `unsharded`: the copy is wrapped as it is)"
        )
    _refuse_offloading(offload_policy)


_OF_OTHERS = {
    FSDPModule: "is wrapped by fully_shard; simple_fsdp takes its place: call it alone",
    DistributedDataParallel: "is a DistributedDataParallel; pass the module that is in it, with "
    "mode='replicate' to have copies, too",
    torch.jit.ScriptModule: "was made by torch.jit, whose code reads its own parameters; pass the "
    "module that it was made of, or name its parameters in ignored_params",
}


def check_modules(modules: Mapping[nn.Module, str]) -> None:
    """Refuse modules that others wrapped, and those that need their weight or its gradient whole.

    Args:
        modules: that are to be wrapped, with their names.

    Raises:
        ValueError: see :func:`simplefsdp.simple_fsdp`.
    """
    for module, path in modules.items():
        for cls, what in _OF_OTHERS.items():
            if isinstance(module, cls):
                raise ValueError(f"{path or 'model'}: {what}")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(module, path or "model")


def _check_embedding(module: nn.Embedding | nn.EmbeddingBag, path: str) -> None:
    if module.max_norm is not None:
        raise ValueError(
            f"{path}: an embedding with max_norm={module.max_norm} writes to the weight in "
            "forward, where it is a gathered copy; set max_norm to None, and scale the rows after "
            "optimizer.step()"
        )
    if module.sparse and module.weight.requires_grad:
        raise ValueError(
            f"{path}: an embedding with sparse=True has no dense gradient to reduce over ranks; "
            "set sparse to False, or freeze it"
        )


def _refuse_offloading(policy: object) -> None:
    """Refuse FSDP2's policy of offloading, unless it offloads nothing."""
    if isinstance(policy, CPUOffloadPolicy):
        raise ValueError(
            "offload_policy: simple_fsdp does not offload to the CPU; what takes memory can be "
            "sharded over more ranks, activations recomputed (torch.utils.checkpoint), or the "
            "batch cut into micro-batches (simplefsdp.microbatch)"
        )
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(
            "offload_policy: expected torch.distributed.fsdp.OffloadPolicy or None, got "
            f"{type(policy).__name__}"
        )


def ignored_among(model: nn.Module, params: Collection[nn.Parameter] | None) -> set[int]:
    """The identities of the parameters of ``model`` that are to be left alone; as with FSDP2, other
    models' may be among ``params``: one set is given to each block and to the root."""
    if params is None:
        return set()
    is_set = isinstance(params, Collection) and not isinstance(params, Tensor)
    if not is_set or not all(isinstance(p, nn.Parameter) for p in params):
        raise TypeError(
            "ignored_params: expected a set of torch.nn.Parameter, got "
            f"{type(params).__name__}; of a module, pass set(module.parameters())"
        )
    return set(map(id, model.parameters())) & set(map(id, params))


class Dtypes(NamedTuple):
    """The dtypes in which one parameter is gathered, and its gradient is reduced."""

    param_dtype: torch.dtype | None  # on the wire and in compute; None keeps the parameter's own
    reduce_dtype: torch.dtype | None  # of the reduce; None keeps the gradient's own


def _check_policy(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Refuse a policy whose dtypes are no floating-point ones, or that could not be followed."""
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
    """The dtypes of one parameter under ``policy``. Without a ``reduce_dtype`` a gradient is
    reduced in the dtype that this torch's FSDP2 takes for a parameter alone in its group: since
    2.15 the parameter's own dtype, before ``param_dtype``."""
    param_dtype = _param_dtype(fqn, param, policy)
    if policy.reduce_dtype is not None:
        return Dtypes(param_dtype, policy.reduce_dtype)
    if _torch.reduces_in_param_dtype():
        return Dtypes(param_dtype, param_dtype)
    if (override := _torch.grad_dtype_override(param)) is not None:
        return Dtypes(param_dtype, override.dtype)
    # None where nothing is cast, so that the gradient's dtype follows a later model.to(dtype).
    return Dtypes(param_dtype, None if param_dtype in (None, param.dtype) else param.dtype)


def without_override(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy`` without its ``param_dtype_override_fn``, which was asked: the rest is data."""
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
