"""What an op costs. A cost is not a field of an op: a merged collective costs less than its parts.

Costs are times in microseconds (``_us``). What a pass decides must be the same on every rank, so a
cost model is data that all ranks share, never a benchmark that each rank runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from inductor_passes.ir.program import Collective, Op, Program


class CostModel(Protocol):
    """Anything that can price the ops of a program.

    Attributes:
        compute_beside: fraction of its speed that compute keeps while anything is in transfer.
    """

    @property
    def compute_beside(self) -> float: ...

    def compute_us(self, program: Program, op: Op) -> float:
        """Time of a compute op on the compute lane, if nothing is in transfer."""
        ...

    def collective_us(self, collective: Collective) -> float:
        """Time of a collective on its communication lane: launch to arrival if the lane is idle."""
        ...


def check_compute_beside(cost: CostModel) -> None:
    """Raise a ValueError unless ``compute_beside`` is above 0 and at most 1."""
    if not 0 < cost.compute_beside <= 1:
        raise ValueError(
            "cost model: compute_beside: expected more than 0 and at most 1, got "
            f"{cost.compute_beside!r}"
        )


@dataclass(frozen=True)
class LinearCost:
    """Latency plus bytes over bandwidth, for collectives and, if nothing better is known, compute.

    A collective takes ``latency_us + nbytes / link_gb_s``, where ``nbytes`` counts the full tensors
    (the alpha-beta model, fitted to gathered bytes as in nccl-tests' tables). The defaults are for
    one node of 8 H100: 30 us and 394 GB/s (meta-pytorch/autoparallel), HBM at 3,350 GB/s, 5 us to
    launch a kernel (estimated).
    """

    latency_us: float = 30.0  # per collective
    link_gb_s: float = 394.0  # 1e9 bytes per second of gathered (or not yet scattered) tensors
    memory_gb_s: float = 3350.0  # of the bytes that a compute op reads and writes
    launch_us: float = 5.0  # per compute op
    # Known times of compute ops by name, which replace the model's.
    op_us: Mapping[str, float] = field(default_factory=dict)
    compute_beside: float = 1.0  # see :class:`CostModel`
    # Time of each member of a bucket but the first; no more than the latency.
    member_us: float = 0.0

    def __post_init__(self) -> None:
        check_compute_beside(self)
        if not 0 <= self.member_us <= self.latency_us:
            raise ValueError(
                f"cost model: member_us: expected 0 to latency_us, {self.latency_us}, got "
                f"{self.member_us}: a bucket would cost more than its members do"
            )

    def compute_us(self, program: Program, op: Op) -> float:
        known = self.op_us.get(op.name)
        if known is not None:
            return known
        return self.launch_us + program.touched_nbytes(op) / (self.memory_gb_s * 1e3)

    def collective_us(self, collective: Collective) -> float:
        latency_us = self.latency_us + self.member_us * (collective.members - 1)
        return latency_us + collective.nbytes / (self.link_gb_s * 1e3)

    def with_flat_buckets(self) -> LinearCost:
        """The same cost model for buckets that travel as one buffer."""
        return replace(self, member_us=0.0)
