"""Tensors and DTensors, their memory and their gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.fx.traceback as fx_traceback
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._random import is_rng_supported_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map


@contextmanager
def annotate_backward(marks: dict[str, object]) -> Iterator[None]:
    """Mark the nodes that an autograd function's backward traces inside.

    Before 2.13, AOTAutograd replaced the marks of a backward node by those of the forward node that
    it belongs to. It skips nodes that are tagged as required in backward, which these are anyway.
    """
    meta = fx_traceback.current_meta
    # torch.__version__ is a TorchVersion: it compares as a version, not as a string.
    overwrites = torch.__version__ < "2.13" and "partitioner_tag" in meta
    before = meta.get("partitioner_tag")
    with fx_traceback.annotate(marks):
        if overwrites:
            meta["partitioner_tag"] = "must_be_in_backward"
        try:
            yield
        finally:
            if overwrites:
                meta["partitioner_tag"] = before


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of ``tensor``, or for its accumulation."""
    return any(hooks_of(tensor))


def hooks_of(tensor: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks on the gradient of ``tensor``, and those after its accumulation, which are called
    with the tensor. Hooks that are replaced in these dictionaries are called instead."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tensor._backward_hooks or {}, after or {}


def is_plain_tensor(value: object) -> bool:
    """Whether a value is a tensor, and not of a subclass that holds other tensors."""
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)


@contextmanager
def watch_collectives_in_place(*, only_if: bool) -> Iterator[list[str]]:
    """Gives a list. If ``only_if``, the name of each ``c10d`` operator that is called inside is
    added to it: such collectives write to their arguments, and a tracing compiler misses them."""
    names: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                names.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Watch() if only_if else nullcontext():
        yield names


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values: it is on meta, or fake."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_traced_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` stands for another one while Dynamo or AOTAutograd traces."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def order_of_saved(node: Node) -> int:
    """Sort key for the values that a forward graph saves: AOTAutograd wants 0 first, 2 last."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return 2
    return int(node.meta.get("saved_tensor_with_no_vc_check", False))


def storage_of(value: object) -> int | None:
    """A number that identifies the storage of a fake tensor; None for anything else."""
    return storage_number(value) if isinstance(value, FakeTensor) else None


def layout_of(value: torch.Tensor) -> tuple[object, ...]:
    """The layout of a tensor in memory, for comparisons; for a DTensor with that of its shard."""
    layout = (*value.shape,), value.stride(), value.dtype, value.device, value.requires_grad
    if not isinstance(value, DTensor):
        return type(value), *layout
    shard = layout_of(value._local_tensor)
    return type(value), *layout, value.placements, value.device_mesh, shard


def shard_storage_of(value: object) -> int | None:
    """:func:`storage_of` the local shard of a DTensor, or of a plain tensor itself."""
    return storage_of(getattr(value, "_local_tensor", value))


def storage_number(tensor: torch.Tensor) -> int:
    """A number that identifies a storage, even an empty one, among those that are alive."""
    return tensor.untyped_storage()._cdata


def fake_again(tensor: Any, owner: torch.Tensor | None) -> torch.Tensor:
    """A fake tensor like ``tensor``, on the storage of ``owner``, or on one of its own."""
    with no_dispatch():  # else each call would dispatch to the fake tensor mode, in milliseconds
        if owner is not None:
            storage = owner.untyped_storage()
        else:
            storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        meta.set_(storage, *place)  # type: ignore[call-overload]
        # Like FakeTensor's constructor, but the attributes are copied below, all at once.
        made: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=tensor.device
        )
    made.__dict__.update(tensor.__dict__)
    torch._C._set_throw_on_mutable_data_ptr(made)  # there is no data
    return made


def reduces_in_param_dtype() -> bool:
    """Whether this torch's FSDP2 reduces in ``param_dtype`` where no ``reduce_dtype`` is given;
    since 2.15 it takes the parameter's own dtype, or its ``grad_dtype`` if one is set."""
    return torch.__version__ < "2.15"


class GradDtype(NamedTuple):
    """A ``grad_dtype`` that the user has set; None accepts gradients of any dtype."""

    dtype: torch.dtype | None


def grad_dtype_override(param: torch.Tensor) -> GradDtype | None:
    """The ``grad_dtype`` of a parameter if the user has set one, and this torch can tell."""
    is_set = getattr(param, "_has_grad_dtype_override", False)  # since 2.15
    return GradDtype(param.grad_dtype) if is_set else None


def cast_floating_point(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors cast, also those in nested containers and
    dataclasses."""

    def cast_one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [f.name for f in dataclasses.fields(leaf) if f.init]
            changes = {n: cast_floating_point(getattr(leaf, n), dtype) for n in names}
            return dataclasses.replace(leaf, **changes)
        return leaf

    return tree_map(cast_one, value)


def draws_globally(mesh: DeviceMesh) -> bool:
    """Whether torch draws random DTensors on ``mesh`` as one global tensor; on CPU it does not."""
    return mesh.device_type != "cpu" and is_rng_supported_mesh(mesh)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor or of a DTensor's shard, also if it is empty; None while a compiler
    traces. Its ``_cdata`` is unique as long as somebody holds the storage."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage() if type(local) is torch.Tensor else None


def weak_memory_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """A key for the memory of ``tensor``, which does not hold it: equal for tensors that share it,
    and unlike that of any memory made later; None for a tensor without a storage of its own."""
    memory = memory_of(tensor)
    return None if memory is None else StorageWeakRef(memory)


def is_of_memory(tensor: torch.Tensor, memory: StorageWeakRef) -> bool:
    """Whether a tensor, or a DTensor's shard, is in ``memory``."""
    own = weak_memory_of(tensor)
    return own is not None and own == memory  # such references cannot be compared with None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or a DTensor's shard, has values; it has none while a compiler traces."""
    memory = memory_of(tensor)
    return memory is not None and memory.device.type != "meta"


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, like ``to_local()``, but without dispatch or autograd."""
    return tensor._local_tensor


def is_same_view(one: DTensor, other: DTensor) -> bool:
    """Whether the local tensors of two DTensors are the same view of one memory."""
    memory = weak_memory_of(one)
    views = [
        (local.shape, local.stride(), local.storage_offset(), local.dtype)
        for local in map(local_tensor, (one, other))
    ]
    return memory is not None and is_of_memory(other, memory) and views[0] == views[1]


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Have ``local``, a view of the same memory, be the local tensor of a DTensor."""
    tensor._local_tensor = local


def version_of(tensor: DTensor) -> int:
    """Grows with every write, be it to the DTensor or to the shard in it; but for a tensor that was
    made in inference mode, which does not tell."""
    both = (tensor, local_tensor(tensor))
    return sum(one._version for one in both if not one.is_inference())


def local_of(param: DTensor) -> torch.Tensor:
    """``param.to_local()``, whose gradient gets the layout of ``param``, on every rank.

    torch does so since 2.12, but in twice the host time. 2.11 derives the strides of the whole
    gradient from the local one. If these are not the parameter's, as for an empty shard, autograd
    gathers the gradient, on that rank alone, which hangs. 2.11 also breaks ``create_graph``.
    """
    if not torch.is_grad_enabled():
        return param._local_tensor
    return cast(torch.Tensor, _LocalOf.apply(param))


def grad_like(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """``grad``, as a DTensor with the placement of ``param`` if ``param`` is one. ``grad`` is then
    the local tensor."""
    if not isinstance(param, DTensor):
        return grad
    return DTensor(grad, param._spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


class _LocalOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # a deferred gradient is None, not zeros
        ctx.spec = param._spec
        local = param._local_tensor
        ctx.contiguous = local.is_contiguous()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> DTensor | None:
        if grad is None:
            return None
        spec = ctx.spec
        grad = grad.contiguous() if ctx.contiguous else grad
        if grad.requires_grad:  # under create_graph: autograd continues through from_local()
            whole = {"shape": spec.tensor_meta.shape, "stride": spec.tensor_meta.stride}
            return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False, **whole)
        # Like from_local(), which spends most of its time on checks that are not needed here. The
        # spec is copied, as in torch, because torch may change a spec in place.
        return DTensor(grad, copy.copy(spec), requires_grad=False)  # type: ignore[call-arg,arg-type]


def is_split(placement: Placement) -> bool:
    """Whether a placement gives each rank different elements: a shard, strided or not."""
    return isinstance(placement, (Shard, _StridedShard))


def is_to_empty(fn: Callable[..., Any]) -> bool:
    """Whether ``fn``, an argument of ``Module._apply``, was passed by ``Module.to_empty``."""
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors, views and storage objects refer to the memory of ``tensor``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
