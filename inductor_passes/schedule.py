"""A schedule of a chain, and the buckets that it is in the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from inductor_passes.buckets import new_label
from inductor_passes.chain import Chain, Unit
from inductor_passes.merge import bucket_class
from inductor_passes.program import Bucket, Collective


class Segment(NamedTuple):
    """A bucket: units ``begin`` to ``end`` of a chain.

    ``turn`` is the first unit of the bucket before which it has its turn: of a gather, the one
    before whose wait it starts (-1: before everything); of a reduce, the one before whose start
    it is waited for (the number of units: after everything). If ``use`` is not None, a reduce is
    waited for before the gather bucket that begins with that unit is first used.
    """

    begin: int
    end: int
    turn: int
    use: int | None = None


@dataclass(frozen=True)
class Schedule:
    """Segments of gathers and of reduces, in order, and the time they are predicted to take."""

    gathers: tuple[Segment, ...]
    reduces: tuple[Segment, ...]
    step_us: float


Named = tuple[str, Collective]


def singles(chain: Chain) -> Schedule:
    """Every unit by itself, as late and as briefly as can be: what takes the least memory."""
    gathers = tuple(Segment(i, i + 1, i) for i in range(len(chain.gathers)))
    used = _used_at(chain)
    last = {used[i + 1]: i for i in range(len(chain.reduces))}  # ready before that unit is used
    reduces = tuple(
        Segment(i, i + 1, i + 1, use if last[use] == i and use < len(gathers) else None)
        for i, use in enumerate(used[1:])
    )
    return Schedule(gathers, reduces, inf)


def _used_at(chain: Chain) -> list[int]:
    """Gather units that were first used before so many reduces are ready."""
    return [0, *(event.used for event in chain.events if event.kind == "made")]


def buckets_of(schedule: Schedule, chain: Chain, fqns: Sequence[str]) -> tuple[Bucket, ...]:
    """The buckets of a schedule, their members in the order of ``fqns``."""
    place = {fqn: i for i, fqn in enumerate(fqns)}
    buckets: list[Bucket] = []
    last = sum(len(unit.then) for unit in chain.reduces) + len(chain.reduces)
    for segments, units in ((schedule.gathers, chain.gathers), (schedule.reduces, chain.reduces)):
        labels = _labels(segments, units)
        windows = _windows(segments, units)
        if units is chain.reduces:
            windows |= _windows_by_use(schedule, chain, windows)
        for segment, label in zip(segments, labels, strict=True):
            members = units[segment.begin : segment.end]
            for key, starts in _classes(map(_sent, members), place).items():
                buckets.append(Bucket(label, starts, windows[segment.begin, (key[0], key[1])]))
            for starts in _classes((unit.then for unit in members), place).values():
                # Nobody waits for what follows before the end: it pins shards, no gradients.
                buckets.append(Bucket(label, starts, last))
    return tuple(buckets)


def _sent(unit: Unit) -> Iterator[Named]:
    return zip(unit.starts, unit.collectives, strict=True)


def _classes(
    units: Iterable[Iterable[Named]], place: Mapping[str, int]
) -> dict[tuple[object, ...], tuple[str, ...]]:
    """Names of the starts that can be one bucket, by what they share."""
    found: dict[tuple[object, ...], list[Named]] = {}
    for named in units:
        for name, c in named:
            found.setdefault(bucket_class(c), []).append((name, c))

    def at(named: Named) -> int:
        return min((place.get(fqn, len(place)) for fqn in named[1].fqns), default=len(place))

    return {
        key: tuple(name for name, _ in sorted(members, key=at)) for key, members in found.items()
    }


def _labels(segments: Sequence[Segment], units: Sequence[Unit]) -> list[str]:
    """First and last module of each segment; no two are alike."""
    labels: dict[str, None] = {}
    for segment in segments:
        members = units[segment.begin : segment.end]
        fqns = [fqn for unit in members for c in unit.collectives for fqn in c.fqns]
        modules = [fqn.rpartition(".")[0] or fqn for fqn in fqns] or [
            members[0].collectives[0].kind
        ]
        label = modules[0] if modules[0] == modules[-1] else f"{modules[0]}..{modules[-1]}"
        labels[new_label(label, labels)] = None
    return list(labels)


def _windows_by_use(
    schedule: Schedule, chain: Chain, windows: Iterable[tuple[int, tuple[object, object]]]
) -> dict[tuple[int, tuple[object, object]], int]:
    """Windows of the reduces that are waited for before a gather's use, as ``overlap`` counts."""
    buckets = [0]  # of gathers, that begin before each unit
    pairs = {
        s.begin: len(
            {(c.kind, c.group) for u in chain.gathers[s.begin : s.end] for c in u.collectives}
        )
        for s in schedule.gathers
    }
    for unit in range(len(chain.gathers)):
        buckets.append(buckets[-1] + pairs.get(unit, 0))
    used = _used_at(chain)
    until = {s.begin: (used[s.end], s.use) for s in schedule.reduces if s.use is not None}
    return {
        (begin, key): -(buckets[until[begin][1]] - buckets[until[begin][0]] + 1)
        for begin, key in windows
        if begin in until and key[0] == "reduce"
    }


def _windows(
    segments: Sequence[Segment], units: Sequence[Unit]
) -> dict[tuple[int, tuple[object, object]], int]:
    """Window by first unit of a segment, kind and group, as ``overlap`` counts.

    It counts gathers, reduces and all-reduces each for themselves, and those of one segment
    that travel in different groups as different buckets.
    """
    count: Counter[object] = Counter()
    before: dict[int, Counter[object]] = {}  # buckets of each kind before the segment
    index: dict[tuple[int, tuple[object, object]], int] = {}
    for segment in segments:
        before[segment.begin] = count.copy()
        members = units[segment.begin : segment.end]
        for pair in dict.fromkeys((c.kind, c.group) for u in members for c in u.collectives):
            index[segment.begin, pair] = count[pair[0]]
            count[pair[0]] += 1
    before[len(units)] = count
    turn = {segment.begin: segment.turn for segment in segments}
    windows = {}
    for (begin, key), k in index.items():
        if key[0] == "gather":
            ahead = -1 if turn[begin] < 0 else before[turn[begin]]["gather"]
            windows[begin, key] = k - ahead + 1
        else:
            windows[begin, key] = before[turn[begin]][key[0]] - k
    return windows
