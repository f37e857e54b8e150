"""Where a parameter's shards live: the modes, and composition with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from simplefsdp._torch import grad_dtype_override, has_no_data
from simplefsdp.choices import MODES

# By mode: the mesh that it needs, and the dimensions of it that shards and copies are spread over.
_MESH_OF_MODE = {
    "fully_shard": ("a 1-D mesh: the ranks that share the shards", 0, None),
    "hybrid_shard": ("a 2-D mesh: (ranks that hold copies, ranks that share the shards)", 1, 0),
    "replicate": ("a 1-D mesh: the ranks that hold copies", None, 0),
}


@dataclass(frozen=True)
class DataParallel:
    """The data-parallel mesh and what each of its dimensions is for."""

    mesh: DeviceMesh  # 1-D, or 2-D for ``hybrid_shard``
    shard_dim: int | None  # mesh dimension that parameters are sharded over, or None
    replicate_dim: int | None  # mesh dimension that holds copies, or None

    @property
    def averages(self) -> bool:
        """Whether every group can reduce with ``avg``: of torch's backends only NCCL can. The fake
        backend on a CUDA mesh stands in for NCCL, so that a plan made without GPUs is for the graph
        that GPUs will run."""
        device = self.mesh.device_type
        can = {f"{device}:nccl", f"{device}:fake"} if device == "cuda" else set()
        configs = [dist.get_backend_config(group) for group in self.mesh.get_all_groups()]
        return all(can & set(config.split(",")) for config in configs)

    def group_of(self, dim: int | None) -> tuple[str, int]:
        """Name and size of the process group along ``dim``; ("", 1) where there is none."""
        if dim is None:
            return "", 1
        return self.mesh.get_group(dim).group_name, self.mesh.size(dim)

    def groups_of(self, *dims: int | None) -> tuple[tuple[str, int], ...]:
        """Name and size of the group along each of ``dims`` that is a dimension of > 1 ranks."""
        return tuple(group for group in map(self.group_of, dims) if group[1] > 1)

    def shard_mesh(self) -> DeviceMesh:
        """The ranks that share the shards, on a 1-D mesh; where nothing is sharded, the copies."""
        if self.mesh.ndim == 1:
            return self.mesh
        return DeviceMesh.from_group(self.mesh.get_group(self.shard_dim), self.mesh.device_type)

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Placements on ``mesh`` of a parameter that is sharded along ``dim``; all copies if that
        is None, for a parameter that cannot be sharded."""
        return tuple(
            Shard(dim) if dim is not None and mesh_dim == self.shard_dim else Replicate()
            for mesh_dim in range(self.mesh.ndim)
        )


def all_ranks() -> DeviceMesh:
    """The 1-D mesh of all ranks, as FSDP2 makes it where it is given none."""
    if not dist.is_initialized():
        raise ValueError(
            "mesh: there is no process group to take all ranks of; call "
            "torch.distributed.init_process_group() first, under torchrun, or pass a mesh"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def data_parallel(mesh: DeviceMesh, mode: str) -> DataParallel:
    """Check ``mesh`` against ``mode`` and say what its dimensions are for."""
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a torch.distributed.device_mesh.DeviceMesh, got "
            f"{type(mesh).__name__}; make one with init_device_mesh(device_type, (ranks,))"
        )
    needed, shard_dim, replicate_dim = _MESH_OF_MODE[mode]
    if mesh.ndim != (2 if mode == "hybrid_shard" else 1):
        other = "mode='hybrid_shard', which FSDP2 infers" if mesh.ndim == 2 else "another mode"
        raise ValueError(
            f"mesh: mode {mode!r} needs {needed}; got a {mesh.ndim}-D mesh of shape "
            f"{tuple(mesh.shape)}. Slice it by name (mesh['dp']), or give {other}"
        )
    return DataParallel(mesh, shard_dim, replicate_dim)


@dataclass(frozen=True)
class TensorParallel:
    """What a parameter was before the wrap, if tensor parallelism had made it a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: object) -> TensorParallel:
        return self  # immutable, and process groups cannot be copied

    def rewrap(self, full: Tensor) -> DTensor:
        """The gathered local tensor as the tensor-parallel DTensor that the model expects."""
        return dtensor_of(full, self.mesh, self.placements, self.shape, self.stride)


def dtensor_of(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """``local``, this rank's part, as a DTensor of the global shape and strides; sends nothing."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def parameter_like(param: Tensor, value: Tensor) -> nn.Parameter:
    """``value`` in the place of ``param``: as trainable, with the marks a user put on it."""
    made = nn.Parameter(value, requires_grad=param.requires_grad)
    # Such as no_weight_decay, but not what belongs to the class of a tensor.
    own = vars(param.detach())
    made.__dict__.update({name: mark for name, mark in vars(param).items() if name not in own})
    if (override := grad_dtype_override(param)) is not None:
        made.grad_dtype = override.dtype
    return made


def dtensor_like(param: DTensor, local: Tensor) -> DTensor:
    """``local``, this rank's part of a tensor that is sharded as ``param`` is; it may have further
    dimensions at its end."""
    further = local.shape[param.dim() :]
    shape = param.shape + further
    stride = (*(n * further.numel() for n in param.stride()), *local.stride()[param.dim() :])
    return dtensor_of(local, param.device_mesh, param.placements, shape, stride)


def tensor_parallel_of(param: Tensor) -> TensorParallel | None:
    """The tensor-parallel layout of ``param``, or None for a plain tensor."""
    if not isinstance(param, DTensor):
        return None
    return TensorParallel(param.device_mesh, param.placements, param.shape, param.stride())


def shard(
    local: Tensor, dp: DataParallel, tp: TensorParallel | None, dim: int, sends: bool = True
) -> DTensor:
    """A parameter as a DTensor, sharded along ``dim`` over the data-parallel mesh; ``local`` is all
    of it that tensor parallelism has given to this rank.

    Rank 0 of each data-parallel group speaks for all: its values are scattered (or broadcast),
    so that ranks that were not seeded alike still hold one model. Tensors without data, on meta
    or fake, stay so and cost no communication; nor is anything sent if not ``sends``: then each
    rank keeps its part of what it has. A tensor-parallel parameter ends on the mesh
    (tensor, data), in which plain left-to-right ``Shard`` placements describe exactly what was
    done: first split by tensor parallelism, then each part by us, uneven sizes included.
    """
    local = local.detach()
    placements = dp.placements(dim if local.dim() else None)
    if has_no_data(local) or not sends:
        sharded = _own_part(local, dp.mesh, placements)
    else:
        sharded = distribute(local, dp.mesh, placements)
    if tp is None:
        return sharded
    mesh = joined(tp.mesh, dp.mesh)
    return dtensor_of(sharded.to_local(), mesh, (*tp.placements, *placements), tp.shape, tp.stride)


def local_part(tensor: Tensor) -> Tensor:
    """What a DTensor holds on this rank; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors lie in the same memory, at least in part; empty ones do not."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    except NotImplementedError:  # inside a transform of torch.func, a tensor has no memory
        return False


def is_float8(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is a one-byte floating-point type, which is stored, not computed with."""
    return dtype.is_floating_point and dtype.itemsize == 1


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements: compared by these, NaN equals NaN."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def on_the_wire(tensor: Tensor) -> Tensor:
    """``tensor`` as every backend can send it: float8 as plain bytes, complex as pairs of real."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.uint8) if is_float8(tensor.dtype) else tensor


def off_the_wire(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`on_the_wire`: ``sent`` as a tensor of ``dtype``."""
    if dtype.is_complex:
        return torch.view_as_complex(sent)
    return sent if sent.dtype == dtype else sent.view(dtype)


def distribute(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Rank 0's ``full`` as a DTensor on ``mesh``; collective."""
    sharded = distribute_tensor(on_the_wire(full), mesh, placements, src_data_rank=0)
    if sharded.dtype == full.dtype:
        return sharded
    local = off_the_wire(sharded.to_local(), full.dtype)
    return dtensor_of(local, mesh, placements, full.shape, full.stride())


def rank_0s(number: int, mesh: DeviceMesh) -> int:
    """The first rank's ``number``, on every rank of ``mesh``; collective."""
    told = torch.tensor(number, dtype=torch.int64, device=mesh.device_type)
    from_first_rank(told, mesh.get_all_groups())
    return int(told)


def from_first_rank(tensor: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Overwrite ``tensor`` by what the first rank of all these groups has; collective."""
    for group in groups:
        if group.size() > 1:
            dist.broadcast(tensor, group=group, group_src=0)


def highest_of_ranks(flags: Sequence[bool], mesh: DeviceMesh) -> list[bool]:
    """Of each flag, whether it is set on any rank of ``mesh``; collective."""
    found = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
    for group in mesh.get_all_groups():
        if group.size() > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in found.tolist()]


def part_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's part of ``size`` begins, and its extent, split as by ``torch.chunk`` and
    DTensor: pieces of ceil(size / ranks), the last ones smaller or empty."""
    chunk = -(-size // ranks)
    begin = min(rank * chunk, size)
    return begin, min(chunk, size - begin)


def _own_part(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """What ``distribute_tensor`` makes of a tensor of which nothing is sent; but this does not make
    the parts of the other ranks, of which there may be hundreds."""
    part = local
    here = mesh.get_coordinate() or ()
    for size, rank, placement in zip(mesh.shape, here, placements, strict=True):
        if isinstance(placement, Shard):
            begin, rows = part_of(part.shape[placement.dim], size, rank)
            part = part.narrow(placement.dim, begin, rows).contiguous()
    if not has_no_data(part):
        # A copy: else the whole, of which it may be a view, would stay in memory.
        part = part.to(mesh.device_type, copy=True)
    return dtensor_of(part, mesh, placements, local.shape, local.stride())


def joined(tp: DeviceMesh, dp: DeviceMesh) -> DeviceMesh:
    """The mesh whose dimensions are those of ``tp`` followed by those of ``dp``.

    It reuses their process groups. Both must be slices of one regular mesh, as
    ``init_device_mesh`` makes them: then the rank at (t, d) is tp[t] + dp[d] - this rank.
    """
    rank = dist.get_rank()
    joint = tp.mesh.reshape(*tp.mesh.shape, *[1] * dp.ndim) + dp.mesh - rank
    regular = joint.unique().numel() == joint.numel()
    if not regular or int(joint.min()) < 0 or int(joint.max()) >= dist.get_world_size():
        raise ValueError(
            f"mesh: the data-parallel mesh {dp} and the tensor-parallel mesh {tp} of a parameter "
            "must be different dimensions of one mesh; make both with "
            "init_device_mesh(device_type, (data_ranks, tensor_ranks), mesh_dim_names=('dp', "
            "'tp')) and pass mesh['tp'] to parallelize_module, mesh['dp'] to simple_fsdp"
        )
    names = (*_dim_names(tp, "tp"), *_dim_names(dp, "dp"))
    groups = [*tp.get_all_groups(), *dp.get_all_groups()]
    return DeviceMesh.from_group(groups, dp.device_type, mesh=joint, mesh_dim_names=names)


def _dim_names(mesh: DeviceMesh, default: str) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"{default}_{dim}" for dim in range(mesh.ndim))


def local_nbytes(tensors: Iterable[object]) -> int:
    """Bytes that this rank holds of ``tensors``; what is no tensor counts nothing."""
    return sum(local_part(t).nbytes for t in tensors if isinstance(t, Tensor))
