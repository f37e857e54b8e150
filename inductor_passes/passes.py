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
    """A pass failed, or its result failed verification; the message names the pass and the op."""


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
        before: the reading that :func:`rehearse` made, if the graph has not changed since.

    Raises:
        PassError: the pass failed; the graph must not be used then. The ranks agreed on the plan,
            but not on this failure: if the pass fails on one rank only, the other ranks wait in
            their first collective until that rank exits or the process group gives up.
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
    """Which members of a bucket are packed into one buffer: none if the machine is not known, or
    has no kernel for it."""
    if settings.auto is None or not has_kernel(device_of(reading)):
        return lambda members: ()
    cluster = settings.auto.cluster
    nodes = nodes_of(reading.program, cluster.ranks_per_node)
    return lambda members: members_to_pack(members, cluster, nodes.get(members[0].group))


@dataclass(frozen=True)
class ImposeOrder:
    """The scheduler pass: restores the planned order after Inductor has moved its nodes.

    An instance can be pickled, and its pickle is part of the key of Inductor's cache.
    """

    policy: OverlapPolicy  # as in :class:`Settings`
    # Put compute, too, into the order that the plan was made for. Inductor's fusion and its memory
    # reordering change that order: a wait "before the third next reduce" would come far too early
    # if all weight gradients of a layer were computed one after the other.
    as_planned: bool
    uuid: str  # identifies the sources and settings, for the cache's key

    @no_garbage_collection()
    @_errors_of("impose_order")
    def __call__(self, snodes: list[Any]) -> list[Any]:
        """The same scheduler nodes, in the planned order.

        Raises:
            PassError: the nodes cannot be put into that order.
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
    """Plan ``gm`` with the buckets that ``chooser`` gives; without settings, nothing is planned.

    Raises:
        ProgramError: the graph breaks a rule, or cannot be planned.
    """
    reading = read(gm.graph, settings, fqn_of)
    if settings is None:
        return Rehearsal(reading, (), reading.program)
    return rehearsed(reading, settings, chooser(reading, settings))
