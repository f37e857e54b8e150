"""Refuses, by name, what users do after the wrap that trains nothing, or each rank by itself."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from simplefsdp._torch import dispatch_mode, is_skipped_by_dynamo, run_as_it_is
from simplefsdp.frontend.assigned import refuse_assigned_since
from simplefsdp.frontend.kept import refresh_all
from simplefsdp.frontend.plain_state import shard_plain_state
from simplefsdp.frontend.wrapped import KEPT, ignored_params, layouts_of

log = logging.getLogger("simplefsdp")
_ORIGINAL = "_simple_fsdp_sharded"  # on every original parameter that was sharded: its FQN
_FULL = "_simple_fsdp_full"  # on every full parameter that stands for a shard: the shard's FQN
_NOT_IN_MODEL = (
    (_ORIGINAL, "before simple_fsdp", "tensor", "after simple_fsdp"),
    (_FULL, "inside unsharded", "full copy", "outside"),
)


def mark_original(param: Tensor, fqn: str) -> None:
    """Note on a parameter that a shard took its place, and refuse gradients of it from now on: what
    is no module may hold it, as a layer of Keras does, or a closure."""
    setattr(param, _ORIGINAL, fqn)

    def refuse(param: Tensor) -> None:
        raise ValueError(
            f"{fqn}: backward reached the parameter as it was before simple_fsdp, which the model "
            "no longer has, so that nothing would be trained; let forward read it from the module "
            "(self.weight), not from where it was kept before"
        )

    if param.requires_grad and param.is_leaf:
        param.register_post_accumulate_grad_hook(refuse)


class _Replaced(NamedTuple):
    """A shard that another parameter took the place of; not noted on it: it may be pickled."""

    shard: weakref.ref[Tensor]
    owner: weakref.ref[nn.Module]
    name: str
    fqn: str


_replaced: dict[tuple[int, int, str], _Replaced] = {}


def note_replaced(owner: nn.Module, name: str, by: Tensor, fqn: str) -> None:
    """Note that ``by`` is about to take a shard's place, as by ``load_state_dict(assign=True)``."""
    shard = owner._parameters.get(name)
    if shard is not None and shard is not by:
        key = id(shard), id(owner), name
        until: weakref.ref[Tensor] = weakref.ref(shard, lambda _: _replaced.pop(key, None))
        _replaced[key] = _Replaced(until, weakref.ref(owner), name, fqn)


def refuse_replaced(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds a shard its model no longer has, but not its replacement.

    Raises:
        ValueError: ``optimizer`` has such shards.
    """
    if not _replaced:
        return
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key, note in list(_replaced.items()):
        shard, owner = note.shard(), note.owner()
        if shard is None or owner is None:
            _replaced.pop(key, None)  # the garbage collector may have been faster
            continue
        now = owner._parameters.get(note.name)
        if id(shard) in held and isinstance(now, DTensor) and id(now) not in held:
            raise ValueError(
                f"{type(optimizer).__name__}: holds {note.fqn} as it was before another parameter "
                "took its place (load_state_dict(assign=True)), so that the step would not train "
                "what the model has now; make the optimizer after that, or load without assign"
            )


def mark_full(param: nn.Parameter, fqn: str) -> nn.Parameter:
    """Note on a full parameter that it stands for a shard, inside ``unsharded``."""
    setattr(param, _FULL, fqn)
    return param


def stands_for_shard(param: object) -> bool:
    """Whether ``param`` is, or was, a full parameter in a shard's place, inside ``unsharded``."""
    return hasattr(param, _FULL)


def is_original(param: Tensor) -> bool:
    """Whether a shard took the place of ``param``."""
    return hasattr(param, _ORIGINAL)


@functools.cache
def refuse_steps() -> None:
    """From the first wrap of a process on, refuse steps of tensors that are not in the model, or
    whose values are not what was assigned to them; and shard a plain model's optimizer state."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    refuse_replaced(optimizer)
    shard_plain_state(optimizer)
    for group in optimizer.param_groups:
        refuse_assigned_since(group["params"])
        for param in group["params"]:
            for mark, then, what, instead in _NOT_IN_MODEL:
                if hasattr(param, mark):
                    raise ValueError(
                        f"{type(optimizer).__name__}: holds {getattr(param, mark)} as it was "
                        f"{then}, a {what} that the model no longer has, so that the step would "
                        f"train nothing; make the optimizer {instead}"
                    )


def refuse_unsharded(model: nn.Module) -> None:
    """Refuse a trainable parameter that came after the wrap.

    Raises:
        ValueError: ``model`` has one.
    """
    ignored = ignored_params([model])
    for fqn, param in model.named_parameters():
        is_ours = isinstance(param, DTensor) or stands_for_shard(param)
        # What is no nn.Parameter, torch.func.functional_call has put there for a while.
        came = isinstance(param, nn.Parameter) and param.requires_grad and not is_ours
        if came and id(param) not in ignored:
            raise ValueError(
                f"{fqn}: is not sharded: it came after simple_fsdp, so every rank would train one "
                "of its own; add parameters (get_peft_model, resize_token_embeddings) first, then "
                "call simple_fsdp"
            )


run_as_it_is(refuse_unsharded)


def check_before_eager_forward(model: nn.Module) -> None:
    """See that no parameter came after the wrap, and that nothing records the forward that cannot
    record gathers; gather again what is kept and has changed; say if a mode keeps the model eager.
    """
    if torch.jit.is_tracing() and _sends_or_keeps(model):  # type: ignore[attr-defined]
        raise ValueError(
            f"torch.jit.trace of {type(model).__name__}, or what is built on it (tensorboard's "
            "add_graph, counters of FLOPs, torch.onnx.export(dynamo=False)), cannot record how "
            "parameters are gathered; trace inside `with simplefsdp.unsharded(model, "
            "writeback=False):`"
        )
    refuse_unsharded(model)
    refresh_all(model)
    mode = dispatch_mode()
    if mode is not None:
        _warn_of_mode(mode)
    elif is_skipped_by_dynamo(model):
        _warn_of_skipped(type(model).__name__)


run_as_it_is(check_before_eager_forward)


def _sends_or_keeps(model: nn.Module) -> bool:
    """Whether a full parameter of ``model`` is more than a view, or a copy, of what a rank has."""
    return any(
        module.__dict__[KEPT] or any(layout.spec.shard_ranks > 1 for layout in layouts.values())
        for module in model.modules()
        if (layouts := layouts_of(module))
    )


@functools.cache
def _warn_of_mode(name: str) -> None:
    log.warning(
        "inside %s the model runs eagerly, compiled or not: torch.compile does nothing while a "
        "TorchDispatchMode is active, so no collective is bucketed or moved there",
        name,
    )


@functools.cache
def _warn_of_skipped(name: str) -> None:
    log.warning(
        "%s was compiled, but runs eagerly: Dynamo gave up on its forward, as it does when tracing "
        "that raised an exception, or when it was compiled too often. torch.compiler.reset() has "
        "it compiled again",
        name,
    )
