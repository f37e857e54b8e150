"""Planning: what each rank would hold, computed with meta tensors and a fake process group."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from simplefsdp.frontend.placement import local_nbytes
from simplefsdp.launcher.ranks import fake_ranks
from simplefsdp.models.build import wrapped_model
from simplefsdp.models.layout import RankLayout, make_mesh, precision_policy
from simplefsdp.train import elastic
from simplefsdp.train.build import make_optimizer
from simplefsdp.train.config import TrainConfig
from simplefsdp.words import plural


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of what stays in memory between steps on rank 0, which holds the most of all ranks.

    ``deferred_nbytes`` are the full, not yet reduced gradients of micro-batches. While a step runs,
    activations and gathered parameters come on top; ``largest_gather_nbytes`` is the size of the
    largest gathered parameter in its compute dtype.
    """

    n_parameters: int
    parameters_nbytes: int
    gradients_nbytes: int
    deferred_nbytes: int
    optimizer_nbytes: int
    largest_gather_nbytes: int

    @property
    def total_nbytes(self) -> int:
        """All that stays."""
        gradients = self.gradients_nbytes + self.deferred_nbytes
        return self.parameters_nbytes + gradients + self.optimizer_nbytes


def plan_memory(config: TrainConfig, layout: RankLayout) -> MemoryPlan:
    """Build the wrapped model and its optimizer on meta, as rank 0 would, and add up the bytes."""
    with fake_ranks(layout.world_size):
        mesh = make_mesh(layout, config.parallel, "cpu")
        model = wrapped_model(config.model, config.parallel, mesh)
        optimizer = make_optimizer(model, config.optim)
        states: Any = get_optimizer_state_dict(model, optimizer)["state"]  # creates the states
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        # A dry run plans for GPUs, so "auto" precision is resolved as on CUDA.
        policy = precision_policy(config.parallel, "cuda")

        def full_nbytes(p: nn.Parameter, dtype: torch.dtype | None) -> int:
            return p.numel() // layout.tp * (dtype or p.dtype).itemsize

        deferred = trained if elastic.divide(config, layout.dp).microbatches > 1 else []
        return MemoryPlan(
            n_parameters=sum(p.numel() for p in parameters),
            parameters_nbytes=local_nbytes(parameters),
            gradients_nbytes=local_nbytes(trained),
            deferred_nbytes=sum(full_nbytes(p, policy.reduce_dtype) for p in deferred),
            optimizer_nbytes=local_nbytes(v for state in states.values() for v in state.values()),
            largest_gather_nbytes=max(full_nbytes(p, policy.param_dtype) for p in parameters),
        )


def print_plan(config: TrainConfig, layout: RankLayout, plan: MemoryPlan) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"--model {config.model.model}: {plan.n_parameters:,} parameters, "
        f"--mode {config.parallel.mode} on {plural(layout.world_size, 'rank')} "
        f"(replicate {layout.replicate} x shard {layout.shard} x tp {layout.tp})"
    )
    batch = elastic.divide(config, layout.dp)
    console.print(
        f"{plural(batch.at_once, 'sequence')} at once on a rank, "
        f"{plural(batch.microbatches, 'time')} a step"
    )
    rows = {
        "parameters": plan.parameters_nbytes,
        "gradients": plan.gradients_nbytes,
        **({"gradients not reduced": plan.deferred_nbytes} if plan.deferred_nbytes else {}),
        "optimizer (AdamW)": plan.optimizer_nbytes,
        "total": plan.total_nbytes,
    }
    table = Table("per rank", Column("bytes", justify="right"), Column("GiB", justify="right"))
    for name, nbytes in rows.items():
        last = name == "optimizer (AdamW)"
        table.add_row(name, f"{nbytes:,}", f"{nbytes / 2**30:.3f}", end_section=last)
    console.print(table)
    console.print(
        "on top while a step runs: activations, and gathered parameters (the largest is "
        f"{plan.largest_gather_nbytes / 2**30:.3f} GiB in its compute dtype)"
    )
