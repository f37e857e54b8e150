"""Gradient accumulation without communication: several micro-batches, one reduce.

A wrapped module says how far the backward of its next forward takes gradients. What is not sent
is added up in full, in ``reduce_dtype``; the backward that sends takes the sum with it. So a
training step has at most three kinds of graphs, each compiled once: nothing was ever deferred,
deferred, and synchronised.

The sums stay in memory from step to step, full gradients on every rank, until ``zero_grad`` is
called on the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from simplefsdp._torch import local_tensor
from simplefsdp.gather import Deferral, padded_rows, reduce_deferred
from simplefsdp.wrapped import DEFERRALS, LAYOUTS, ParameterLayout, is_wrapped

_SYNC = "_simple_fsdp_sync"  # on a wrapped module: what its next backward reduces
_SUMS = "_simple_fsdp_sums"  # on a shard: what was not reduced


class Sync(NamedTuple):
    """What the backward of a module's next forward reduces.

    Attributes:
        gradients: anything at all.
        copies: if so, also over the ranks that hold copies.
    """

    gradients: bool = True
    copies: bool = True


@dataclass
class _Sums:
    """Gradients of one parameter that are not reduced; see :class:`simplefsdp.gather.Deferral`."""

    unreduced: Tensor | None = None
    partial: Tensor | None = None
    waiting: bool = False  # for a backward that reduces them

    def __deepcopy__(self, memo: object) -> _Sums:
        return _Sums()  # a copied parameter has no gradient of the original's


def deferral_of(module: nn.Module, name: str) -> dict[str, Any]:
    """How the gather of a parameter that is read now defers its gradient; empty if it does not."""
    if not torch.is_grad_enabled():
        return {}
    deferral: dict[str, Any] = module.__dict__.get(DEFERRALS, {}).get(name, {})
    return deferral


def sync_of(module: nn.Module) -> Sync:
    """What the backward of the next forward of ``module`` reduces."""
    return module.__dict__.get(_SYNC, Sync())


def set_sync(module: nn.Module, sync: Sync) -> None:
    """Have the backward of the next forward of ``module``, a wrapped one, reduce that.

    Its own parameters only, not those of the modules inside it.
    """
    if sync != Sync():
        _watch_optimizers()
    module.__dict__[_SYNC] = sync
    deferrals: dict[str, dict[str, Any]] = {}
    for name, layout in module.__dict__.get(LAYOUTS, {}).items():
        param = module._parameters.get(name)
        if isinstance(param, DTensor) and param.requires_grad:
            deferral = _deferral(param, layout, sync)
            if deferral != Deferral():
                deferrals[name] = {k: v for k, v in deferral._asdict().items() if v is not None}
    module.__dict__[DEFERRALS] = deferrals


def _deferral(param: DTensor, layout: ParameterLayout, sync: Sync) -> Deferral:
    sums: _Sums = param.__dict__.setdefault(_SUMS, _Sums())
    spec, local = layout.spec, local_tensor(param)

    def zeros(rows: int) -> Tensor:
        if local.is_meta:
            raise ValueError(
                f"{spec.fqn}: is on the meta device; call simplefsdp.init_weights(model), or load "
                "a checkpoint, before gradients are accumulated"
            )
        shape = (rows, *local.shape[1:]) if spec.rows else local.shape
        dtype = spec.reduce_dtype or spec.param_dtype or param.dtype
        return local.new_zeros(shape, dtype=dtype, requires_grad=False)

    if not sync.gradients:
        if sums.unreduced is None:
            sums.unreduced = zeros(spec.rows)
        return Deferral("none", sums.unreduced)
    if not sync.copies and spec.copy_groups:
        if sums.partial is None:
            sums.partial = zeros(padded_rows(spec))
        return Deferral("shards", sums.unreduced, sums.partial)
    return Deferral("all", sums.unreduced, sums.partial)


def noting_forwards(
    compiled: Callable[..., Any], until: Mapping[int, str], sums: Sequence[int]
) -> Callable[..., Any]:
    """``compiled``, that notes of which parameters it defers the gradients.

    Args:
        compiled: a compiled Dynamo graph.
        until: how far it takes gradients, by the place of the parameter among the inputs.
        sums: places of the tensors that backwards write to. Each call has versions of its own of
            them, for autograd minds if what it saved is written to by another backward.
    """
    if not until:
        return compiled

    def call(*args: Any) -> Any:
        for place, goal in until.items():
            note_forward(args[place], goal)
        own = list(args)
        for place in sums:
            own[place] = args[place].data
        return compiled(*own)

    return call


def note_forward(param: Tensor, until: str) -> None:
    """Note that a forward ran whose backward takes the gradient of ``param`` that far."""
    sums = param.__dict__.get(_SUMS)
    if sums is not None:
        sums.waiting = until != "all"


def drop_deferred(model: nn.Module) -> None:
    """Forget the gradients that wait to be reduced, and free their memory."""
    modules = [module for module in model.modules() if _SYNC in module.__dict__]
    for module in modules:
        for param in module._parameters.values():
            if param is not None:
                param.__dict__.pop(_SUMS, None)
    for module in modules:
        set_sync(module, sync_of(module))


@torch.no_grad()
def reduce_now(model: nn.Module) -> None:
    """Reduce what waits to be reduced, and add it to the gradients; collective.

    One parameter after the other, with nothing to hide behind: it is for what no backward that
    reduces came after.
    """
    for module in model.modules():
        for name, layout in module.__dict__.get(LAYOUTS, {}).items():
            param = module._parameters.get(name)
            sums = None if param is None else param.__dict__.get(_SUMS)
            if isinstance(param, DTensor) and sums is not None and sums.waiting:
                _reduce_now(param, layout, sums)


def _reduce_now(param: DTensor, layout: ParameterLayout, sums: _Sums) -> None:
    local = local_tensor(param)
    deferral = Deferral("all", sums.unreduced, sums.partial)
    reduced = reduce_deferred(local.shape[0] if local.dim() else 0, layout.spec, deferral)
    grad = DTensor.from_local(
        reduced.to(local.dtype),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    param.grad = grad if param.grad is None else param.grad + grad
    sums.waiting = False


@contextmanager
def deferring(model: nn.Module) -> Iterator[None]:
    """Inside, forwards are of micro-batches whose gradients are not sent."""
    before = [(module, sync_of(module)) for module in model.modules() if is_wrapped(module)]
    for module, sync in before:
        set_sync(module, sync._replace(gradients=False))
    try:
        yield
    finally:
        for module, sync in before:
            set_sync(module, sync)


@contextmanager
def microbatch(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Around the forward and the backward of one of several batches whose gradients add up.

    Only the last one's backward communicates: it reduces the sum of all. Until then ``.grad`` is
    what it was::

        for i, batch in enumerate(batches):
            with simplefsdp.microbatch(model, is_last=i == len(batches) - 1):
                (loss_of(model, batch) / len(batches)).backward()

    It takes memory for full gradients in ``reduce_dtype`` on every rank. It is what FSDP2's
    ``set_requires_gradient_sync(is_last)`` does.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`, or a part or parent of such a module.
        is_last: whether the backward reduces; the same on all ranks.

    Raises:
        ValueError: nothing in ``model`` is wrapped.
    """
    if not any(map(is_wrapped, model.modules())):
        raise ValueError(
            "model: expected a module wrapped by simple_fsdp, or one that holds such a module, "
            f"got {type(model).__name__}"
        )
    if is_last:
        yield
        return
    with deferring(model):
        yield


def refuse_waiting(params: Iterable[Tensor], what: str) -> None:
    """Refuse to use gradients of which a part is not reduced.

    Raises:
        ValueError: there are such.
    """
    for param in params:
        sums = param.__dict__.get(_SUMS)
        if sums is not None and sums.waiting:
            raise ValueError(
                f"{what}: gradients of a parameter of shape {tuple(param.shape)} wait to be "
                "reduced over ranks, and would be missed: the last forward ran without "
                "synchronisation. Call model.set_requires_gradient_sync(True) before the forward "
                "of the last micro-batch, not only before its backward; or "
                "model.finalize_backward() now"
            )


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a step, or after the closure that it calls: Lightning's runs the last micro-batch."""
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
