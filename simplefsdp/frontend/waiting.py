"""Gradients that wait to be reduced, and what refuses to go on without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from simplefsdp._torch import hooks_of
from simplefsdp.frontend.living import living_shards

SUMS = "_simple_fsdp_sums"  # on a shard: what was not reduced


@dataclass
class Sums:
    """One parameter's gradients that are not reduced, see :class:`~.gather.Deferral`."""

    unreduced: Tensor | None = None
    partial: Tensor | None = None
    waiting: bool = False  # a backward added to them, and none has reduced them since
    until: str = "all"  # how far the backward of the next forward takes gradients

    def __deepcopy__(self, memo: object) -> Sums:
        return Sums()  # a copied parameter has no gradient of the original's


def waiting_sums(param: Tensor) -> Sums | None:
    """What of a parameter's gradients waits to be reduced; None if nothing does."""
    sums: Sums | None = param.__dict__.get(SUMS)
    return sums if sums is not None and sums.waiting else None


class _IfReduced(NamedTuple):
    """A hook that is called only if ``is_reduced`` is true of what it is given."""

    hook: Callable[[Any], Any]
    is_reduced: Callable[[Any], bool]

    def __call__(self, value: Any) -> Any:
        return self.hook(value) if self.is_reduced(value) else None


def call_hooks_when_reduced(param: Tensor) -> None:
    """Have the hooks that a parameter has by now run only where its gradient is reduced.

    Autograd runs them in every backward, even without a gradient; FSDP2 only where there is one.
    """
    of_gradient, after = hooks_of(param)
    for hooks, is_reduced in (
        (of_gradient, lambda gradient: gradient is not None),
        (after, lambda param: waiting_sums(param) is None),
    ):
        for key, hook in hooks.items():
            if not isinstance(hook, _IfReduced):
                hooks[key] = _IfReduced(hook, is_reduced)


def refuse_waiting(params: Iterable[Tensor], what: str) -> None:
    """Refuse to use gradients of which a part is not reduced."""
    for param in params:
        sums = waiting_sums(param)
        if sums is None:
            continue
        there = (tensor for tensor in (sums.unreduced, sums.partial) if tensor is not None)
        if any(bool(tensor.any()) for tensor in there):  # all zeros if it got no gradient
            named = (fqn for fqn, shard in living_shards() if shard is param)
            raise ValueError(
                f"{what}: gradients of {next(named, f'shape {tuple(param.shape)}')} wait to be "
                "reduced over ranks, and would be missed: no backward since has reduced them. Call "
                "model.set_requires_gradient_sync(True) before the forward of the last "
                "micro-batch, not only before its backward; or, as where that micro-batch does not "
                "use the parameter, model.finalize_backward() now"
            )


@functools.cache
def watch_optimizers() -> None:
    """From now on, refuse steps of any optimizer that would miss gradients."""
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check before a step, or after its closure: Lightning's closure runs the last micro-batch."""
    if torch.compiler.is_compiling():
        return None
    params: Sequence[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        refuse_waiting(params, type(optimizer).__name__)
        return None

    def closure_and_check() -> Any:
        loss = closure()
        refuse_waiting(params, type(optimizer).__name__)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_check}
    return (args[0], closure_and_check, *args[2:]), kwargs
