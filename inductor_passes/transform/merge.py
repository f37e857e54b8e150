"""Write the buckets of a plan into a program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from inductor_passes.ir.positions import by_key, moved
from inductor_passes.ir.program import Bucket, Collective, Op, Program, ProgramError
from inductor_passes.transform.needs import nearest_order


def merge(program: Program, buckets: Sequence[Bucket]) -> Program:
    """Launch the collectives of each bucket as one, under the first member's name.

    The merged start reads and writes what its members did; each wait stays and waits for its own
    buffer. Ops keep their order, as far as the merged starts allow.

    Args:
        program: with nothing merged.
        buckets: that share no member.

    Raises:
        ProgramError: a bucket's members differ in what must agree, or depend on each other.
    """
    merged: dict[int, Op] = {}
    first_of: dict[int, int] = {}
    for bucket in buckets:
        members = _members(program, bucket)
        merged[members[0]] = merge_starts(bucket, [program.ops[i] for i in members])
        for i in members:
            if i in first_of:
                name = program.ops[i].name
                raise ProgramError(f"bucket {bucket.label}: {name} is in another bucket, too")
            first_of[i] = members[0]
    # A merged start stands where the earliest of its members stood.
    became = [first_of.get(i, i) for i in range(len(program.ops))]
    ops = {i: merged.get(i, program.ops[i]) for i in became}
    return _topological(program, ops, became, first_of)


def in_one_piece(program: Program) -> Program:
    """The program with each of its buckets sent as one buffer."""
    return program.sending(lambda c: replace(c, members=1))


def _members(program: Program, bucket: Bucket) -> list[int]:
    missing = [name for name in bucket.starts if name not in program.index]
    if missing:
        raise ProgramError(f"bucket {bucket.label}: no op is called {missing[0]}")
    if len(set(bucket.starts)) < len(bucket.starts):
        raise ProgramError(f"bucket {bucket.label}: {bucket.starts} names an op twice")
    return [program.index[name] for name in bucket.starts]


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
    return Op(
        ops[0].name,
        "start",
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
    """A collective that takes as long as ``one`` and ``other`` in one bucket; ``other`` itself if
    ``one`` is None."""
    if one is None:
        return other
    members = one.members + other.members
    return replace(one, nbytes=one.nbytes + other.nbytes, members=members)


def _topological(
    before: Program, left: Mapping[int, Op], became: Sequence[int], merged: Collection[int]
) -> Program:
    """The program of the ops that are ``left``, in the legal order nearest to that of ``before``.

    Args:
        before: the program with nothing merged.
        left: the ops that are left, by their positions in ``before``; in the order to keep.
        became: for each op of ``before``, the key in ``left`` of the op that stands for it.
        merged: positions in ``before`` of the ops that are in buckets.
    """
    ops, place = list(left.values()), {i: at for at, i in enumerate(left)}
    at_of = [place[i] for i in became]
    needs: list[set[int]] = [set() for _ in ops]
    for at, found in zip(at_of, before.predecessors, strict=True):
        needs[at].update(map(at_of.__getitem__, found))
    gathers = [at for at, op in enumerate(ops) if op.sends == "gather"]
    order = nearest_order(needs, _pulled(needs, gathers))
    if len(order) < len(ops):
        placed = set(order)
        stuck = (left[i].collective for i, at in place.items() if i in merged and at not in placed)
        label = next(c.bucket for c in stuck if c is not None)
        raise ProgramError(
            f"bucket {label}: one member's result is needed to make another member, so they cannot "
            "be launched together; put them into different buckets"
        )
    after = before.with_ops(ops[at] for at in order)
    # Both caches are known here, and are slow to compute again for a large program.
    now = by_key(order)
    after.__dict__["start_of"] = moved(before.start_of, [now[at] for at in at_of])
    sent = (name for i in merged for name in (*before.ops[i].reads, *before.ops[i].writes))
    # If a bucket sends a storage that is written in place, predecessors are computed anew, because
    # each wait of a merged start then touches the storages of all members.
    if not before.in_place or before.in_place.isdisjoint(before.storages(sent)):
        needed = (map(now.__getitem__, needs[at]) for at in order)
        after.__dict__["predecessors"] = tuple(map(tuple, needed))
    return after


def _pulled(needs: Sequence[set[int]], gathers: Sequence[int]) -> list[int]:
    """The wanted place of each index: its own, or the place of an earlier gather that needs it."""
    place = list(range(len(needs)))
    for gather in gathers:
        found = [gather]
        while found:
            later = [j for j in needs[found.pop()] if place[j] > gather]
            for j in later:
                place[j] = gather
            found += later
    return place
