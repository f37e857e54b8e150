"""The passes as the compiler calls them: plan, write, verify."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import Graph, GraphModule

from inductor_passes import _torch, fx, scheduler
from inductor_passes.buckets import Assignment, plan_buckets
from inductor_passes.cluster import Cluster, ClusterCost
from inductor_passes.layouts import Layout, write_buckets
from inductor_passes.merge import merge
from inductor_passes.order import OverlapPolicy, overlap, starts_in
from inductor_passes.planned import PlannedBucket, in_names, in_program
from inductor_passes.presets import preset
from inductor_passes.program import Bucket, Collective, Op, Program, ProgramError
from inductor_passes.roofline import cluster_of, device_of, nodes_of, work_of
from inductor_passes.simulate import simulate
from inductor_passes.verify import verify_unchanged

log = logging.getLogger("simplefsdp")


class PassError(RuntimeError):
    """A pass could not do its work, or what it made failed verification; names pass and op."""


@dataclass(frozen=True)
class Settings:
    """What the passes are to do; data that is the same on all ranks.

    Attributes:
        assignment: bucket label of each parameter.
        merge: launch each bucket as one collective; else its members, one after the other.
        reorder: move collectives to where they are hidden; else they stay near their places.
        layout: how the members of a bucket travel.
        policy: limits of the reordering.
        on_error: ``"raise"``, or ``"fallback"``: leave the graph as it was and warn.
    """

    assignment: Assignment
    merge: bool = True
    reorder: bool = True
    layout: Layout = "coalesced"
    policy: OverlapPolicy = field(default_factory=OverlapPolicy)
    on_error: Literal["raise", "fallback"] = "raise"


def choose(reading: fx.Reading, settings: Settings) -> tuple[Bucket, ...]:
    """The buckets of a graph, by the planner that the settings name."""
    buckets = plan_buckets(reading.program, settings.assignment)
    if not settings.merge:
        buckets = tuple(Bucket(b.label, (start,)) for b in buckets for start in b.starts)
    return buckets


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A pass makes many small objects that live; to look for garbage among them, the collector
    would walk the compiler's whole heap time and again, and the time of a pass would grow with
    the square of the model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def bucket_and_reorder(
    graph: Graph,
    settings: Settings,
    fqn_of: fx.FqnOf,
    planned: Sequence[PlannedBucket] | None = None,
) -> None:
    """The post-grad pass: merge the collectives of each bucket and order the graph, in place.

    Args:
        graph: changed in place.
        settings: what to do.
        fqn_of: as for :func:`inductor_passes.fx.read`.
        planned: the buckets, if :func:`rehearse` chose them; else they are chosen here.

    Raises:
        PassError: unless ``settings.on_error`` is ``"fallback"``.
    """
    try:
        if settings.on_error == "fallback":
            _try_on_copy(graph, settings, fqn_of, planned)
        _transform(graph, settings, fqn_of, planned)
    except Exception as error:
        if settings.on_error == "raise":
            raise PassError(f"bucket_and_reorder: {error}") from error
        _warn("bucket_and_reorder", error)


def _transform(
    graph: Graph,
    settings: Settings,
    fqn_of: fx.FqnOf,
    planned: Sequence[PlannedBucket] | None,
) -> None:
    before = fx.read(graph, fqn_of)
    buckets = choose(before, settings) if planned is None else in_program(before.program, planned)
    write_buckets(graph, before, merge(before.program, buckets), buckets, settings.layout)
    reading = fx.read(graph, fqn_of)
    after = reading.program
    if settings.reorder:
        order = overlap(after, settings.policy)
        after = after.reorder(order)
        fx.write_order(graph, reading, order)
    verify_unchanged(before.program, after)
    graph.lint()


@dataclass(frozen=True)
class ImposeOrder:
    """The scheduler pass: the planned order again, after Inductor moved its nodes.

    An instance can be pickled, and its pickle is part of the key of Inductor's cache.

    Attributes:
        policy: as in :class:`Settings`.
        on_error: likewise.
        uuid: of the sources and settings.
    """

    policy: OverlapPolicy
    on_error: Literal["raise", "fallback"]
    uuid: str

    @_no_garbage_collection()
    def __call__(self, snodes: list[Any]) -> list[Any]:
        """The same scheduler nodes, in order.

        Raises:
            PassError: unless ``on_error`` is ``"fallback"``.
        """
        try:
            reading = scheduler.read(snodes, _no_fqn)
            if not any(
                op.collective and op.collective.bucket for _, op in reading.program.starts()
            ):
                return snodes  # a graph without buckets, or one that fell back
            order = overlap(reading.program, self.policy, keep_starts=True)
            reading.program.reorder(order).verify()
            if starts_in(reading.program, order) != starts_in(reading.program, reading.snodes):
                raise ProgramError(
                    "the sequence of launches changed, and may differ on other ranks"
                )
            return scheduler.write(reading, order, len(snodes))
        except Exception as error:
            if self.on_error == "raise":
                raise PassError(f"impose_order: {error}") from error
            _warn("impose_order", error)
            return snodes


def _no_fqn(node: object) -> None:
    """At the scheduler all that we planned is marked."""


def _warn(name: str, error: Exception) -> None:
    log.warning("%s failed, the graph is compiled without it: %s", name, error)


def _try_on_copy(
    graph: Graph,
    settings: Settings,
    fqn_of: fx.FqnOf,
    planned: Sequence[PlannedBucket] | None,
) -> None:
    """Fail, if the passes will, while the graph is whole."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    _transform(copied, settings, fqn_of, planned)


@dataclass(frozen=True)
class Rehearsal:
    """What the passes will make of a graph, on paper; the graph stays as it is.

    Attributes:
        reading: the graph as it is.
        planned: the buckets that were chosen.
        after: the graph's program with the collectives merged and in order.
    """

    reading: fx.Reading
    planned: tuple[PlannedBucket, ...]
    after: Program


@_no_garbage_collection()
def rehearse(gm: GraphModule, settings: Settings | None, fqn_of: fx.FqnOf) -> Rehearsal:
    """Plan ``gm``; with no settings, nothing changes.

    If a failure is to lead to a fallback, the whole pass is tried: its callers compare the outcome
    across ranks, so that all fall back or none.

    Raises:
        ProgramError: the graph breaks a rule, or cannot be planned (or written).
    """
    reading = fx.read(gm.graph, fqn_of)
    if settings is None:
        return Rehearsal(reading, (), reading.program)
    buckets = choose(reading, settings)
    planned = in_names(reading.program, buckets)
    after = merge(reading.program, buckets)
    if settings.reorder:
        after = after.reorder(overlap(after, settings.policy))
    if settings.on_error == "fallback":
        try:
            _try_on_copy(gm.graph, settings, fqn_of, planned)
        except Exception as error:
            raise ProgramError(str(error)) from error
    return Rehearsal(reading, planned, after)


def launches(rehearsal: Rehearsal) -> list[str]:
    """What a graph will launch, in sequence, in words that are the same on all ranks."""
    return [
        f"{c.kind} {c.reduce_op} {c.dtype}, {c.ranks} ranks, bucket {c.bucket!r}: {c.fqns}"
        for _, c in _collectives(rehearsal.after)
    ]


@dataclass(frozen=True)
class Prediction:
    """What the passes make of a graph, by :mod:`inductor_passes.cluster`.

    Attributes:
        collectives: number of gathers, reduces and all-reduces before.
        buckets: likewise, of buckets (merged or only moved together).
        exposed_before_us: time the compute lane stands still, before.
        exposed_after_us: likewise, after.
        device: the cluster that is assumed.
    """

    collectives: dict[str, int]
    buckets: dict[str, int]
    exposed_before_us: float
    exposed_after_us: float
    device: str


@_no_garbage_collection()
def predict(rehearsal: Rehearsal, cluster: Cluster | None = None) -> Prediction:
    """Simulate the graph before and after the passes, on ``cluster``.

    With None, on the preset for the graph's device, or an H100's, and the result says so.
    """
    before, after = rehearsal.reading.program, rehearsal.after
    name = cluster.name if cluster else ""
    if cluster is None:
        cluster, name = _assume(rehearsal.reading)
    groups = nodes_of(before, cluster.ranks_per_node)
    cost = ClusterCost(cluster, groups, work_of(rehearsal.reading))
    was, now = (sum(simulate(p, cost).exposed_us.values()) for p in (before, after))
    return Prediction(_count(before), _count(after), was, now, name)


def _assume(reading: fx.Reading) -> tuple[Cluster, str]:
    """A cluster for a rough prediction, and what to call it."""
    device = device_of(reading)
    try:
        cluster = cluster_of(device)
    except ValueError:
        cluster = preset("h100")
        return cluster, f"h100 (there is no preset for {_torch.device_name(device)})"
    return cluster, cluster.name


def _count(program: Program) -> dict[str, int]:
    """Number of buckets per kind; a collective that is in none is one by itself."""
    found = {(c.kind, c.group, c.bucket or op.name, c.dtype) for op, c in _collectives(program)}
    return {kind: sum(k == kind for k, *_ in found) for kind in ("gather", "reduce", "all_reduce")}


def _collectives(program: Program) -> Iterator[tuple[Op, Collective]]:
    return ((op, op.collective) for _, op in program.starts() if op.collective is not None)
