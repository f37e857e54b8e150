"""The passes as the compiler calls them: plan, write, verify."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Graph, GraphModule

from inductor_passes import fx, scheduler
from inductor_passes.layouts import write_buckets
from inductor_passes.merge import merge
from inductor_passes.order import OverlapPolicy, in_sequence, overlap, starts_in
from inductor_passes.plan import Plan
from inductor_passes.planned import PlannedBucket, in_program
from inductor_passes.program import Bucket, ProgramError
from inductor_passes.rehearsal import (
    Rehearsal,
    Settings,
    choose,
    no_garbage_collection,
    read,
    rehearsed,
)
from inductor_passes.verify import verify_unchanged

log = logging.getLogger("simplefsdp")


class PassError(RuntimeError):
    """A pass could not do its work, or what it made failed verification; names pass and op."""


@no_garbage_collection()
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
    before = read(graph, settings, fqn_of)
    if planned is None:
        planned = rehearsed(before, settings, choose(before, settings)).planned
    buckets = in_program(before.program, planned)
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
        as_planned: compute, too, in the order that the plan was made for, which Inductor's fusion
            and its memory reordering change: a wait "before the third next reduce" comes far too
            early if the weight gradients of a layer are computed one after the other.
        uuid: of the sources and settings.
    """

    policy: OverlapPolicy
    on_error: Literal["raise", "fallback"]
    as_planned: bool
    uuid: str

    @no_garbage_collection()
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
            program = reading.program
            if self.as_planned:
                program = program.reorder(in_sequence(program, scheduler.lowered_at(reading)))
            order = overlap(program, self.policy, keep_starts=True)
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


Chooser = Callable[[fx.Reading, Settings], Plan | tuple[Bucket, ...]]


@no_garbage_collection()
def rehearse(
    gm: GraphModule, settings: Settings | None, fqn_of: fx.FqnOf, chooser: Chooser = choose
) -> Rehearsal:
    """Plan ``gm``; with no settings, nothing changes. ``chooser`` gives the buckets.

    If a failure is to lead to a fallback, the whole pass is tried: its callers compare the outcome
    across ranks, so that all fall back or none.

    Raises:
        ProgramError: the graph breaks a rule, or cannot be planned (or written).
    """
    reading = read(gm.graph, settings, fqn_of)
    if settings is None:
        return Rehearsal(reading, (), reading.program)
    found = rehearsed(reading, settings, chooser(reading, settings))
    if settings.on_error == "fallback":
        try:
            _try_on_copy(gm.graph, settings, fqn_of, found.planned)
        except Exception as error:
            raise ProgramError(str(error)) from error
    return found
