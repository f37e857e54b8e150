"""The passes as the compiler calls them: plan, write, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule

from inductor_passes.adapters import fx, scheduler
from inductor_passes.adapters.layouts import Packs, write_buckets
from inductor_passes.adapters.packs import has_kernel
from inductor_passes.adapters.roofline import device_of, nodes_of
from inductor_passes.garbage import no_garbage_collection
from inductor_passes.ir.program import Bucket, ProgramError
from inductor_passes.ir.verify import verify_unchanged
from inductor_passes.machine.packing import members_to_pack
from inductor_passes.planner.plan import Plan
from inductor_passes.rehearsal import (
    Rehearsal,
    Settings,
    choose,
    read,
    rehearsed,
)
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, in_sequence, overlap, starts_in
from inductor_passes.transform.portable import PortableBucket, in_program

REMEDY = 'options={"bucketing": "none"} compiles without the passes'


class PassError(RuntimeError):
    """A pass could not do its work, or what it made failed verification; names pass and op."""


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PassError(f"{name}: {error}; {REMEDY}") from error


@no_garbage_collection()
@_errors_of("bucket_and_reorder")
def bucket_and_reorder(
    graph: Graph,
    settings: Settings,
    fqn_of: fx.FqnOf,
    planned: Sequence[PortableBucket] | None = None,
    before: fx.Reading | None = None,
) -> None:
    """The post-grad pass: merge the collectives of each bucket and order the graph, in place.

    Args:
        graph: changed in place.
        settings: what to do.
        fqn_of: as for :func:`inductor_passes.adapters.fx.read`.
        planned: the buckets, if :func:`rehearse` chose them; else they are chosen here.
        before: how :func:`rehearse` read the graph, if nothing has changed it since.

    Raises:
        PassError: it failed; the graph is not to be used then. The ranks agreed on the plan, but
            not on this: if it fails on one of them, the others wait in their first collective for
            it until it exits or the process group gives up.
    """
    before = before or read(graph, settings, fqn_of)
    if planned is None:
        planned = rehearsed(before, settings, choose(before, settings)).planned
    buckets = in_program(before.program, planned)
    merged = merge(before.program, buckets)
    write_buckets(graph, before, merged, buckets, settings.layout, _packs(before, settings))
    reading = fx.read(graph, fqn_of)
    after = reading.program
    if settings.reorder:
        order = overlap(after, settings.policy)
        after = after.reorder(order)
        fx.write_order(graph, reading, order)
    verify_unchanged(before.program, after)
    graph.lint()


def _packs(reading: fx.Reading, settings: Settings) -> Packs:
    """Which members share a buffer: where the machine is known, and has the kernel for it."""
    if settings.auto is None or not has_kernel(device_of(reading)):
        return lambda members: ()
    cluster = settings.auto.cluster
    nodes = nodes_of(reading.program, cluster.ranks_per_node)
    return lambda members: members_to_pack(members, cluster, nodes.get(members[0].group))


@dataclass(frozen=True)
class ImposeOrder:
    """The scheduler pass: the planned order again, after Inductor moved its nodes.

    An instance can be pickled, and its pickle is part of the key of Inductor's cache.
    """

    policy: OverlapPolicy  # as in :class:`Settings`
    # Compute, too, in the order that the plan was made for, which Inductor's fusion and its memory
    # reordering change: a wait "before the third next reduce" comes far too early if the weight
    # gradients of a layer are computed one after the other.
    as_planned: bool
    uuid: str  # of the sources and settings

    @no_garbage_collection()
    @_errors_of("impose_order")
    def __call__(self, snodes: list[Any]) -> list[Any]:
        """The same scheduler nodes, in order.

        Raises:
            PassError: they cannot be put into it.
        """
        reading = scheduler.read(snodes)
        program = reading.program
        if not any(c.bucket for c in program.sent.values()):
            return snodes  # a graph without buckets
        if self.as_planned:
            program = program.reorder(in_sequence(program, scheduler.lowered_at(reading)))
        order = overlap(program, self.policy, keep_starts=True)
        reading.program.reorder(order).verify()
        if starts_in(reading.program, order) != starts_in(reading.program, reading.snodes):
            raise ProgramError("the sequence of launches changed, and may differ on other ranks")
        return scheduler.write(reading, order, len(snodes))


Chooser = Callable[[fx.Reading, Settings], Plan | tuple[Bucket, ...]]


@no_garbage_collection()
def rehearse(
    gm: GraphModule, settings: Settings | None, fqn_of: fx.FqnOf, chooser: Chooser = choose
) -> Rehearsal:
    """Plan ``gm``; with no settings, nothing changes. ``chooser`` gives the buckets.

    Raises:
        ProgramError: the graph breaks a rule, or cannot be planned.
    """
    reading = read(gm.graph, settings, fqn_of)
    if settings is None:
        return Rehearsal(reading, (), reading.program)
    return rehearsed(reading, settings, chooser(reading, settings))
