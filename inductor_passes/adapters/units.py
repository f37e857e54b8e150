"""Units: groups of computes of a layer, in forward or backward. Collectives are launched and waited
for only between units.

A whole-graph compiler compiles a layer as often as the model repeats it. If launches and waits
stand only between units, layers can be cut alike: where a launch or wait stands in one layer, all
are cut (``executor/regions.py``), and one is compiled for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise, takewhile
from typing import NamedTuple

from inductor_passes.ir.program import Program
from inductor_passes.planner.invariant import following, prepared


class Part(NamedTuple):
    """Where in a model an op belongs."""

    module: str  # the repeated module, a layer; empty outside of all of them
    child: str  # of that module; empty for what it computes itself


class Piece(NamedTuple):
    """Computes of a layer that are not cut."""

    half: int  # number of the half of a layer, counted over all layers
    at: int  # number of the piece in that half


def in_units(program: Program, pieces: Mapping[str, Piece]) -> Program:
    """``program`` with the ops of each piece, given by name, in a unit."""
    number = {piece: i for i, piece in enumerate(dict.fromkeys(pieces.values()), 1)}
    ops = (
        replace(op, unit=number[pieces[op.name]]) if op.name in pieces else op for op in program.ops
    )
    return replace(program, ops=tuple(ops))


def pieces_of(
    program: Program, part_of: Callable[[str], Part | None], heavy: Collection[str] = ()
) -> dict[str, Piece]:
    """The computes that are in layers, by name, and the piece of each.

    A layer is cut in halves between its children, behind one that multiplies matrices: attention
    and what norms its input are a half, and so are the feed-forward network and its norm. A
    residual sum is in the half whose norm reads it, of the next layer perhaps: they are one loop
    (:func:`_handed_on`). A half may be cut before each op that multiplies matrices, for code is
    not fused across those. What is outside of layers is like nothing else, and in no piece. Neither
    is what prepares a gather, which belongs to its launch, nor what follows a reduce, which belongs
    to its wait.

    Args:
        program: in the order of the model.
        part_of: where an op, given by name, belongs; None if nobody knows: it goes with what is
            before it.
        heavy: ops that multiply matrices.
    """
    moved = prepared(program) | following(program, ("reduce", "all_reduce"))
    computes = [i for i, op in enumerate(program.ops) if op.kind == "compute" and i not in moved]
    parts = _parts(program, computes, part_of)
    found: dict[str, Piece] = {}
    half = at = worked = 0
    for i, part, before, works in zip(
        computes,
        parts,
        [Part("", ""), *parts[:-1]],
        _will_work(program, computes, parts, heavy),
        strict=True,
    ):
        if part.module != before.module or (part != before and worked and works):
            half, at, worked = half + 1, 0, 0
        if program.ops[i].name in heavy:
            at, worked = worked, worked + 1
        if part.module:
            found[program.ops[i].name] = Piece(half, at)
    return _handed_on(program, computes, found, heavy)


def _parts(
    program: Program, computes: Sequence[int], part_of: Callable[[str], Part | None]
) -> list[Part]:
    """The part of each op. An op of unknown part, or one that the current layer computes itself,
    gets the part of the op before: a residual sum goes with what it adds."""
    parts: list[Part] = []
    current = Part("", "")
    for i in computes:
        part = part_of(program.ops[i].name) or current
        current = current if part == Part(current.module, "") else part
        parts.append(current)
    return parts


def _handed_on(
    program: Program, computes: Sequence[int], piece: Mapping[str, Piece], heavy: Collection[str]
) -> dict[str, Piece]:
    """The pieces, with the ops behind the last matrix product of a half moved into the piece that
    follows, if the first ops of that piece read one of them, and none of them is sent."""
    names, through = [op.name for op in program.ops], _through_views(program)

    def half_of(i: int) -> int | None:
        return piece[names[i]].half if names[i] in piece else None

    def read_by(ops: Iterable[int]) -> set[int]:
        return {j for i in ops for before in program.predecessors[i] for j in through[before]}

    sent = read_by(i for i, _ in program.starts())
    found = dict(piece)
    for half, behind in pairwise(list(run) for _, run in groupby(computes, half_of)):
        works = [k for k, i in enumerate(half) if names[i] in heavy]
        last = half[works[-1] + 1 :] if works and half_of(half[0]) is not None else []
        first = list(takewhile(lambda i: names[i] not in heavy, behind))
        if not read_by(first).isdisjoint(last) and sent.isdisjoint(last):
            for i in last:
                del found[names[i]]
                if names[first[0]] in piece:
                    found[names[i]] = piece[names[first[0]]]
    return found


def _through_views(program: Program) -> list[frozenset[int]]:
    """For a view, the ops whose results it passes on; for any other op, the op itself."""
    found: list[frozenset[int]] = []
    for i, op in enumerate(program.ops):
        made = (found[j] for j in program.predecessors[i]) if op.kind == "view" else ({i},)
        found.append(frozenset[int]().union(*made))
    return found


def _will_work(
    program: Program, computes: Sequence[int], parts: Sequence[Part], heavy: Collection[str]
) -> list[bool]:
    """For each op, whether the op or a later one of its layer multiplies matrices."""
    found, works, module = [], False, ""
    for i, part in zip(reversed(computes), reversed(parts), strict=True):
        works = (works and part.module == module) or program.ops[i].name in heavy
        module = part.module
        found.append(works)
    return found[::-1]


def parts_of(modules: Collection[str]) -> Callable[[str], Part]:
    """A function that gives the part that a module's path leads to, of a model that repeats
    ``modules``.

    A path may begin outside of the wrapped model: ``model.layers.3.mlp`` is in ``layers.3``. Of
    several modules that fit it is the longest.
    """
    known = frozenset(modules)

    @cache
    def part(path: str) -> Part:
        names = path.split(".")
        spans = [(i, j) for j in range(1, len(names) + 1) for i in range(j)]
        found = [(j - i, j) for i, j in spans if ".".join(names[i:j]) in known]
        length, end = max(found, default=(0, 0))
        return Part(".".join(names[end - length : end]), "".join(names[end : end + 1]))

    return part
