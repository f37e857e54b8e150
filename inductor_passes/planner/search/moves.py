"""Moves of a search: states near a state.

A move changes one segment or a run of neighbours: its turn, where it is cut from the next, into how
many it is parted. What helps at one layer helps at all that are alike (:func:`everywhere_alike`).
What does not fit into memory is mended by :func:`repairs`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set

from inductor_passes.planner.segments import (
    END,
    FIRST,
    KINDS,
    Lines,
    Segment,
    State,
    even,
    of_class,
    of_kind,
    windows_of,
    with_windows,
)

SHIFTS = (1, 2, 4)
# Runs of neighbours that are cut anew: where a run begins and ends, counted from a segment, and how
# many buckets are added. None is the end of the line.
REPARTED = (
    (0, 3, -1),
    (-1, 2, -1),
    (-2, 1, -1),
    (0, 2, 1),
    (-1, 1, 1),
    (0, None, -1),
    (0, None, 1),
    (None, None, -1),
    (None, None, 1),
)


def around(state: State, segment: Segment, lines: Lines) -> Iterator[State]:
    """States in which ``segment`` and its neighbours are not as in ``state``."""
    for turned in _turned(state, segment, (1, 2, -1)):
        yield _swap(state, [segment], [turned])
    if segment.kind == "reduce" and lines.followers:
        yield _swap(state, [segment], [segment._replace(deferred=not segment.deferred)])
    same = of_class(state, segment, lines)
    k = same.index(segment)
    for pair in (same[max(0, k - 1) : k + 1], same[k : k + 2]):
        if len(pair) == 2:
            yield from _shifted(state, *pair)
            yield _swap(state, pair, [_joined(*pair)])
    yield from _split(state, segment, lines)
    for begin, end, more in REPARTED:
        run = same[0 if begin is None else max(0, k + begin) : None if end is None else k + end]
        if len(run) > 1 and len(run) + more > 0:
            yield _reparted(state, run, len(run) + more, lines)
    for run in (same[k:], same[: k + 1]):
        yield from _doubled_and_halved(state, run, lines)


def pairs(state: State, lines: Lines) -> Iterator[tuple[Segment, Segment]]:
    """Neighbours that could share a bucket."""
    for segment in state:
        same = of_class(state, segment, lines)
        k = same.index(segment) + 1
        if k < len(same):
            yield segment, same[k]


def apart(pairs: Iterable[tuple[Segment, Segment]], n: float) -> list[tuple[Segment, Segment]]:
    """The first ``n`` of these pairs that have no segment in common."""
    found: list[tuple[Segment, Segment]] = []
    for pair in pairs:
        if len(found) < n and not any(segment in other for other in found for segment in pair):
            found.append(pair)
    return found


def joined(state: State, pairs: Iterable[tuple[Segment, Segment]]) -> State:
    """``state`` with each of these pairs, which have no segment in common, in one bucket."""
    for pair in pairs:
        state = _swap(state, pair, [_joined(*pair)])
    return state


def all_turned(state: State, lines: Lines) -> Iterator[State]:
    """States in which all segments of a kind have another turn, or defer others."""
    for kind in KINDS:
        for step in (1, -1):
            yield tuple(next(_turned(state, s, (step,)), s) if s.kind == kind else s for s in state)
    for use in (-1, -2, -3) if lines.starts["gather"] else ():
        yield tuple(s._replace(turn=use) if s.kind == "reduce" else s for s in state)
    reduces = of_kind(state, "reduce") if lines.followers else []
    for n in (1, 2, 4) if reduces else ():
        new = {s: s._replace(deferred=k % n < n - 1) for k, s in enumerate(reduces)}
        yield tuple(new.get(s, s) for s in state)


def everywhere_alike(state: State, new: State, lines: Lines) -> State | None:
    """``new``, with its change of ``state`` made everywhere else on the line where sizes are alike;
    None if there is no such place."""
    gone = sorted(set(state) - set(new), key=lambda s: s.members)
    come = sorted(set(new) - set(state), key=lambda s: s.members)
    kinds = {s.kind for s in (*gone, *come)}
    if not gone or not come or len(gone) > 2 or len(kinds) > 1:
        return None
    left, added, times = set(state), list[Segment](), 0
    for anchor in of_kind(state, gone[0].kind):
        by = anchor.members[0] - gone[0].members[0]
        there, instead = _moved(gone, by, lines), _moved(come, by, lines)
        if there and instead and left.issuperset(there):
            left.difference_update(there)
            added += instead
            times += 1
    return (*(s for s in state if s in left), *added) if times > 1 else None


def _moved(segments: Sequence[Segment], by: int, lines: Lines) -> list[Segment] | None:
    """``segments``, moved ``by`` places along their line; None if sizes differ there. (Members of
    several classes are not noticed here, but when the plan is tried.)"""
    found = []
    for s in segments:
        nbytes, turn = lines.nbytes[s.kind], s.turn
        if 0 <= turn < END:
            turn += by
            if not 0 <= turn < len(nbytes):
                return None
        places = tuple(m + by for m in s.members)
        if places[0] < 0 or places[-1] >= len(nbytes):
            return None
        if any(nbytes[p] != nbytes[m] for p, m in zip(places, s.members, strict=True)):
            return None
        found.append(s._replace(members=places, turn=turn))
    return found


def small_repairs(state: State, worst: Set[Segment], lines: Lines) -> Iterator[State]:
    """States in which one of the segments that are alive at the peak is halved, or is in flight for
    less time."""
    for s in sorted(worst):
        for parts in ("whole", "halves"):
            for late in (0, 1):
                new = _nearer(state, s, _parts(s, parts, lines), late, lines)
                yield tuple(part for o in state for part in (new if o == s else [o]))


def repairs(
    state: State, where: tuple[Set[Segment], Set[Segment]], lines: Lines
) -> Iterator[State]:
    """States that take less memory, the least changed first of each kind.

    Args:
        state: that takes too much.
        where: sets of segments that are alive where it does.
        lines: of the program.
    """
    for some in where:
        for kinds in (("gather",), ("reduce", "all_reduce"), KINDS):
            chosen = [s for s in state if s in some and s.kind in kinds]
            for parts in ("whole", "halves", "singles"):
                for late in (0, 1, 2):
                    new = {
                        s: _nearer(state, s, _parts(s, parts, lines), late, lines) for s in chosen
                    }
                    yield tuple(part for s in state for part in new.get(s, [s]))


def _parts(s: Segment, parts: str, lines: Lines) -> list[Segment]:
    n = {"whole": 1, "halves": 2, "singles": len(s.members)}[parts]
    return [s._replace(members=run) for run in even(s.members, n, lines.nbytes[s.kind])]


def _nearer(
    state: State, s: Segment, parts: list[Segment], late: int, lines: Lines
) -> list[Segment]:
    """``parts`` of ``s``, which start later or are waited for sooner if ``late`` is 1, as late or
    as soon as possible if it is 2."""
    if late == 0:
        return parts
    if s.kind == "gather":
        if late == 2:
            return [p._replace(turn=p.at) for p in parts]
        turn = next(_turned(state, s, (-1,)), s).turn
        before = [turn, *(p.at for p in parts)]
        return [p._replace(turn=max(p.turn, t)) for p, t in zip(parts, before, strict=False)]
    if late == 1 and s.kind == "reduce" and lines.starts["gather"]:
        return [p._replace(turn=-1) for p in parts]
    behind = s.at + 1 if s.at + 1 < len(lines.starts[s.kind]) else END
    turns = [*(p.at for p in parts[1:]), behind]
    return [p._replace(turn=t) for p, t in zip(parts, turns, strict=True)]


def _swap(state: State, gone: Iterable[Segment], come: Iterable[Segment]) -> State:
    old = set(gone)
    return (*(s for s in state if s not in old), *come)


def _turned(state: State, s: Segment, steps: Iterable[int]) -> Iterator[Segment]:
    """``s`` with its turn moved further away, by as many buckets as each of ``steps`` says; and a
    reduce with other kinds of turns."""
    at = [o.at for o in of_kind(state, s.kind)]
    if s.kind == "gather":
        marks = [FIRST, *at]
        k = bisect_right(marks, s.turn) - 1
        for step in steps:
            if 0 <= k - step < len(marks) and marks[k - step] <= s.at:
                yield s._replace(turn=marks[k - step])
        return
    if s.turn < 0:
        yield from (s._replace(turn=s.turn - step) for step in steps if s.turn - step < 0)
        yield s._replace(turn=next((mark for mark in at if mark > s.at), END))
        return
    marks = [*at, END]
    k = bisect_left(marks, s.turn)
    for step in steps:
        if 0 <= k + step < len(marks) and marks[k + step] > s.at:
            yield s._replace(turn=marks[k + step])
    if s.kind == "reduce":
        yield from (s._replace(turn=use) for use in (-1, -2))


def _joined(first: Segment, second: Segment) -> Segment:
    turn = min(first.turn, second.turn) if first.kind == "gather" else second.turn
    return second._replace(members=tuple(sorted(first.members + second.members)), turn=turn)


def _shifted(state: State, first: Segment, second: Segment) -> Iterator[State]:
    """The last members of ``first`` in ``second``, or the other way round."""
    for n in _shifts(first):
        yield _cut(state, first, second, first.members[:-n])
    for n in _shifts(second):
        yield _cut(state, first, second, first.members + second.members[:n])


def _shifts(s: Segment) -> list[int]:
    """How many of its members another may get."""
    return [n for n in dict.fromkeys((*SHIFTS, len(s.members) // 2)) if 0 < n < len(s.members)]


def _cut(state: State, first: Segment, second: Segment, members: tuple[int, ...]) -> State:
    """``first`` with ``members``, and ``second`` with the others of both."""
    others = sorted({*first.members, *second.members} - set(members))
    new = [first._replace(members=tuple(sorted(members))), second._replace(members=tuple(others))]
    return _swap(state, [first, second], new)


def _split(state: State, s: Segment, lines: Lines) -> Iterator[State]:
    """``s`` in two: in half, its first member apart, its last one."""
    half = len(even(s.members, 2, lines.nbytes[s.kind])[0])
    for cut in dict.fromkeys((half, 1, len(s.members) - 1)):
        if not 0 < cut < len(s.members):
            continue
        one, other = s._replace(members=s.members[:cut]), s._replace(members=s.members[cut:])
        yield _swap(state, [s], [one, other])
        if s.kind == "gather":
            yield _swap(state, [s], [one, other._replace(turn=one.at)])
        elif s.turn > 0:
            yield _swap(state, [s], [one._replace(turn=other.at), other])
        if s.kind == "reduce" and lines.followers:
            yield _swap(state, [s], [one._replace(deferred=True), other])


def _reparted(state: State, run: Sequence[Segment], n: int, lines: Lines) -> State:
    """Neighbours of a class in ``n`` buckets of equal bytes, with the median of their windows."""
    kind, segments = run[0].kind, of_kind(state, run[0].kind)
    window = dict(zip(segments, windows_of(segments), strict=True))
    usual = sorted(window[s] for s in run)[len(run) // 2]
    members = sorted(m for s in run for m in s.members)
    parts = even(members, n, lines.nbytes[kind])
    of = {s.members: window[s] for s in segments if s not in run} | dict.fromkeys(parts, usual)
    made = with_windows(kind, of)
    deferred = all(s.deferred for s in run)
    new = [s._replace(deferred=deferred) for s in made if s.members in set(parts)]
    return _swap(state, run, new)


def _doubled_and_halved(state: State, run: Sequence[Segment], lines: Lines) -> Iterator[State]:
    halves = [half for s in run for half in _parts(s, "halves", lines)]
    if len(halves) > len(run):
        yield _swap(state, run, halves)
    for lead in (0, 1):
        some = run[lead:]
        if len(some) > 1:
            pairs = [some[i : i + 2] for i in range(0, len(some), 2)]
            yield _swap(state, some, [_joined(*p) if len(p) == 2 else p[0] for p in pairs])
