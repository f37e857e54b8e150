"""``full_tensor()`` and ``to_local()`` of parameters, and of what is computed from them, in a loss.

torch takes the gradient of what is whole on each rank to be the same on all ranks, and each keeps
its own. In a loss of this rank's batch (a head that is fused with the loss, a learned temperature)
it is not: the parameter would learn from one batch, and copies of it would part. So on meshes of
data parallelism it is reduced as the gradients of forward are, at once. Where it is the same on all
ranks, as of a penalty, the average is what it was.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simplefsdp._torch import GradientReduction, reduce_gradients_of_dtensors
from simplefsdp.frontend.living import modules
from simplefsdp.frontend.wrapped import LAYOUTS, shards_of

_ndim_of: dict[DeviceMesh, int] = {}


def reduce_in_losses(shards: Iterable[nn.Parameter], data_parallel_ndim: int) -> None:
    """Have it so for the meshes of these shards, whose last dimensions are data-parallel."""
    _ndim_of.update({s.device_mesh: data_parallel_ndim for s in shards if isinstance(s, DTensor)})
    _begin()


@functools.cache
def _begin() -> None:
    reduce_gradients_of_dtensors(_reduction_of)


def _reduction_of(mesh: DeviceMesh) -> GradientReduction | None:
    ndim = _ndim_of.get(mesh)
    return None if ndim is None else GradientReduction(ndim, lambda: _divide_factor(mesh))


def _divide_factor(mesh: DeviceMesh) -> float | None:
    """That of the living models with shards on ``mesh``: of a tensor nothing tells whose it is."""
    factors = _factors(mesh)
    if len(factors) > 1:
        gc.collect()  # models that nobody has any more
        factors = _factors(mesh)
    if len(factors) > 1:
        found = ", ".join(sorted("none" if f is None else str(f) for f in factors))
        raise ValueError(
            "full_tensor() or to_local() of a parameter, or of what is computed from it, in a "
            f"loss: modules on {mesh} have other factors of set_gradient_divide_factor than "
            f"others: {found}; read the parameter in a forward, or name one of your own with "
            "simplefsdp.register_forward_method"
        )
    return next(iter(factors), None)


def _factors(mesh: DeviceMesh) -> set[float | None]:
    return {
        layouts[name].spec.divide_factor
        for module in modules()
        if (layouts := module.__dict__.get(LAYOUTS))
        for name, shard in shards_of(module)
        if name in layouts and shard.device_mesh == mesh
    }
