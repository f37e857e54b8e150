"""The methods that FSDP2 gives a module, on ours: what its users and trainers call by habit.

Each acts on the module it is called on and on all modules inside it; with ``recurse=False`` on its
own parameters alone; :func:`unshard`, :func:`reshard` and divide factors, as under FSDP2, not on
modules inside that were wrapped by themselves. Call them on all ranks alike. A method that the
model's class has itself is left as it is.

A wrapped module is no ``FSDPModule``: torch's pipeline stages and others who ask for that class go
on to reach into FSDP2's state, which a wrapped module does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from simplefsdp.frontend import kept
from simplefsdp.frontend.accumulation import drop_deferred, reduce_now, set_sync, sync_of, syncing
from simplefsdp.frontend.gather_spec import NO_PARTS
from simplefsdp.frontend.wrapped import POLICY, is_wrapped, layouts_of, set_layouts, wrapped_parts

_FACTOR = "_simple_fsdp_factor"  # on a module that set_gradient_divide_factor was called on
_SUMS_ONLY = "_simple_fsdp_sums_only"  # on one where set_force_sum_reduction_for_comms was enabled


def set_requires_gradient_sync(
    self: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Say whether the backward of the next forward reduces gradients, or adds them up in full.

    Call it before the forward of a micro-batch: the compiler makes forward and backward together.
    Raises ValueError if a parameter is on the meta device.
    """
    _check_bool("requires_gradient_sync", requires_gradient_sync)
    # As FSDP2: also over copies, whatever ``set_requires_all_reduce`` said before.
    _replace_sync(self, recurse, gradients=requires_gradient_sync, copies=requires_gradient_sync)


def set_requires_all_reduce(
    self: nn.Module, requires_all_reduce: bool, *, recurse: bool = True
) -> None:
    """Say whether the backward of the next forward also reduces over the ranks that hold copies.

    For ``mode="hybrid_shard"``. If not, it adds up what it would send to them; within the group of
    the shards it reduces gradients, unless :func:`set_requires_gradient_sync` says otherwise.
    Raises ValueError if a parameter is on the meta device.
    """
    _check_bool("requires_all_reduce", requires_all_reduce)
    _replace_sync(self, recurse, copies=requires_all_reduce)


def set_is_last_backward(self: nn.Module, is_last_backward: bool) -> None:
    """Does nothing: when a compiled backward returns, its gradients are there."""
    _check_bool("is_last_backward", is_last_backward)


def no_sync(self: nn.Module) -> AbstractContextManager[None]:
    """Inside, gradients of forwards are added up and not sent, as in DDP's ``no_sync``."""
    return syncing(self, gradients=False)


def finalize_backward(self: nn.Module, *, async_op: bool = False) -> _Done | None:
    """Reduce what no backward has reduced, and add it to the gradients; collective.

    For a loader that ended early. ``set_requires_gradient_sync(True)`` before the forward of the
    last micro-batch is faster: then the reduce hides behind that backward.
    """
    reduce_now(self)
    return _Done() if async_op else None


def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """As ``torch.nn.Module.zero_grad``; gradients that wait to be reduced are dropped, too, which
    ``optimizer.zero_grad()`` leaves, as under FSDP2."""
    drop_deferred(self)
    nn.Module.zero_grad(self, set_to_none)


def reset_iter_state(self: nn.Module) -> None:
    """After an exception in forward or backward: drop the gradients that wait to be reduced."""
    drop_deferred(self)


def set_reshard_after_forward(
    self: nn.Module, reshard_after_forward: bool, recurse: bool = True
) -> None:
    """Free full parameters after forward and gather them again in backward, or keep them. Either
    way no part is kept, as ``simple_fsdp(reshard_after_forward=n)`` asked for."""
    _check_bool("reshard_after_forward", reshard_after_forward)
    change_specs(
        _wrapped(self, recurse), NO_PARTS | {"reshard_after_forward": reshard_after_forward}
    )


def set_reshard_after_backward(
    self: nn.Module, reshard_after_backward: bool, *, recurse: bool = True
) -> None:
    """``False``: gather now and keep, as :func:`unshard` does; ``True``: free what is kept."""
    _check_bool("reshard_after_backward", reshard_after_backward)
    change = kept.free if reshard_after_backward else kept.keep
    change(_wrapped(self, recurse))


def unshard(self: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """Gather now and keep, until :func:`reshard`: forwards and backwards gather nothing, but for
    what another backend than ``"simplefsdp"`` compiles.

    Not what modules inside have that were wrapped by themselves: call this on those, too.
    When shards have changed, by an optimizer's step, a checkpoint or an operator in place, the next
    forward gathers once more. What is written without an operator of torch's, by a collective, or
    to ``param.to_local().data`` or ``param.detach().to_local()``, is not noticed: call this again
    after it, as FSDP2's users do in each step. To read or write full parameters outside of forward,
    use ``simplefsdp.unsharded``.
    """
    kept.keep(_up_to(self, POLICY))
    return _Done() if async_op else None


def reshard(self: nn.Module) -> None:
    """Free the full parameters that :func:`unshard` of this module keeps."""
    kept.free(_up_to(self, POLICY))


def set_gradient_divide_factor(self: nn.Module, factor: float) -> None:
    """Divide the sum of gradients over all data-parallel ranks by ``factor``; 1 for no average.

    Modules inside that were wrapped by themselves, or given a factor of their own before, keep
    theirs, as under FSDP2.

    Raises:
        TypeError: not a number.
        ValueError: not positive.
    """
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"factor: expected a number, got {type(factor).__name__}")
    if not factor > 0:
        raise ValueError(f"factor: expected a number > 0, got {factor}")
    change_specs(_up_to(self, POLICY, _FACTOR), {"divide_factor": float(factor)})
    self.__dict__[_FACTOR] = True


def set_reduce_scatter_divide_factor(self: nn.Module, factor: float) -> None:
    """The old name of :func:`set_gradient_divide_factor`."""
    set_gradient_divide_factor(self, factor)


def set_force_sum_reduction_for_comms(self: nn.Module, enable: bool) -> None:
    """Reduce by sums only, and divide in kernels of their own, where NCCL could average.

    Raises:
        ValueError: ``enable`` is False after it was True, which needs a new wrap.
    """
    _check_bool("enable", enable)
    modules = wrapped_parts(self)
    if enable:
        change_specs(modules, {"averages": False})
        for module in modules:
            module.__dict__[_SUMS_ONLY] = True
    elif any(_SUMS_ONLY in module.__dict__ for module in modules):
        raise ValueError(
            "enable: expected True; what averages by itself was decided by simple_fsdp, wrap anew"
        )


def members(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """For the subclass of ``cls``: these methods, less those that ``cls`` has of its own."""
    own = {method.__name__: method for method in _METHODS if not hasattr(cls, method.__name__)}
    if cls.zero_grad is nn.Module.zero_grad:
        own["zero_grad"] = zero_grad
    return own


_METHODS: tuple[Callable[..., Any], ...] = (
    set_requires_gradient_sync,
    set_requires_all_reduce,
    set_is_last_backward,
    no_sync,
    finalize_backward,
    reset_iter_state,
    set_reshard_after_forward,
    set_reshard_after_backward,
    unshard,
    reshard,
    set_gradient_divide_factor,
    set_reduce_scatter_divide_factor,
    set_force_sum_reduction_for_comms,
)


class _Done(UnshardHandle):
    """The handle that FSDP2 returns for work that may still go on; here the work is done."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def _wrapped(module: nn.Module, recurse: bool) -> list[nn.Module]:
    return wrapped_parts(module) if recurse else [module] if is_wrapped(module) else []


def _up_to(module: nn.Module, *marks: str) -> Iterator[nn.Module]:
    """``module`` and what is in it, as far as it is wrapped, but for modules inside that have one
    of ``marks``, and all in them. :data:`POLICY` is on those that were wrapped by themselves."""
    if is_wrapped(module):
        yield module
    for child in module.children():
        if not any(mark in child.__dict__ for mark in marks):
            yield from _up_to(child, *marks)


def _replace_sync(module: nn.Module, recurse: bool, **fields: bool) -> None:
    set_sync((m, sync_of(m)._replace(**fields)) for m in _wrapped(module, recurse))


@torch.compiler.disable
def change_specs(modules: Iterable[nn.Module], fields: Mapping[str, Any]) -> None:
    """Change ``fields`` of the specs of the own parameters of ``modules``, which are wrapped: how
    they are gathered, and their gradients reduced, from now on."""
    for m in modules:
        layouts = layouts_of(m).items()
        set_layouts(m, {k: replace(v, spec=v.spec._replace(**fields)) for k, v in layouts})


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
