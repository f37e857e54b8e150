"""What a search decides about: collectives in lines, and the segments that share a bucket.

Gathers stand in the order in which they are first used, reduces in the order in which their
gradients are ready. A bucket is a segment of its line. It also has a *turn*: the place on the line
before whose bucket a gather starts, or a reduce is waited for. A turn names a place and counts no
buckets, so that a cut or a join elsewhere leaves it as it is::

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
SENT_ON = 2  # window of the all-reduces that send on what was reduced: they hold shards alone


class Segment(NamedTuple):
    """A bucket of one kind."""

    kind: Kind  # of its line
    members: tuple[int, ...]  # places on the line, ascending
    # Of a gather, the place before whose bucket's first use it starts, or ``FIRST``; of a reduce,
    # the place before whose bucket's launch it is waited for, or ``END``, or -n: just before the
    # n-th next bucket of gathers is first used.
    turn: int
    # Of a reduce, whether the all-reduces of what it leaves are sent with those of the next bucket.
    deferred: bool = False

    @property
    def at(self) -> int:
        """Where on its line a gather is used first, or the last gradient of a reduce is ready."""
        return _at(self.kind, self.members)


State = tuple[Segment, ...]


@dataclass(frozen=True)
class Lines:
    """The collectives of a program."""

    # Their names, by kind; all-reduces that send on what was reduced are not among them.
    starts: Mapping[Kind, tuple[str, ...]]
    sent: Mapping[str, Collective]  # the collectives that they launch
    classes: Mapping[Kind, tuple[object, ...]]  # those of one class may share a bucket
    followers: Mapping[str, tuple[str, ...]]  # all-reduces of what a reduce left, by its start
    # Of each reduce, whether a gather is used before another reduce is ready.
    used_next: tuple[bool, ...]

    @cached_property
    def nbytes(self) -> dict[Kind, list[int]]:
        """Of each place, by kind."""
        return {kind: [self.sent[name].nbytes for name in self.starts[kind]] for kind in KINDS}

    @cached_property
    def place(self) -> dict[str, int]:
        """Of each start on its line."""
        return {name: i for kind in KINDS for i, name in enumerate(self.starts[kind])}

    def class_of(self, segment: Segment) -> object:
        """Of all its members."""
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
    """Gathers where they are first used, and other starts where what they send is ready."""
    found: dict[str, None] = {}
    for i, op in enumerate(program.ops):
        waited = [program.ops[j] for j in program.start_of.get(i, ())]
        found.update((start.name, None) for start in waited if start.sends == "gather")
        if op.kind == "start" and op.sends != "gather":
            found[op.name] = None
    return found


def of_kind(state: State, kind: Kind) -> list[Segment]:
    """The segments of a kind, in their turn."""
    return sorted((s for s in state if s.kind == kind), key=lambda s: s.at)


def of_class(state: State, segment: Segment, lines: Lines) -> list[Segment]:
    """Those that ``segment`` could be joined with, and itself, in their turn."""
    own = lines.class_of(segment)
    return [s for s in of_kind(state, segment.kind) if lines.class_of(s) == own]


def even(members: Sequence[int], n: int, nbytes: Sequence[int]) -> list[tuple[int, ...]]:
    """``members`` in up to ``n`` runs of about as many bytes; those of a place are ``nbytes``."""
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
    """Segments of one kind, all of them, in turn, that count ``windows`` as a
    :class:`~inductor_passes.ir.program.Bucket` does.

    Args:
        kind: of them.
        windows: of each, by its members.
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
    """Of all segments of one kind, in their turn, as a :class:`Bucket` counts them."""
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
    """The state that ``buckets`` are.

    Args:
        buckets: of all collectives; windows of 0 are 2, as for
            :mod:`inductor_passes.transform.order`.
        lines: of a program in which some travel together.
        first_of: under whose name each of them does; where a bucket cuts these, the one that has
            most of them gets all.
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
    """The buckets that ``state`` is, under the names of their first starts."""
    return [Bucket(names[0], names, window) for _, names, window in buckets_of(state, lines)]


def named_buckets(
    state: State,
    lines: Lines,
    fqns: Sequence[str],
    travel: Mapping[str, Sequence[tuple[str, Collective]]] | None = None,
) -> tuple[Bucket, ...]:
    """The buckets that ``state`` is, under the names of their first and last modules.

    Args:
        state: the plan.
        lines: of its program.
        fqns: of the parameters, in the order in which members travel.
        travel: what is launched together under the name of each start of ``lines``, with its
            collective; itself by default.
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
    """Of the first of a collective's parameters, by the place of each."""
    return min((place.get(fqn, len(place)) for fqn in collective.fqns), default=len(place))


def buckets_of(state: State, lines: Lines) -> Iterator[tuple[Kind, tuple[str, ...], int]]:
    """Kind, starts and window of each bucket that ``state`` is; all-reduces that send on what a
    bucket of reduces leaves are one, too, or travel with those of the next."""
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
    """The all-reduces that follow the reduces of these names, by what may be one."""
    found: defaultdict[object, list[str]] = defaultdict(list)
    for name in names:
        for follower in lines.followers.get(name, ()):
            found[bucket_class(lines.sent[follower])].append(follower)
    return list(found.values())


def room_of(
    late: Program, lines: Lines, budget_nbytes: float, *, throughout: bool = False
) -> dict[Kind, list[float]]:
    """Bytes that are free where each collective starts, or as long as what it gathers is used, or
    what it reduces is there; of a program in which all are by themselves, and as brief as can be.
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
