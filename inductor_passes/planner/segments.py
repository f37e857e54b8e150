"""What a search decides about: collectives in lines, and the segments that share a bucket.

Gathers stand in the order in which they are first used, reduces in the order in which their
gradients are ready. A bucket is a segment of its line. It also has a *turn*, which is a place on
the line: a gather starts just before the bucket at that place is used, and a reduce is waited for
just before the bucket at that place is launched. A turn names a place and does not count buckets,
so a cut or a join elsewhere leaves it as it is::

    line of gathers     0 1 2 | 3 4 | 5 6 7        segment (5, 6, 7), turn 3:
                                ^                  starts just before 3 and 4 are first used,
                                                   one bucket ahead: its window is 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, cast, get_args

from inductor_passes.ir.buckets import new_label
from inductor_passes.ir.lineage import dependent, following, origins
from inductor_passes.ir.program import Bucket, Collective, Program
from inductor_passes.machine.simulate import lifetimes, memory
from inductor_passes.transform.merge import bucket_class
from inductor_passes.transform.order import OverlapPolicy, overlapped

Kind = Literal["gather", "reduce", "all_reduce"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FIRST, END = -1, 10**9  # turns: before everything, after everything
SENT_ON = 2  # window of all-reduces of what was reduced; they hold only shards


class Segment(NamedTuple):
    """A bucket of one kind."""

    kind: Kind  # of its line
    members: tuple[int, ...]  # places on the line, ascending
    # A gather starts just before the first use of the bucket at this place, or at ``FIRST``. A
    # reduce is waited for just before the launch of the bucket at this place, or at ``END``; or,
    # for -n, just before the n-th next bucket of gathers is first used.
    turn: int
    # Of a reduce, whether all-reduces of its result are sent with those of the next bucket.
    deferred: bool = False

    @property
    def at(self) -> int:
        """Where on its line a gather is used first, or the last gradient of a reduce is ready."""
        return _at(self.kind, self.members)


State = tuple[Segment, ...]


@dataclass(frozen=True)
class Lines:
    """The collectives of a program."""

    # Names of the starts on each line, without all-reduces of what was reduced.
    starts: Mapping[Kind, tuple[str, ...]]
    sent: Mapping[str, Collective]  # the collective of each start
    classes: Mapping[Kind, tuple[object, ...]]  # by place; those of one class may share a bucket
    followers: Mapping[str, tuple[str, ...]]  # all-reduces of a reduce's result, by its start
    # For each reduce, whether a gather is used before the next reduce is ready.
    used_next: tuple[bool, ...]

    @cached_property
    def nbytes(self) -> dict[Kind, list[int]]:
        """Bytes of the collective at each place, by kind."""
        return {kind: [self.sent[name].nbytes for name in self.starts[kind]] for kind in KINDS}

    @cached_property
    def place(self) -> dict[str, int]:
        """Place of each start on its line."""
        return {name: i for kind in KINDS for i, name in enumerate(self.starts[kind])}

    def class_of(self, segment: Segment) -> object:
        """The class that all members of a segment share."""
        return self.classes[segment.kind][segment.members[0]]


def bare(program: Program) -> Program:
    """``program`` with each gather as late, and each wait for a reduce as early, as can be."""
    return overlapped(program, OverlapPolicy(1, 1))


def lines_of(program: Program) -> Lines:
    """The lines of a program that is :func:`bare`."""
    follows = following(program, origins(program))
    followers: defaultdict[str, list[str]] = defaultdict(list)
    for i, j in follows.items():
        followers[program.ops[j].name].append(program.ops[i].name)
    behind = {program.ops[i].name for i in follows}
    alone = {program.ops[i].name for i in dependent(program, follows)}
    sent = program.sent
    events = [name for name in _in_turn(program) if name not in behind]
    starts = {kind: tuple(n for n in events if sent[n].kind == kind) for kind in KINDS}
    classes = {
        kind: tuple((bucket_class(sent[n]), n if n in alone else "") for n in names)
        for kind, names in starts.items()
    }
    ours = [sent[name].kind for name in events if sent[name].kind in ("gather", "reduce")]
    used_next = [nxt == "gather" for kind, nxt in pairwise([*ours, ""]) if kind == "reduce"]
    sent_on = {name: tuple(found) for name, found in followers.items()}
    return Lines(starts, sent, classes, sent_on, tuple(used_next))


def _in_turn(program: Program) -> Iterable[str]:
    """Names of the starts in the order of their lines: gathers as they are first used, others as
    what they send is ready."""
    found: dict[str, None] = {}
    for i, op in enumerate(program.ops):
        waited = [program.ops[j] for j in program.start_of.get(i, ())]
        found.update((start.name, None) for start in waited if start.sends == "gather")
        if op.kind == "start" and op.sends != "gather":
            found[op.name] = None
    return found


def of_kind(state: State, kind: Kind) -> list[Segment]:
    """The segments of a kind, in the order of their line."""
    return sorted((s for s in state if s.kind == kind), key=lambda s: s.at)


def of_class(state: State, segment: Segment, lines: Lines) -> list[Segment]:
    """``segment`` and those that it could be joined with, in the order of their line."""
    own = lines.class_of(segment)
    return [s for s in of_kind(state, segment.kind) if lines.class_of(s) == own]


def even(members: Sequence[int], n: int, nbytes: Sequence[int]) -> list[tuple[int, ...]]:
    """``members`` cut into up to ``n`` runs of about equal bytes; ``nbytes`` are by place."""
    whole, before = sum(nbytes[m] for m in members), 0
    runs: list[list[int]] = [[]]
    for m in members:
        if runs[-1] and len(runs) < n and before + nbytes[m] / 2 >= whole * len(runs) / n:
            runs.append([])
        runs[-1].append(m)
        before += nbytes[m]
    return [tuple(run) for run in runs]


def _at(kind: Kind, run: Sequence[int]) -> int:
    """See :attr:`Segment.at`."""
    return run[0] if kind == "gather" else run[-1]


def with_windows(kind: Kind, windows: Mapping[tuple[int, ...], int]) -> State:
    """All segments of one kind, in the order of their line, from windows that count buckets as a
    :class:`~inductor_passes.ir.program.Bucket` does.

    Args:
        kind: of the segments.
        windows: of each segment, by its members.
    """
    runs = sorted(windows, key=lambda run: _at(kind, run))
    at = [_at(kind, run) for run in runs]
    state = []
    for k, run in enumerate(runs):
        window = windows[run]
        if kind == "gather":
            turn = at[k + 1 - window] if k + 1 >= window else FIRST
        elif window < 0:
            turn = window
        else:
            turn = at[k + window] if k + window < len(at) else END
        state.append(Segment(kind, run, turn))
    return tuple(state)


def windows_of(segments: Sequence[Segment]) -> list[int]:
    """The windows, as a :class:`Bucket` counts them, of all segments of one kind, which are given
    in the order of their line."""
    index = {m: k for k, s in enumerate(segments) for m in s.members}
    windows = []
    for k, s in enumerate(segments):
        if s.kind == "gather":
            ahead = FIRST if s.turn == FIRST else index[s.turn]
            windows.append(max(1, k + 1 - ahead))
        elif s.turn < 0:
            windows.append(s.turn)
        else:
            until = len(segments) if s.turn == END else index[s.turn]
            windows.append(max(1, until - k))
    return windows


def state_of(buckets: Iterable[Bucket], lines: Lines, first_of: Mapping[str, str]) -> State:
    """The state of a plan with these ``buckets``.

    Args:
        buckets: of all collectives; windows of 0 are 2, as for
            :mod:`inductor_passes.transform.order`.
        lines: of a program in which some collectives are launched together.
        first_of: for each collective, the name under which it is launched there. If collectives of
            one name are in several buckets, the bucket with most of them gets all.
    """
    owner: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    windows = []
    for b, bucket in enumerate(buckets):
        windows.append(bucket.window or 2)
        for name in bucket.starts:
            owner[first_of[name]][b] += 1
    runs: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)
    for name, shares in owner.items():
        if name in lines.place:
            bucket_number = max(shares, key=lambda b: (shares[b], -b))
            kind = cast(Kind, lines.sent[name].kind)
            runs[kind, bucket_number].append(lines.place[name])
    state: State = ()
    for kind in KINDS:
        of = {tuple(sorted(m)): windows[b] for (k, b), m in runs.items() if k == kind}
        state += with_windows(kind, of)
    return state


def plain_buckets(state: State, lines: Lines) -> list[Bucket]:
    """The buckets of ``state``, labelled by their first starts."""
    return [Bucket(names[0], names, window) for _, names, window in buckets_of(state, lines)]


def named_buckets(
    state: State,
    lines: Lines,
    fqns: Sequence[str],
    travel: Mapping[str, Sequence[tuple[str, Collective]]] | None = None,
) -> tuple[Bucket, ...]:
    """The buckets of ``state``, labelled by their first and last modules.

    Args:
        state: the plan.
        lines: of its program.
        fqns: of the parameters, in the order in which members travel.
        travel: for each start of ``lines``, the names and collectives that are launched together
            under its name; by default its own only.
    """
    place = {fqn: i for i, fqn in enumerate(fqns)}
    found: list[Bucket] = []
    labels: defaultdict[Kind, set[str]] = defaultdict(set)
    for kind, names, window in buckets_of(state, lines):
        members = [m for n in names for m in (travel[n] if travel else [(n, lines.sent[n])])]
        members.sort(key=lambda member: fqn_place(member[1], place))
        label = new_label(_label(kind, [c for _, c in members]), labels[kind])
        labels[kind].add(label)
        found.append(Bucket(label, tuple(name for name, _ in members), window))
    return tuple(found)


def _label(kind: Kind, sent: Sequence[Collective]) -> str:
    modules = [fqn.rpartition(".")[0] or fqn for c in sent for fqn in c.fqns] or [kind]
    return modules[0] if modules[0] == modules[-1] else f"{modules[0]}..{modules[-1]}"


def fqn_place(collective: Collective, place: Mapping[str, int]) -> int:
    """The place of the first of a collective's parameters; behind all places if it has none."""
    return min((place.get(fqn, len(place)) for fqn in collective.fqns), default=len(place))


def buckets_of(state: State, lines: Lines) -> Iterator[tuple[Kind, tuple[str, ...], int]]:
    """Kind, starts and window of each bucket of ``state``. All-reduces of what a bucket of reduces
    leaves are in buckets, too; if deferred, together with those of the next bucket of reduces."""
    for kind in KINDS:
        segments = of_kind(state, kind)
        reduced: list[str] = []
        for segment, window in zip(segments, windows_of(segments), strict=True):
            names = tuple(lines.starts[kind][m] for m in segment.members)
            yield kind, names, window
            reduced += names
            if not segment.deferred or segment == segments[-1]:
                for found in sent_on(reduced, lines):
                    yield "all_reduce", tuple(found), SENT_ON
                reduced.clear()


def sent_on(names: Iterable[str], lines: Lines) -> list[list[str]]:
    """The all-reduces that follow the reduces of these names, in groups that may share a bucket."""
    found: defaultdict[object, list[str]] = defaultdict(list)
    for name in names:
        for follower in lines.followers.get(name, ()):
            found[bucket_class(lines.sent[follower])].append(follower)
    return list(found.values())


def room_of(
    late: Program, lines: Lines, budget_nbytes: float, *, throughout: bool = False
) -> dict[Kind, list[float]]:
    """Bytes of the budget that are free where each collective starts. With ``throughout``, bytes
    that are free all the time while its gathered tensor, or its gradient, is alive. In ``late`` all
    collectives are by themselves, started late and waited for early.
    """
    held, lives, found = memory(late), lifetimes(late), dict[Kind, list[float]]()
    free, given = budget_nbytes - held.resident_nbytes, late.storages(late.inputs)

    def live_nbytes(name: str) -> int:
        at = late.index[name]
        names = late.ops[at].writes if late.ops[at].sends == "gather" else late.ops[at].reads
        alive = [lives[storage] for storage in late.storages(names) - given] if throughout else []
        begin, end = min([at, *(i for i, _ in alive)]), max([at, *(i for _, i in alive)])
        return max(held.live_nbytes[begin : end + 1])

    for kind in KINDS:
        found[kind] = [free - live_nbytes(name) for name in lines.starts[kind]]
    return found
