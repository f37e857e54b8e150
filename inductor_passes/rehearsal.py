"""What the passes will do to a graph, on paper: buckets, order, and the cost expected of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Graph

from inductor_passes.adapters import _torch, fx
from inductor_passes.adapters.devices import cluster_of, device_name
from inductor_passes.adapters.layouts import BucketLayout
from inductor_passes.adapters.roofline import cost_of, device_of, fused_program
from inductor_passes.garbage import no_garbage_collection
from inductor_passes.ir.buckets import Assignment, plan_buckets
from inductor_passes.ir.cells import with_plain_sizes
from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.ir.text import to_text
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.presets import preset
from inductor_passes.machine.simulate import simulate
from inductor_passes.planner.auto import plan_auto
from inductor_passes.planner.greedy import plan_greedy
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import Plan, evaluate
from inductor_passes.transform.merge import in_one_piece, merge
from inductor_passes.transform.order import OverlapPolicy, overlapped
from inductor_passes.transform.portable import PortableBucket, in_names, in_program
from inductor_passes.transform.windows import buckets_by_module

USABLE = 0.9
"""Fraction of a device's memory that a plan may fill. The rest is left for the device's context,
the communication library's buffers and fragmentation; an estimate."""


@dataclass(frozen=True)
class Auto:
    """How the automatic planner is to choose."""

    cluster: Cluster  # what the machine is
    # Memory budget, see :func:`inductor_passes.planner.auto.plan_auto`. None takes the default of
    # that function, for devices of the cluster, which have :func:`room_nbytes`.
    budget_nbytes: int | None = None
    # ``"search"``, or ``"greedy"``, the published rule.
    planner: Literal["search", "greedy"] = "search"


@dataclass(frozen=True)
class Settings:
    """What the passes are to do; data that is the same on all ranks."""

    assignment: Assignment  # bucket label of each parameter; its order is the one inside buckets
    auto: Auto | None = None  # choose buckets by cost instead
    # Launch each bucket as one collective; else its members, one after the other.
    merge: bool = True
    # Move collectives to where they are hidden; else they stay near their places.
    reorder: bool = True
    layout: BucketLayout = "coalesced"  # how the members of a bucket travel
    policy: OverlapPolicy = field(default_factory=OverlapPolicy)  # limits of the reordering
    # Repeated modules: no collective is placed between the computes of one; see
    # :mod:`inductor_passes.adapters.units`. If there are none, collectives may go anywhere.
    units: tuple[str, ...] = ()


def read(graph: Graph, settings: Settings | None, fqn_of: fx.FqnOf) -> fx.Reading:
    """Read a graph, unplanned, as a program; its computes form units if the settings name any."""
    reading = fx.read(graph, fqn_of)
    return fx.mark_units(reading, settings.units) if settings and settings.units else reading


# Takes a text of everything that a plan depends on, and a function that makes the plan; returns
# the plan, made now or remembered.
Recall = Callable[[str, Callable[[], Plan]], Plan]


def choose(
    reading: fx.Reading, settings: Settings, recall: Recall | None = None
) -> Plan | tuple[Bucket, ...]:
    """The buckets of a graph by the planner that the settings name.

    Args:
        reading: the graph.
        settings: what to do.
        recall: may remember an automatic plan that was made before; see :data:`Recall`.
    """
    if settings.auto is not None:
        return _planned(reading, settings, settings.auto, recall)
    # Limits that the user has set hold for every bucket, so no bucket gets a window of its own.
    by_module = buckets_by_module if settings.policy == OverlapPolicy() else plan_buckets
    buckets = by_module(reading.program, settings.assignment)
    if not settings.merge:
        return tuple(Bucket(b.label, (start,)) for b in buckets for start in b.starts)
    return buckets


def _planned(reading: fx.Reading, settings: Settings, auto: Auto, recall: Recall | None) -> Plan:
    plan = plan_greedy if auto.planner == "greedy" else plan_auto
    budget_nbytes, room = auto.budget_nbytes, None
    if budget_nbytes is None:
        room = room_nbytes(reading.program, auto.cluster)
    cluster = auto.cluster.with_flat_buckets() if settings.layout == "flat" else auto.cluster
    program, cost = with_plain_sizes(fused_program(reading)), cost_of(reading, cluster)
    fqns = list(settings.assignment.label_of)

    def make() -> Plan:
        return plan(program, cost, fqns, budget_nbytes=budget_nbytes, device_nbytes=room)

    if recall is None:
        return make()
    rest = (cost, fqns, auto.planner, budget_nbytes, room)
    return recall("\n".join([to_text(program), *map(repr, rest)]), make)


def room_nbytes(program: Program, cluster: Cluster) -> int:
    """Bytes that a device has left beside shards of parameters and AdamW's two moments, all fp32.

    Parameters that are not sharded (they are only all-reduced) are not counted, nor are gradients
    accumulated from earlier batches. Sizes of shards come from the collectives, which all ranks
    share.
    """
    elements = {
        c.fqns: c.nbytes // _torch.itemsize(c.dtype) // c.ranks
        for c in program.sent.values()
        if c.fqns and c.kind in ("gather", "reduce")
    }
    return int(USABLE * cluster.memory_gb * 1e9) - 3 * 4 * sum(elements.values())


@dataclass(frozen=True)
class Rehearsal:
    """What the passes will make of a graph, on paper; the graph stays as it is."""

    reading: fx.Reading  # the graph as it is
    planned: tuple[PortableBucket, ...]  # the buckets that were chosen
    after: Program  # the graph's program with the collectives merged and in order
    # What the automatic planner expects of the graph. The plan has no budget if it was made for
    # another graph (of this rank or another) that communicates the same.
    plan: Plan | None = None


def rehearsed(
    reading: fx.Reading, settings: Settings, chosen: Plan | tuple[Bucket, ...]
) -> Rehearsal:
    """Merge the buckets that were chosen for a graph, and order its program."""
    plan = chosen if isinstance(chosen, Plan) else None
    buckets = chosen.buckets if isinstance(chosen, Plan) else chosen
    after = arranged(reading.program, buckets, settings)
    return Rehearsal(reading, in_names(reading.program, buckets), after, plan)


def arranged(program: Program, buckets: Sequence[Bucket], settings: Settings | None) -> Program:
    """``program`` with its buckets merged (into one buffer each if the layout is flat), and in the
    planned order; without settings, nothing is moved."""
    merged = merge(program, buckets)
    if settings is None:
        return merged
    if settings.layout == "flat":
        merged = in_one_piece(merged)
    return overlapped(merged, settings.policy) if settings.reorder else merged


def as_planned(
    reading: fx.Reading, auto: Auto, planned: Sequence[PortableBucket]
) -> Plan | tuple[Bucket, ...]:
    """Apply to this graph a plan that was made for another graph which communicates the same.

    Raises:
        ProgramError: the data-parallel collectives of the graph are not those of the plan.
    """
    buckets = in_program(reading.program, planned)
    if in_names(reading.program, buckets) != tuple(planned):
        raise ProgramError("the plan is not for the collectives that this graph has")
    program, cost = rank_invariant(fused_program(reading), cost_of(reading, auto.cluster))
    return evaluate(program, cost, buckets, lower_bound_us(program, cost)) or buckets


def communicated(program: Program, *, sizes: bool = False) -> list[str]:
    """What data parallelism communicates in a graph, in words that are the same on all ranks.

    The list is sorted, because ranks that compute in different sequences may communicate the same.
    ``sizes`` adds bytes, which differ between ranks if a tensor-parallel parameter is split
    unevenly.
    """
    return sorted(
        f"{c.kind} {c.reduce_op} {c.dtype}, {c.ranks} ranks: {c.fqns} {c.nbytes if sizes else ''}"
        for c in program.sent.values()
        if c.fqns
    )


def launches(rehearsal: Rehearsal) -> list[str]:
    """What a graph will launch, in sequence, in words that are the same on all ranks."""
    return [
        f"{c.kind} {c.reduce_op} {c.dtype}, {c.ranks} ranks, bucket {c.bucket!r}: {c.fqns}"
        for c in rehearsal.after.sent.values()
    ]


@dataclass(frozen=True)
class Prediction:
    """What the passes change in a graph, as :mod:`inductor_passes.machine.cluster` predicts."""

    collectives: dict[str, int]  # number of gathers, reduces and all-reduces before the passes
    buckets: dict[str, int]  # number of buckets of each kind after (merged or moved together)
    exposed_before_us: float  # time that the compute lane stands still, before the passes
    exposed_after_us: float  # likewise, after
    device: str  # name of the assumed cluster


@no_garbage_collection()
def predict(rehearsal: Rehearsal, settings: Settings | None) -> Prediction:
    """Simulate the graph before and after the passes, on :func:`assumed_cluster`."""
    before, after = rehearsal.reading.program, rehearsal.after
    cluster, name = assumed_cluster(rehearsal.reading, settings)
    cost = cost_of(rehearsal.reading, cluster)
    was, now = (simulate(p, cost).stalled_us for p in (before, after))
    return Prediction(_count(before), _count(after), was, now, name)


def assumed_cluster(reading: fx.Reading, settings: Settings | None) -> tuple[Cluster, str]:
    """The cluster that predictions for a graph assume, and its name: the cluster of the settings,
    else that of the graph's device, else an H100's."""
    if settings is not None and settings.auto is not None:
        return settings.auto.cluster, settings.auto.cluster.name
    device = device_of(reading)
    try:
        cluster = cluster_of(device)
    except ValueError:
        return preset("h100"), f"h100 (there is no preset for {device_name(device)})"
    return cluster, cluster.name


def _count(program: Program) -> dict[str, int]:
    """Number of buckets per kind; a collective without a bucket counts as one."""
    found = {(c.kind, c.group, c.bucket or name, c.dtype) for name, c in program.sent.items()}
    return {kind: sum(k == kind for k, *_ in found) for kind in ("gather", "reduce", "all_reduce")}
