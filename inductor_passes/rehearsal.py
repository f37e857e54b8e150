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
"""Share of a device's memory that is not left for its context, communication's own buffers and
fragmentation; an estimate."""


@dataclass(frozen=True)
class Auto:
    """How the automatic planner is to choose."""

    cluster: Cluster  # what the machine is
    # Of memory, see :func:`inductor_passes.planner.auto.plan_auto`; a default is at most what
    # :func:`room_nbytes` says that the cluster's devices have.
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
    # Repeated modules, whose computes collectives stay out of; see
    # :mod:`inductor_passes.adapters.units`. Without any, collectives may go anywhere.
    units: tuple[str, ...] = ()


def read(graph: Graph, settings: Settings | None, fqn_of: fx.FqnOf) -> fx.Reading:
    """A graph, as it was made, as a program; its computes in units if the settings name any."""
    reading = fx.read(graph, fqn_of)
    return fx.mark_units(reading, settings.units) if settings and settings.units else reading


# Given all that a plan is made of, as a text, and what makes it: the plan.
Recall = Callable[[str, Callable[[], Plan]], Plan]


def choose(
    reading: fx.Reading, settings: Settings, recall: Recall | None = None
) -> Plan | tuple[Bucket, ...]:
    """The buckets of a graph by the planner that the settings name.

    Args:
        reading: the graph.
        settings: what to do.
        recall: may know the automatic planner's plan from before.
    """
    if settings.auto is not None:
        return _planned(reading, settings, settings.auto, recall)
    # Limits that somebody has set hold as they are.
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
    """What a device has beside the shards of parameters and of AdamW's two moments, all fp32.

    Whole parameters that are only all-reduced are not counted, and neither are gradients of an
    earlier batch that are accumulated. What all ranks share tells the size of a shard.
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
    # What the automatic planner expects of it; without a budget if it was made for another graph,
    # on this rank or another, which communicates the same.
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
    """``program`` with its buckets merged, as they travel, and in the order that is planned; with
    no settings, nothing is moved."""
    merged = merge(program, buckets)
    if settings is None:
        return merged
    if settings.layout == "flat":
        merged = in_one_piece(merged)
    return overlapped(merged, settings.policy) if settings.reorder else merged


def as_planned(
    reading: fx.Reading, auto: Auto, planned: Sequence[PortableBucket]
) -> Plan | tuple[Bucket, ...]:
    """A plan that was made for another graph, which communicates the same, for this one.

    Raises:
        ProgramError: the graph has other collectives of data parallelism's than the plan.
    """
    buckets = in_program(reading.program, planned)
    if in_names(reading.program, buckets) != tuple(planned):
        raise ProgramError("the plan is not for the collectives that this graph has")
    program, cost = rank_invariant(fused_program(reading), cost_of(reading, auto.cluster))
    return evaluate(program, cost, buckets, lower_bound_us(program, cost)) or buckets


def communicated(program: Program, *, sizes: bool = False) -> list[str]:
    """What data parallelism communicates in a graph, in words that are the same on all ranks.

    Sorted: ranks may compute in another sequence and communicate the same. With ``sizes``, which
    may differ between ranks if a tensor-parallel parameter is split unevenly.
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
    """What the passes make of a graph, by :mod:`inductor_passes.machine.cluster`."""

    collectives: dict[str, int]  # number of gathers, reduces and all-reduces before
    buckets: dict[str, int]  # likewise, of buckets (merged or only moved together)
    exposed_before_us: float  # time the compute lane stands still, before
    exposed_after_us: float  # likewise, after
    device: str  # the cluster that is assumed


@no_garbage_collection()
def predict(rehearsal: Rehearsal, settings: Settings | None) -> Prediction:
    """Simulate the graph before and after the passes, on :func:`assumed_cluster`."""
    before, after = rehearsal.reading.program, rehearsal.after
    cluster, name = assumed_cluster(rehearsal.reading, settings)
    cost = cost_of(rehearsal.reading, cluster)
    was, now = (simulate(p, cost).stalled_us for p in (before, after))
    return Prediction(_count(before), _count(after), was, now, name)


def assumed_cluster(reading: fx.Reading, settings: Settings | None) -> tuple[Cluster, str]:
    """What to predict a graph for: its plan's cluster, else its device's, else an H100's; and what
    to call that."""
    if settings is not None and settings.auto is not None:
        return settings.auto.cluster, settings.auto.cluster.name
    device = device_of(reading)
    try:
        cluster = cluster_of(device)
    except ValueError:
        return preset("h100"), f"h100 (there is no preset for {device_name(device)})"
    return cluster, cluster.name


def _count(program: Program) -> dict[str, int]:
    """Number of buckets per kind; a collective that is in none is one by itself."""
    found = {(c.kind, c.group, c.bucket or name, c.dtype) for name, c in program.sent.items()}
    return {kind: sum(k == kind for k, *_ in found) for kind in ("gather", "reduce", "all_reduce")}
