"""Small neighbours launched together, so that a search has fewer collectives to tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from inductor_passes.ir.program import Bucket, Program
from inductor_passes.planner.segments import KINDS, fqn_place, lines_of, room_of, sent_on
from inductor_passes.transform.merge import merge

PART = 1 / 2  # of the room for it, above which a collective is not glued to others
EDGE = 8  # collectives at both ends of a line that are not glued to others


def glued(
    program: Program, late: Program, fqns: Sequence[str], most: int, budget_nbytes: float
) -> tuple[Program, dict[str, str]]:
    """``program`` with small neighbours launched together, and for each start the name of the start
    that launches it.

    Args:
        program: with nothing merged.
        late: the same program, :func:`~inductor_passes.planner.segments.bare`.
        fqns: of the parameters, in the order in which members travel.
        most: about how many collectives of a kind are left; the first and the last few of each kind
            stay by themselves, because exposed time arises there.
        budget_nbytes: of live bytes; no group grows beyond a good part of what is free where its
            members are used, or made.
    """
    lines = lines_of(late)
    room = room_of(late, lines, budget_nbytes, throughout=True)
    groups: list[list[str]] = []
    for kind in KINDS:
        limit = sum(lines.nbytes[kind]) / most
        edge = EDGE if len(lines.starts[kind]) > most else 0
        inner = range(edge, len(lines.starts[kind]) - edge)
        latest: dict[object, tuple[int, float, list[str]]] = {}  # by class: the group that is open
        for i, name in enumerate(lines.starts[kind]):
            known, nbytes = lines.classes[kind][i], lines.nbytes[kind][i]
            size, free, group = latest.get(known, (0, inf, []))
            free = min(free, room[kind][i])  # also where earlier members are used, or made
            if group and edge and i in inner and size + nbytes <= min(limit, free * PART):
                group.append(name)
            else:
                size, free, group = 0, room[kind][i], [name]
                groups.append(group)
            latest[known] = (size + nbytes, free, group)
            if i not in inner:
                del latest[known]
    place = {fqn: i for i, fqn in enumerate(fqns)}
    of: dict[str, str] = {}
    buckets: list[Bucket] = []
    for group in groups:
        for names in (group, *sent_on(group, lines)):
            names.sort(key=lambda name: fqn_place(lines.sent[name], place))
            of.update(dict.fromkeys(names, names[0]))
            buckets.append(Bucket(str(len(buckets)), tuple(names)))
    return merge(program, buckets).sending(lambda c: replace(c, bucket="", window=0)), of
