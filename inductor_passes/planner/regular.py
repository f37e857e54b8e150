"""Regular plans: where a search starts.

Where one layer is much like the next, buckets of equal bytes with equal windows are about as good
as the best plan; a search need only improve both ends, and repair what does not fit. Where layers
are many and large, a search would end at a plan by parts of modules (:func:`in_parts`), which takes
less memory for more launches; so such plans are made without a search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from inductor_passes.ir.buckets import parts_of
from inductor_passes.ir.program import Bucket, Program
from inductor_passes.planner.segments import KINDS, Kind, Lines, State, even, with_windows

# What shapes vary: buckets of a kind per module; windows of gathers; windows of reduces in a graph
# with gathers (-1: waited for at the next use of one) and in a graph without.
PER_MODULE = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 2 / 3, 1, 3 / 2, 2, 3)
AHEAD = (2, 3)
BEHIND, BEHIND_ALONE = (1, -1), (1, 2)


class Shape(NamedTuple):
    """A regular plan: buckets of gathers and their window, buckets of reduces and theirs."""

    gathers: int
    ahead: int
    reduces: int
    behind: int


def gather_shapes(lines: Lines, modules: int) -> list[Shape]:
    """Shapes that differ in their gathers, with a bucket of reduces for each of ``modules``."""
    if not lines.starts["gather"]:
        return [Shape(1, 1, modules, 1)]
    return [Shape(n, ahead, modules, 1) for n, ahead in product(_counts(modules), AHEAD)]


def reduce_shapes(lines: Lines, modules: int, like: Shape) -> list[Shape]:
    """Shapes that differ in their reduces, with the gathers of ``like``."""
    windows = BEHIND if lines.starts["gather"] else BEHIND_ALONE
    if len(lines.starts["gather"]) == len(lines.place):
        return [like]
    return [
        like._replace(reduces=n, behind=behind) for n, behind in product(_counts(modules), windows)
    ]


def few_shapes(modules: int) -> list[Shape]:
    """Shapes to try without a search: as many buckets of gathers as of reduces, and few or many of
    them in flight."""
    few = [Shape(n, 2, n, 1) for n in _counts(modules)]
    return few + [Shape(n, 3, n, -1) for n in _counts(modules) if n >= modules]


def _counts(modules: int) -> list[int]:
    return sorted({max(1, round(modules * share)) for share in PER_MODULE})


def regular(shape: Shape, lines: Lines) -> State:
    """The plan of a shape."""
    return (
        *_of_kind(lines, "gather", shape.gathers, shape.ahead),
        *_of_kind(lines, "reduce", shape.reduces, shape.behind),
        *_of_kind(lines, "all_reduce", shape.reduces, max(1, shape.behind)),
    )


def least(lines: Lines) -> State:
    """Every collective by itself, started late and waited for early: few plans take less memory."""
    state: State = ()
    for kind in KINDS:
        soon = lines.used_next if kind == "reduce" else [False] * len(lines.starts[kind])
        state += with_windows(kind, {(m,): -1 if used else 1 for m, used in enumerate(soon)})
    return state


def by_room(
    lines: Lines,
    room: Mapping[Kind, Sequence[float]],
    gathers: tuple[float, int],
    reduces: tuple[float, int],
) -> State:
    """Buckets that take a share of the memory that is free where they are used, or made.

    Args:
        lines: of the program.
        room: bytes that are free at each place, by kind.
        gathers: the share of a bucket, and its window.
        reduces: likewise.
    """
    return (
        *_filling(lines, "gather", room, *gathers),
        *_filling(lines, "reduce", room, *reduces),
        *_filling(lines, "all_reduce", room, reduces[0], 1),
    )


def _filling(
    lines: Lines, kind: Kind, room: Mapping[Kind, Sequence[float]], share: float, window: int
) -> State:
    open_runs: dict[object, tuple[float, list[int]]] = {}
    runs: list[list[int]] = []
    for m, known in enumerate(lines.classes[kind]):
        nbytes = lines.nbytes[kind][m]
        size, run = open_runs.get(known, (0.0, []))
        if run and size + nbytes <= share * room[kind][run[0]]:
            run.append(m)
            open_runs[known] = (size + nbytes, run)
        else:
            runs.append([m])
            open_runs[known] = (nbytes, runs[-1])
    return with_windows(kind, dict.fromkeys(map(tuple, runs), window))


def _of_kind(lines: Lines, kind: Kind, n: int, window: int) -> State:
    """All collectives of a kind in about ``n`` buckets of equal bytes, each of one class."""
    nbytes, classes = lines.nbytes[kind], defaultdict[object, list[int]](list)
    for m, known in enumerate(lines.classes[kind]):
        classes[known].append(m)
    whole = max(1, sum(nbytes))
    runs: list[tuple[int, ...]] = []
    for members in classes.values():
        runs += even(members, max(1, round(n * sum(nbytes[m] for m in members) / whole)), nbytes)
    return with_windows(kind, dict.fromkeys(runs, window))


def in_parts(program: Program, buckets: Sequence[Bucket], n: int) -> list[Bucket]:
    """``buckets``, each cut into up to ``n`` runs of members of about equal bytes. A window still
    counts buckets, so it stands for fewer bytes than before."""
    taken = {bucket.label for bucket in buckets}
    found: list[Bucket] = []
    for bucket in buckets:
        of_members = [program.sent[start].nbytes for start in bucket.starts]
        runs = even(range(len(of_members)), n, of_members)
        found += parts_of(bucket, [tuple(bucket.starts[i] for i in run) for run in runs], taken)
    return found
