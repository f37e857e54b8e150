"""``DTensor.full_tensor``, of which some tensors are gathered otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException
from torch.distributed.tensor import DTensor

from simplefsdp._torch.dynamo import run_as_it_is
from simplefsdp._torch.tensors import storage_of

_of_torch = DTensor.full_tensor


def handle_full_tensor(
    handler: Callable[[DTensor], Tensor | None], looks_handled: Callable[[DTensor], bool]
) -> None:
    """Have ``full_tensor()`` of leaves that want a gradient done otherwise, where it is called
    without ``grad_placements``.

    Args:
        handler: gives the full tensor, or None to have torch give it.
        looks_handled: of what stands for a leaf while Dynamo traces: whether ``handler`` may give
            it. The graph breaks there.
    """

    @functools.wraps(_of_torch)
    def full_tensor(self: DTensor, *, grad_placements: Any = None) -> Tensor:
        full, by_default = None, grad_placements is None and torch.is_grad_enabled()
        if by_default and self.requires_grad and self.is_leaf:
            full = handler(self)
            if full is None and storage_of(self._local_tensor) and looks_handled(self):
                _break_the_graph()
        return _of_torch(self, grad_placements=grad_placements) if full is None else full

    run_as_it_is(full_tensor)
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def _break_the_graph() -> None:
    """Called where Dynamo runs a node on what stands for its inputs: the call is no part of the
    graph then."""
    raise UnsupportedFakeTensorException(
        "full_tensor() of a parameter is not traced: its gradient is reduced over ranks; read the "
        "parameter in a forward (see simplefsdp.register_forward_method), write a penalty as "
        "weight.square().sum().full_tensor(), or call it outside of what is compiled as a whole"
    )
