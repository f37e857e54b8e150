"""``param.full_tensor()`` in a loss that is computed outside of forward.

torch takes the gradient of a full tensor to be the same on all ranks: each rank keeps its rows of
the gradient that it has computed itself. With a loss of this rank's batch (a head that is fused
with the loss, a learned temperature) gradients differ. So here the parameter is gathered as in
forward, in its own dtype, and its gradient is reduced as those of forward are, with the same
divisor. A gradient that is the same on all ranks, as of a penalty, equals its average. As with a
forward, all ranks must use it in their losses, or none.

What is computed from parameters (``param.exp().full_tensor()``, ``param.norm().full_tensor()``) is
gathered by torch, and its gradient is then averaged over the ranks, at once, also in a micro-batch.
With ``to_local()``, the gradient is torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simplefsdp._torch import Other, Source, handle_full_tensor, has_no_data, is_traced_tensor
from simplefsdp.frontend.accumulation import deferral_of
from simplefsdp.frontend.gather import gather
from simplefsdp.frontend.gather_spec import GatherSpec
from simplefsdp.frontend.living import is_sharded_alike, living_shards, owner_of
from simplefsdp.frontend.reduce import averaged
from simplefsdp.frontend.wrapped import ParameterLayout, layouts_of


@functools.cache
def reduce_gradients_of_full_tensors() -> None:
    """Have this done from the first wrap of a process on."""
    handle_full_tensor(_full_tensor, _looks_wrapped, _computed)


def _full_tensor(param: DTensor) -> Tensor | None:
    """The full tensor of a wrapped parameter, on every rank; None of any other tensor."""
    owner = owner_of(param) if isinstance(param, nn.Parameter) and not param.is_meta else None
    layout = _layout_of(owner)
    if owner is None or layout is None:
        return None
    spec = layout.spec._replace(param_dtype=None, tensor_class="")
    full = gather(param, *spec.arguments(), **deferral_of(*owner))
    tp = layout.tensor_parallel
    return full if tp is None else tp.rewrap(full).full_tensor()


def _computed(full: Tensor, mesh: DeviceMesh, sources: Sequence[Source]) -> Tensor | None:
    """``full``, whose gradient is averaged if it was computed from wrapped parameters alone; None
    while Dynamo traces, if it cannot tell: AOTAutograd, which comes later, knows still less."""
    if has_no_data(full):
        known = {*sources} == {Other.PLAIN} or all(map(_may_be_wrapped, sources))
        return full if known or _spec_on(mesh) is None else None
    if is_traced_tensor(full):
        spec = _spec_on(mesh) if {*sources} == {Other.UNKNOWN} else None
    else:
        specs = [_spec_of(source) for source in sources if isinstance(source, DTensor)]
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and Other.PLAIN in sources:
            raise ValueError(
                f"{spec.fqn}: full_tensor() of what was computed from a parameter and an "
                "activation, whose gradients are reduced in different ways: call it for each"
            )
    return full if spec is None else cast(Tensor, _Averaged.apply(full, spec))


def _may_be_wrapped(source: Source) -> bool:
    return isinstance(source, DTensor) and _looks_wrapped(source)


def _layout_of(owner: tuple[nn.Module, str] | None) -> ParameterLayout | None:
    return None if owner is None else layouts_of(owner[0]).get(owner[1])


def _spec_of(param: DTensor) -> GatherSpec | None:
    layout = _layout_of(owner_of(param))
    return None if layout is None else layout.spec


def _spec_on(mesh: DeviceMesh) -> GatherSpec | None:
    """How a wrapped parameter on ``mesh`` is gathered; None if there is none."""
    specs = (_spec_of(p) for _, p in living_shards() if p.device_mesh == mesh)
    return next((spec for spec in specs if spec is not None), None)


class _Averaged(torch.autograd.Function):
    """What is the same on all ranks, with a gradient that may not be."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, spec: GatherSpec) -> Tensor:
        ctx.spec = spec
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return averaged(grad, ctx.spec), None


def _looks_wrapped(param: DTensor) -> bool:
    """Whether a wrapped parameter has the layout of ``param``: all that a compiler knows of it."""
    return any(is_sharded_alike(param, shard) for _, shard in living_shards())
