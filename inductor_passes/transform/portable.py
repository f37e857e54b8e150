"""Buckets in names that hold in every graph they may be written into.

A graph is planned when all ranks see it, before any cache is asked; it is written later, after
Inductor's own passes, when nodes have other names. Between the two, a bucket is known by kind and
parameters, which are the same on all ranks.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from inductor_passes.ir.program import Bucket, CollectiveKind, Program


class Member(NamedTuple):
    """One data-parallel collective."""

    fqn: str  # of its parameter
    # 0 for the first collective of the kind for this parameter in a graph. A hybrid scalar's
    # gradient, say, is all-reduced twice, in two groups.
    occurrence: int


class PortableBucket(NamedTuple):
    """A :class:`Bucket` without names of nodes."""

    label: str  # as in :class:`Bucket`
    kind: CollectiveKind  # of the collectives
    members: tuple[Member, ...]  # in their order on the wire
    window: int = 0  # as in :class:`Bucket`


def in_names(program: Program, buckets: Sequence[Bucket]) -> tuple[PortableBucket, ...]:
    """The buckets of ``program``, whose collectives carry one parameter each, in portable names."""
    member_of = {name: (kind, member) for name, kind, member in _members(program)}
    return tuple(
        PortableBucket(
            bucket.label,
            member_of[bucket.starts[0]][0],
            tuple(member_of[name][1] for name in bucket.starts),
            bucket.window,
        )
        for bucket in buckets
    )


def to_json(planned: Sequence[PortableBucket]) -> str:
    """The buckets as a text that another process can read."""
    return json.dumps(planned)


def from_json(text: str) -> tuple[PortableBucket, ...]:
    """What :func:`to_json` wrote."""
    return tuple(
        PortableBucket(label, kind, tuple(Member(*member) for member in members), window)
        for label, kind, members, window in json.loads(text)
    )


def in_program(program: Program, planned: Sequence[PortableBucket]) -> tuple[Bucket, ...]:
    """The planned buckets as far as ``program`` has their members, in the order of the plan.

    A collective that nobody planned is a bucket by itself, after those.
    """
    place = {
        (bucket.kind, member): (i, j)
        for i, bucket in enumerate(planned)
        for j, member in enumerate(bucket.members)
    }
    found: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    alone: list[Bucket] = []
    for name, kind, member in _members(program):
        if (kind, member) in place:
            i, j = place[kind, member]
            found[i].append((j, name))
        else:
            alone.append(Bucket(member.fqn, (name,)))
    buckets = [
        Bucket(planned[i].label, tuple(name for _, name in sorted(found[i])), planned[i].window)
        for i in sorted(found)
    ]
    return (*buckets, *alone)


def _members(program: Program) -> Iterator[tuple[str, CollectiveKind, Member]]:
    seen: Counter[tuple[CollectiveKind, str]] = Counter()
    for name, c in program.sent.items():
        if c.kind != "other" and c.fqns:
            yield name, c.kind, Member(c.fqns[0], seen[c.kind, c.fqns[0]])
            seen[c.kind, c.fqns[0]] += 1
