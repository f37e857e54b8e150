"""A plain loss plus a penalty that is computed from parameters outside of forward.

In ``loss + sum(p.square().sum() for p in model.parameters())`` the penalty is a DTensor, and so is
the sum, and so is the gradient that torch gives the plain loss, whose backward cannot take it. Here
the loss gets a plain gradient. The penalty's own goes to the shards, and is right as it is: all
ranks compute the same penalty. That holds if it is computed from DTensors and numbers only. With a
tensor of this rank's in it, its gradient would be this rank's alone, so that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp import _torch
from simplefsdp.frontend.reading import in_forward

_aten = torch.ops.aten


@functools.cache
def handle_penalties() -> None:
    """Have sums of plain tensors and DTensors handled, from the first wrap of a process on."""
    for op in (_aten.add.Tensor, _aten.sub.Tensor):
        _torch.handle_dtensor_op(op, _add)


def _add(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    terms = [term for term in args if isinstance(term, Tensor)]
    losses = [term for term in terms if not isinstance(term, DTensor) and term.requires_grad]
    if losses and torch.is_grad_enabled() and not in_forward():
        kinds = [_kind_of(term) for term in terms if isinstance(term, DTensor)]
        if "mixed" in kinds:
            raise ValueError(
                "a loss plus what a parameter and a tensor of this rank gave outside of forward: "
                "the parameter's gradient would be this rank's alone; compute it in the forward of "
                "a module that simple_fsdp wraps, or with a number in the place of the tensor"
            )
        for loss in losses if kinds == ["penalty"] else ():
            loss.register_hook(_plain)
    return _torch.default_dtensor_op(op, args, kwargs)


def _plain(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _kind_of(term: DTensor) -> str:
    """What ``term`` is computed from: ``"penalty"`` of DTensors only, ``"mixed"`` of plain tensors,
    too, ``"other"`` if its autograd graph does not tell, as of tensors that were made DTensors."""
    left, seen = [term.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return "other"
        if any(_is_of_this_rank(getattr(node, name)) for name in _saved_by(type(node))):
            return "mixed"
        left += [function for function, _ in node.next_functions]
    return "penalty"


def _is_of_this_rank(saved: Any) -> bool:
    """Whether what an autograd node has saved is a plain tensor, and not a number, which is saved
    as a tensor whose dtype gives way to that of any other."""
    if type(saved) is not Tensor:
        return False
    small = torch.empty((), dtype=torch.float16 if saved.is_floating_point() else torch.int8)
    return saved.dim() > 0 or torch.result_type(saved, small) != small.dtype


@functools.cache
def _saved_by(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]
