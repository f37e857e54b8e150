"""Write the buckets of a plan into a program."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

from inductor_passes.ir.program import Bucket, Collective, Op, Program, ProgramError


def merge(program: Program, buckets: Sequence[Bucket]) -> Program:
    """Launch the collectives of each bucket as one, under the first member's name.

    The merged start reads and writes what its members did; each wait stays and waits for its own
    buffer. Ops keep their order, as far as the merged starts allow.

    Raises:
        ProgramError: a bucket's members differ in what must agree, or depend on each other.
    """
    label_of: dict[str, str] = {}
    merged: dict[str, Op] = {}
    members: dict[str, str] = {}
    for bucket in buckets:
        starts = _members(program, bucket)
        first = merge_starts(bucket, starts)
        merged[first.name] = first
        label_of[first.name] = bucket.label
        for op in starts:
            if op.name in members:
                raise ProgramError(f"bucket {bucket.label}: {op.name} is in another bucket, too")
            members[op.name] = first.name
    # A merged start stands where the earliest of its members stood.
    kept = dict.fromkeys(members.get(op.name, op.name) for op in program.ops)
    ops = [merged[name] if name in merged else program.ops[program.index[name]] for name in kept]
    return _topological(program, ops, members, label_of)


def in_one_piece(program: Program) -> Program:
    """The program, if each of its buckets travels as one buffer."""
    ops = [
        op if op.collective is None else replace(op, collective=replace(op.collective, members=1))
        for op in program.ops
    ]
    return replace(program, ops=tuple(ops))


def _members(program: Program, bucket: Bucket) -> list[Op]:
    missing = [name for name in bucket.starts if name not in program.index]
    if missing:
        raise ProgramError(f"bucket {bucket.label}: no op is called {missing[0]}")
    if len(set(bucket.starts)) < len(bucket.starts):
        raise ProgramError(f"bucket {bucket.label}: {bucket.starts} names an op twice")
    return [program.ops[program.index[name]] for name in bucket.starts]


def merge_starts(bucket: Bucket, ops: Sequence[Op]) -> Op:
    """The one start that stands for the members of a bucket."""
    collectives = [op.collective for op in ops if op.collective is not None]
    agree = {bucket_class(c) for c in collectives}
    theirs = len(ops) > 1 and any(c.kind == "other" for c in collectives)
    if len(agree) != 1 or len(collectives) != len(ops) or theirs:
        raise ProgramError(
            f"bucket {bucket.label}: its members must be collectives of one kind, group, reduce "
            f"op and dtype; they are {sorted(map(str, agree))}"
        )
    return replace(
        ops[0],
        reads=tuple(name for op in ops for name in op.reads),
        writes=tuple(name for op in ops for name in op.writes),
        collective=merge_collectives(collectives, bucket),
    )


def bucket_class(c: Collective) -> tuple[object, ...]:
    """What the members of a bucket share."""
    return (c.kind, c.group, c.ranks, c.reduce_op, c.dtype)


def merge_collectives(members: Sequence[Collective], bucket: Bucket) -> Collective:
    """What ``bucket``, which launches ``members``, sends."""
    return replace(
        members[0],
        nbytes=sum(c.nbytes for c in members),
        fqns=tuple(fqn for c in members for fqn in c.fqns),
        bucket=bucket.label,
        window=bucket.window,
        members=sum(c.members for c in members),
    )


def sent_together(one: Collective | None, other: Collective) -> Collective:
    """What takes as long as two collectives that share a bucket, or as the second by itself."""
    if one is None:
        return other
    members = one.members + other.members
    return replace(one, nbytes=one.nbytes + other.nbytes, members=members)


def _topological(
    before: Program, ops: Sequence[Op], members: Mapping[str, str], label_of: Mapping[str, str]
) -> Program:
    """``ops`` in the order nearest to the one of ``before``, in which they still were apart."""
    place = {op.name: at for at, op in enumerate(ops)}
    at_of = [place[members.get(op.name, op.name)] for op in before.ops]
    needs: list[set[int]] = [set() for _ in ops]
    for i, at in enumerate(at_of):
        needs[at].update(at_of[j] for j in before.predecessors[i])
    gathers = [at for at, op in enumerate(ops) if op.sends == "gather"]
    order = _nearest_order(needs, _pulled(needs, gathers))
    if len(order) < len(ops):
        placed = set(order)
        stuck = next(
            op.name for at, op in enumerate(ops) if at not in placed and op.name in label_of
        )
        raise ProgramError(
            f"bucket {label_of[stuck]}: one member's result is needed to make another member, so "
            "they cannot be launched together; put them into different buckets"
        )
    after = replace(before, ops=tuple(ops[at] for at in order))
    merged = (before.ops[before.index[name]] for name in members)
    sent = before.storages(n for op in merged for n in (*op.reads, *op.writes))
    if sent.isdisjoint(before.in_place):  # else a wait touches what all of its bucket do
        # They are known, and dear to find again in a large program.
        now = {at: i for i, at in enumerate(order)}
        after.__dict__["predecessors"] = tuple(tuple(now[j] for j in needs[at]) for at in order)
    return after


def _pulled(needs: Sequence[set[int]], gathers: Sequence[int]) -> list[int]:
    """The place that each index would like: its own, or that of a gather that needs it."""
    place = list(range(len(needs)))
    for gather in gathers:
        found = [gather]
        while found:
            later = [j for j in needs[found.pop()] if place[j] > gather]
            for j in later:
                place[j] = gather
            found += later
    return place


def _nearest_order(needs: Sequence[set[int]], place: Sequence[int]) -> list[int]:
    """Each index after those it needs, and otherwise by place; stuck ones are left out."""
    followers: list[list[int]] = [[] for _ in needs]
    for at, found in enumerate(needs):
        for j in found:
            followers[j].append(at)
    missing = [len(found) for found in needs]
    ready = [(place[at], at) for at, n in enumerate(missing) if n == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for follower in followers[at]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, (place[follower], follower))
    return order
