"""Patches ``DTensor.full_tensor``, so that some tensors are gathered in another way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simplefsdp._torch.dynamo import run_as_it_is
from simplefsdp._torch.tensors import storage_of

_of_torch = DTensor.full_tensor


class Other(Enum):
    """What a DTensor was computed from, if it is no leaf."""

    PLAIN = auto()  # a plain tensor, by ``DTensor.from_local``
    UNKNOWN = auto()  # an input of what a compiler traces, of which it does not tell more


Source = Tensor | Other


def handle_full_tensor(
    handler: Callable[[DTensor], Tensor | None],
    looks_handled: Callable[[DTensor], bool],
    computed: Callable[[Tensor, DeviceMesh, Sequence[Source]], Tensor | None],
) -> None:
    """Have ``handler`` do ``full_tensor()`` for leaf tensors that require a gradient, if it is
    called with grad mode on and without ``grad_placements``.

    Args:
        handler: gives the full tensor, or None to have torch gather it.
        looks_handled: while Dynamo traces, a fake tensor stands for the leaf: says whether
            ``handler`` may be responsible for such a leaf. If so, the graph breaks there.
        computed: given the full tensor of what was computed, its mesh, and what it was computed
            from, gives it with another gradient; or None, to have the graph break there.
    """

    @functools.wraps(_of_torch)
    def full_tensor(self: DTensor, *, grad_placements: Any = None) -> Tensor:
        full, by_default = None, grad_placements is None and torch.is_grad_enabled()
        if by_default and self.requires_grad and self.is_leaf:
            full = handler(self)
            if full is None and storage_of(self._local_tensor) and looks_handled(self):
                _break_the_graph()
        elif by_default and self.requires_grad:
            full = computed(_of_torch(self), self.device_mesh, _sources_of(self))
            if full is None:
                _break_the_graph()
        return _of_torch(self, grad_placements=grad_placements) if full is None else full

    run_as_it_is(full_tensor)
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def _sources_of(tensor: Tensor) -> list[Source]:
    """What ``tensor`` was computed from by operators on DTensors."""
    seen, left, found = set[Any](), [tensor.grad_fn], list[Source]()
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "FromTorchTensor" in node.name():
            found.append(Other.PLAIN)
        elif node.name() == "torch::autograd::Error":
            found.append(Other.UNKNOWN)
        elif hasattr(node, "variable"):
            found.append(node.variable)
        else:
            left += [following for following, _ in node.next_functions]
    return found


def _break_the_graph() -> None:
    """Raise what makes Dynamo break the graph. This is called while Dynamo runs a node on fake
    tensors; the node is then left out of the graph."""
    raise UnsupportedFakeTensorException(
        "full_tensor() of a parameter is not traced: its gradient is reduced over ranks; read the "
        "parameter in a forward (see simplefsdp.register_forward_method), write a penalty as "
        "weight.square().sum().full_tensor(), or call it outside of what is compiled as a whole"
    )
