"""A plain loss plus a penalty that is computed from parameters outside of forward.

In ``loss + sum(p.square().sum() for p in model.parameters())`` the penalty is a DTensor, and so is
the sum, and so is the gradient that torch gives the plain loss, whose backward cannot take it. Here
the loss gets a plain gradient. The penalty's own goes to the shards, and is right as it is if all
ranks compute the same penalty: from DTensors, and from numbers that are the same on all ranks,
which the ranks compare. With a tensor or a number of this rank's in it, its gradient would be this
rank's alone, so that raises.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp import _torch
from simplefsdp.frontend.reading import in_forward

_aten = torch.ops.aten
_IS_LOSS = "simple_fsdp_loss"  # on the autograd node of a plain loss that a penalty was added to
_MIXED = (
    "a loss plus what a parameter and a tensor, or a number, of this rank gave outside of forward: "
    "the parameter's gradient would be this rank's alone; compute it in the forward of a module "
    "that simple_fsdp wraps, or with a number that is the same on all ranks"
)


@functools.cache
def handle_penalties() -> None:
    """Have sums of plain tensors and DTensors handled, from the first wrap of a process on."""
    for op in (_aten.add.Tensor, _aten.sub.Tensor):
        _torch.handle_dtensor_op(op, _add)


def _add(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    terms = [term for term in args if isinstance(term, Tensor)]
    losses = [term for term in terms if not isinstance(term, DTensor) and term.requires_grad]
    penalties = [term for term in terms if isinstance(term, DTensor) and term.requires_grad]
    if losses and penalties and torch.is_grad_enabled() and not in_forward():
        (penalty,) = penalties
        numbers = _numbers_in(penalty)
        if numbers is not None:
            _compare(numbers, penalty)
            for loss in losses:
                loss.register_hook(_plain)
                if loss.grad_fn is not None:
                    loss.grad_fn.metadata[_IS_LOSS] = True  # type: ignore[index]
    return _torch.default_dtensor_op(op, args, kwargs)


def _plain(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _numbers_in(penalty: DTensor) -> list[str] | None:
    """What ``penalty`` is computed from beside DTensors, as text, without losses that it was added
    to before; None if its autograd graph does not tell, as of tensors that were made DTensors.

    Raises:
        ValueError: plain tensors are among it.
    """
    left, seen = [penalty.grad_fn], set()
    found: list[str] = []
    while left:
        node = left.pop()
        if node is None or node in seen or _IS_LOSS in node.metadata:  # type: ignore[operator]
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        for name in _saved_by(type(node)):
            saved = getattr(node, name)
            if _is_of_this_rank(saved):
                raise ValueError(_MIXED)
            found += [] if isinstance(saved, DTensor) else [f"{name} {saved}"]
        left += [function for function, _ in node.next_functions]
    return found


def _compare(numbers: list[str], penalty: DTensor) -> None:
    """Raise on all ranks if they have computed ``penalty`` with different numbers; collective."""
    own = zlib.crc32("\n".join(numbers).encode())
    highest = torch.tensor([own, -own], device=penalty.device_mesh.device_type)
    for group in penalty.device_mesh.get_all_groups():
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    if highest[0] != -highest[1]:
        raise ValueError(_MIXED)


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
