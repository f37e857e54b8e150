"""The layout of ranks: their mesh, and its dimensions for data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simplefsdp.models.options import ParallelOptions

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class RankLayout:
    """How many ranks replicate, shard and split tensors; their product is the world size."""

    replicate: int
    shard: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tp

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which is how many different batches a step reads."""
        return self.replicate * self.shard


def plan_layout(options: ParallelOptions, world_size: int, node_ranks: int) -> RankLayout:
    """Divide ``world_size`` ranks by mode and tensor-parallel size.

    ``node_ranks``, the ranks of a node, determines the default group size of ``hybrid_shard``.
    Raises a ValueError if the numbers do not divide evenly.
    """
    if world_size % options.tp:
        raise ValueError(f"--tp {options.tp} does not divide {world_size} ranks")
    dp = world_size // options.tp
    if options.mode == "replicate":
        return RankLayout(replicate=dp, shard=1, tp=options.tp)
    if options.mode == "fully_shard":
        return RankLayout(replicate=1, shard=dp, tp=options.tp)
    shard = options.shard_size or max(1, node_ranks // options.tp)
    if dp % shard or dp == shard:
        raise ValueError(
            f"--mode hybrid_shard needs several groups: {dp} data-parallel ranks cannot be split "
            f"into groups of {shard}; give another --shard-size, or use --mode fully_shard"
        )
    return RankLayout(replicate=dp // shard, shard=shard, tp=options.tp)


def make_mesh(layout: RankLayout, options: ParallelOptions, device: str) -> DeviceMesh:
    """The mesh of all ranks, with a ``tp`` dimension (last) if there is tensor parallelism."""
    if options.mode == "hybrid_shard":
        dims = {"replicate": layout.replicate, "shard": layout.shard}
    else:
        dims = {"dp": layout.dp}
    if layout.tp > 1:
        dims["tp"] = layout.tp
    return init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that ``simple_fsdp`` shards over: all but ``tp``."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def precision_policy(options: ParallelOptions, device: str) -> MixedPrecisionPolicy:
    """bfloat16 gathers and compute with float32 reductions, or full precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    wanted = options.mixed_precision
    if wanted == "bf16" or (wanted == "auto" and device == "cuda"):
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()
