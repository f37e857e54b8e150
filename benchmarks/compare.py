"""What the measurements are held against: the limit, and each other's losses and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from measure import Result
from rows import Row
from transfers import link


@dataclass(frozen=True)
class Limit:
    """The yardstick of the schedules on this wire: see :func:`limit_of`. Seconds."""

    compute_s: float
    wire_s: float
    wire_of: str
    first_gather_s: float
    last_reduce_s: float

    @property
    def total_s(self) -> float:
        """The limit."""
        return max(self.compute_s, self.wire_s) + self.first_gather_s + self.last_reduce_s


def limit_of(row: Row, results: dict[str, Result]) -> Limit:
    """max(compute, wire) + first gather + last reduce.

    compute is the floor's median; wire what all transfers of ``manual`` take (of ``none`` where
    that did not run); the first gather and the last reduce are those of the embedding alone: the
    model cannot start without it, and its gradient is the last to be known. Where the wire is the
    longer one, these two are counted in it already, and the limit is that much too high.
    """
    source = next((n for n in ("manual", "none") if n in results and results[n].ok), None)
    if source is None or not results["floor"].ok:
        raise RuntimeError("the limit needs the floor, and manual or none")
    values = row.vocab * row.dim
    return Limit(
        compute_s=results["floor"].step_s,
        wire_s=results[source].median(lambda s: s.wire_s),
        wire_of=source,
        first_gather_s=link.seconds("gather", values * row.param_dtype.itemsize),
        last_reduce_s=link.seconds("reduce", values * torch.float32.itemsize),
    )


@dataclass(frozen=True)
class Agreement:
    """How far a variant is from its reference, relatively; the largest of each."""

    reference: str
    first_loss: float
    last_loss: float
    gradient: float  # norm of the difference / norm, worst parameter, first step

    def within(self, tolerance: float) -> bool:
        """Whether the first step, of equal weights, agrees."""
        return max(self.first_loss, self.gradient) <= tolerance


def agreements(results: dict[str, Result]) -> dict[str, Agreement]:
    """Of sharded variants with FSDP2 (or the first that ran), of DDP with the floor.

    Sharded variants compute with parameters put together from copies of rank 0's shard, so their
    losses are not the floor's.
    """
    ran = [name for name, result in results.items() if result.ok]
    sharded = [name for name in ran if name not in ("floor", "ddp")]
    pairs = [("ddp", "floor")] if {"ddp", "floor"} <= set(ran) else []
    if sharded:
        reference = "fsdp2_eager" if "fsdp2_eager" in sharded else sharded[0]
        pairs += [(name, reference) for name in sharded if name != reference]
    return {name: _agreement(results, name, reference) for name, reference in pairs}


def _agreement(results: dict[str, Result], name: str, reference: str) -> Agreement:
    one, other = results[name], results[reference]
    return Agreement(
        reference=reference,
        first_loss=_relative(one.first_loss, other.first_loss),
        last_loss=_relative(one.samples[-1].loss, other.samples[-1].loss),
        gradient=max(
            float((one.first_grads[fqn] - grad).norm() / grad.norm().clamp(min=1e-30))
            for fqn, grad in other.first_grads.items()
        ),
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)
