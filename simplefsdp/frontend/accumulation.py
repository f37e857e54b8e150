"""Gradient accumulation without communication: several micro-batches, one reduce.

A wrapped module says how far the backward of its next forward reduces gradients (:class:`Sync`). A
gradient that is not sent is added to a sum in full, in ``reduce_dtype``; the backward that sends
takes the sum with it. So there are at most three kinds of graphs, each compiled once: nothing was
ever deferred; this backward defers; this backward sends, and takes the sums with it.

The sums stay in memory from step to step: full gradients on every rank. Ranks compare modes when
they compile; later, ranks in different modes wait for each other until the group's timeout.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp._torch import accumulates, backward_nodes, local_tensor, reached
from simplefsdp.frontend.gather import ON_META
from simplefsdp.frontend.gather_spec import GatherSpec, padded_rows, rows_first
from simplefsdp.frontend.placement import dtensor_like
from simplefsdp.frontend.reading import is_traced_for_us
from simplefsdp.frontend.reduce import Deferral, reduce_deferred
from simplefsdp.frontend.waiting import (
    SUMS,
    Sums,
    call_hooks_when_reduced,
    waiting_sums,
    watch_optimizers,
)
from simplefsdp.frontend.wrapped import (
    DEFERRALS,
    ParameterLayout,
    layouts_of,
    mark_stays,
    wrapped_in,
    wrapped_parts,
)
from simplefsdp.rank_guard import agree, ranks_of_params

log = logging.getLogger("simplefsdp")
_SYNC = "_simple_fsdp_sync"  # on a wrapped module: what its next backward reduces


class Sync(NamedTuple):
    """What the backward of a module's next forward reduces."""

    gradients: bool = True  # anything at all
    copies: bool = True  # if so, also over the ranks that hold copies


def deferral_of(module: nn.Module, name: str) -> dict[str, Any]:
    """What the gather of a parameter that is read now is told of deferred gradients: arguments of a
    :class:`Deferral`. Empty if none are deferred or left, or if the parameter is frozen by now."""
    param = module._parameters.get(name)
    if not torch.is_grad_enabled() or param is None or not param.requires_grad:
        return {}
    deferral: dict[str, Any] = module.__dict__.get(DEFERRALS, {}).get(name, {})
    if not deferral:
        return {}
    if torch.compiler.is_compiling():  # noting_backwards() looks whose sums they are
        return deferral if is_traced_for_us() else {}
    sums = (value for value in deferral.values() if isinstance(value, Tensor))
    return deferral if all(_is_sum_of(param, tensor) for tensor in sums) else {}


def sync_of(module: nn.Module) -> Sync:
    """What the backward of the next forward of ``module`` reduces."""
    return module.__dict__.get(_SYNC, Sync())


@torch.compiler.disable
def set_sync(syncs: Iterable[tuple[nn.Module, Sync]]) -> None:
    """Set what the backward of the next forward of each module reduces, for its own parameters
    only, not for those of modules inside it. If this raises, no module is set."""
    made = [(module, sync, _deferrals(module, sync)) for module, sync in syncs]
    for module, sync, deferrals in made:
        if sync != Sync():
            watch_optimizers()
        module.__dict__ |= {_SYNC: sync, DEFERRALS: deferrals}


def _deferrals(module: nn.Module, sync: Sync) -> dict[str, dict[str, Any]]:
    deferrals: dict[str, dict[str, Any]] = {}
    for name, layout in layouts_of(module).items():
        param = module._parameters.get(name)
        # A parameter that is frozen now and has sums may be trained again before the next call.
        if isinstance(param, DTensor) and (param.requires_grad or SUMS in param.__dict__):
            deferral = _deferral(param, layout, sync)
            if deferral != Deferral():
                deferrals[name] = {k: v for k, v in deferral._asdict().items() if v is not None}
    return deferrals


def carry_over(module: nn.Module, name: str, param: Tensor | None) -> None:
    """Give ``param`` the sums of the parameter of ``module`` that it is about to replace: graphs of
    the module go on to write to these."""
    sums = getattr(module._parameters.get(name), "__dict__", {}).get(SUMS)
    if sums is not None and param is not None:
        param.__dict__[SUMS] = sums


@contextmanager
def sums_stay(module: nn.Module, emptied: bool = False) -> Iterator[None]:
    """Around code that may swap or move the tensors of the own parameters of ``module``: their sums
    stay, follow to the new device and dtype, and become zero if the parameters are ``emptied``."""
    with mark_stays(module, SUMS) as stayed:
        yield
    layouts = {id(module._parameters.get(n)): x for n, x in layouts_of(module).items()}
    for param, sums in stayed:
        if emptied or param.is_meta:
            _zero(sums)
        dtype = _sum_dtype(param, layouts[id(param)].spec)
        for name in ("unreduced", "partial"):
            tensor = getattr(sums, name)
            if tensor is not None:
                moved = None if param.is_meta else tensor.to(param.device, dtype)
                setattr(sums, name, moved)
    if stayed and not any(param.is_meta for param, _ in stayed):
        begin_anew(module)


def begin_anew(module: nn.Module) -> None:
    """Have the graphs of a module write to the sums that its parameters have now."""
    if _SYNC in module.__dict__:
        set_sync([(module, sync_of(module))])


def _sum_dtype(param: DTensor, spec: GatherSpec) -> torch.dtype:
    if not param.dtype.is_floating_point:  # a complex one keeps its dtype in gather and reduce
        return param.dtype
    return spec.reduce_dtype or spec.param_dtype or param.dtype


def _deferral(param: DTensor, layout: ParameterLayout, sync: Sync) -> Deferral:
    sums: Sums = param.__dict__.setdefault(SUMS, Sums())
    spec, local = layout.spec, local_tensor(param)

    def zeros(rows: int) -> Tensor:
        if local.is_meta:
            raise ValueError(f"{spec.fqn}: {ON_META}")
        is_split = spec.shard_ranks > 1
        shape = (rows, *rows_first(local, spec).shape[1:]) if is_split else local.shape
        with torch.inference_mode(False):
            return local.new_zeros(shape, dtype=_sum_dtype(param, spec), requires_grad=False)

    if not sync.gradients:
        sums.until = "none"
        sums.unreduced = zeros(spec.rows) if sums.unreduced is None else sums.unreduced
        return Deferral("none", sums.unreduced)
    until: Literal["shards", "all"] = "all" if sync.copies or not spec.copy_groups else "shards"
    sums.until = until
    if until == "shards" and sums.partial is None:
        sums.partial = zeros(padded_rows(spec))
    return Deferral(until, sums.unreduced, sums.partial)


def noting_backwards(
    compiled: Callable[..., Any], until: Mapping[int, str], sums: Iterable[tuple[int, int]]
) -> Callable[..., Any]:
    """``compiled``, whose backward notes for which parameters it deferred the gradient. ``until``
    says how far each is reduced, by the parameter's place among the inputs; ``sums`` are places of
    parameters, each with that of a tensor that backwards write to."""
    if not until:
        return compiled

    def call(*args: Any) -> Any:
        own = list(args)
        # By ``.data`` each call has its own version counters: autograd raises if a tensor that one
        # call has saved is written to by another call.
        for param, place in sums:
            if not _is_sum_of(args[param], args[place]):
                raise ValueError(_OTHERS)
            own[place] = args[place].data
        outputs = compiled(*own)
        params = [(args[place], goal) for place, goal in until.items()]
        for node in backward_nodes(outputs, args):
            node.register_prehook(functools.partial(_refuse_other_inputs, params))
            reduced = functools.partial(_note_compiled_backward, params, node.next_functions)
            node.register_hook(reduced)
        return outputs

    return call


_OTHERS = (
    "torch.func.functional_call, or swap_tensors, has put other tensors in the place of parameters "
    "whose gradients add up without communication, and theirs would be added to those: not inside "
    "microbatch(is_last=False), nor after set_requires_gradient_sync(False), on compiled code"
)


def _is_sum_of(param: Tensor, tensor: Tensor) -> bool:
    """Whether gradients of ``param`` add up in ``tensor``. If not, ``param`` is another tensor that
    stands in the place of a parameter for a while."""
    sums: Sums | None = param.__dict__.get(SUMS)
    return sums is not None and (tensor is sums.unreduced or tensor is sums.partial)


def note_backward(full: Tensor, param: Tensor, until: str) -> None:
    """Have the backward of a gather that was run eagerly note what it does with the gradient."""
    if full.grad_fn is not None and SUMS in param.__dict__:
        full.grad_fn.register_prehook(functools.partial(_refuse_other_inputs, [(param, until)]))
        full.grad_fn.register_hook(functools.partial(_note_backward, [(param, until)]))


def _note_compiled_backward(
    params: Iterable[tuple[Tensor, str]], after: Any, gradients: Sequence[Any], _: Any
) -> None:
    """Sums of a parameter that got no gradient are neither taken along nor reduced: they wait."""
    there = {id(param) for param in reached(after, gradients)}
    _note_backward((p, until) for p, until in params if until != "all" or id(p) in there)


def _note_backward(params: Iterable[tuple[Tensor, str]], *_: Any) -> None:
    for param, until in params:
        sums = param.__dict__.get(SUMS)
        if sums is not None:
            sums.waiting = until != "all"
            if sums.waiting:
                call_hooks_when_reduced(param)  # which autograd is about to call
                if sums.until == "all":
                    _warn_of_late_sync()


@functools.cache
def _warn_of_late_sync() -> None:
    log.warning(
        "a backward left gradients unreduced, and .grad without them, though they are to be "
        "reduced now: its forward had begun before. Call set_requires_gradient_sync(True) before "
        "the forward of the last micro-batch; or model.finalize_backward() before .grad is used"
    )


def _refuse_other_inputs(params: Sequence[tuple[Tensor, str]], *_: Any) -> None:
    """Raise in a backward that is asked for no parameter's ``.grad``: a compiled one writes to the
    sums all the same. That loses nothing if it sends all gradients, and no sums wait."""
    may_lose = any(until != "all" or waiting_sums(param) for param, until in params)
    if may_lose and not any(accumulates(param) for param, _ in params if param.requires_grad):
        raise ValueError(
            "torch.autograd.grad, or backward(inputs=...): not while gradients are accumulated "
            "without communication: that backward would add to them. Compute gradients of "
            "inputs on the model before it is compiled, and those of parameters by backward(). If "
            "this is a plain backward(): parameters were moved (model.to()) since its forward"
        )


def drop_deferred(model: nn.Module) -> None:
    """Forget the gradients that wait to be reduced."""
    for module in model.modules():
        for param in module._parameters.values():
            sums = None if param is None else param.__dict__.get(SUMS)
            if sums is not None:
                _zero(sums)


@torch.compiler.disable
def _zero(sums: Sums) -> None:
    # In place: backwards that are still to come write to these tensors.
    for tensor in (sums.unreduced, sums.partial):
        if tensor is not None:
            tensor.zero_()
    sums.waiting = False


@torch.no_grad()
def reduce_now(model: nn.Module) -> None:
    """Reduce the gradients that wait to be reduced, and add them to ``.grad``; collective. This
    goes parameter by parameter, with no compute to hide behind: it is for sums that no later
    backward has reduced."""
    found: dict[int, tuple[DTensor, ParameterLayout, Sums]] = {}
    for module in model.modules():
        for name, layout in layouts_of(module).items():
            shard = module._parameters.get(name)
            if isinstance(shard, DTensor) and (sums := waiting_sums(shard)) is not None:
                found[id(shard)] = (shard, layout, sums)
    fqns = [layout.spec.fqn for _, layout, _ in found.values()]
    what = "the gradients that finalize_backward reduces"
    agree(what, fqns, ranks_of_params(model.parameters()), remember=False)
    for param, layout, sums in found.values():
        local = local_tensor(param)
        deferral = Deferral("all", sums.unreduced, sums.partial)
        rows = local.shape[layout.spec.dim] if local.dim() else 0
        reduced = reduce_deferred(rows, layout.spec, deferral)
        grad = dtensor_like(param, reduced.to(local.dtype))
        param.grad = grad if param.grad is None else param.grad + grad
        sums.waiting = False


@contextmanager
def syncing(model: nn.Module, *, gradients: bool) -> Iterator[None]:
    """Inside, the backward of each forward reduces gradients, or else adds them up, whatever was
    set before; afterwards that holds again."""
    before = [(module, sync_of(module)) for module in wrapped_parts(model)]
    set_sync((module, sync._replace(gradients=gradients)) for module, sync in before)
    try:
        yield
    finally:
        set_sync(before)


def is_deferring(model: nn.Module) -> bool:
    """Whether the backward of the next forward leaves gradients of a part of ``model`` unsent."""
    return not all(sync_of(module).gradients for module in model.modules())


@contextmanager
def microbatch(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Around the forward and the backward of one of several batches whose gradients add up.

    Only the last one's backward communicates: it reduces the sum of all. Until then ``.grad`` is
    what it was::

        for i, batch in enumerate(batches):
            with simplefsdp.microbatch(model, is_last=i == len(batches) - 1):
                (loss_of(model, batch) / len(batches)).backward()

    It takes memory for full gradients in ``reduce_dtype`` on every rank. FSDP2's way of saying so,
    ``model.set_requires_gradient_sync(is_last)``, works as well. What another backend than
    ``"simplefsdp"`` compiles reduces in each backward, to the same gradients.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`, or a part or parent of such a module.
        is_last: whether the backward reduces, unless something around it defers anyway; the same
            on all ranks.

    Raises:
        ValueError: nothing in ``model`` is wrapped.
    """
    wrapped_in("model", model)
    if is_last:
        yield
        return
    with syncing(model, gradients=False):
        yield


def note_reduced(params: Iterable[Tensor]) -> None:
    """Note that nothing of the gradients of ``params`` waits to be reduced any more."""
    _note_backward((param, "all") for param in params)
