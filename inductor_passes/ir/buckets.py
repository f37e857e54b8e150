"""Which collectives go out as one: the manual planner."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from inductor_passes.ir.program import Bucket, Program

Patterns = Sequence["str | Sequence[str]"]

# For each tensor in a coalesced call the compiler walks the whole list of that call, so the time to
# compile a call grows with the square of its tensors (benchmarks/LOG.md). A layer of 128 experts
# with three matrices each has fewer.
MOST_MEMBERS = 512


@dataclass(frozen=True)
class Assignment:
    """Which bucket each parameter belongs to."""

    label_of: Mapping[str, str]  # bucket label by parameter FQN
    # FQNs that no pattern covers, in model order. They get the default buckets.
    uncovered: tuple[str, ...] = ()


def assign_by_module(
    fqns: Sequence[str], patterns: Patterns | None = None, *, known: Iterable[str] = ()
) -> Assignment:
    """One bucket per module.

    Args:
        fqns: of the parameters of a graph, in an order that all ranks share.
        patterns: globs on module (or parameter) FQNs, where ``*`` stays within one component.
            Each module that a pattern matches gets a bucket; those that a nested list matches
            share one. A parameter goes to the innermost module that covers it. Parameters that
            no pattern covers, or all if it is None, are assigned by default: one bucket per
            element of the model's repeated lists, and one per run of the parameters before,
            between and after them (of a model without lists: one per top-level module).
        known: further parameters that exist, but not in this graph; a pattern may match those.

    Raises:
        ValueError: a pattern matches nothing, or a module is named for two buckets.
        TypeError: ``patterns`` is not a list of strings and lists of strings.
    """
    paths = list(dict.fromkeys(path for fqn in (*fqns, *known) for path in _prefixes(fqn)))
    bucket_of = _expand(check_patterns(patterns), paths) if patterns is not None else {}
    covered: dict[str, str] = {}
    for fqn in fqns:
        covering = [bucket_of[path] for path in _prefixes(fqn) if path in bucket_of]
        if covering:
            covered[fqn] = covering[-1]
    rest = tuple(fqn for fqn in fqns if fqn not in covered)
    label_of = {**covered, **_by_default(fqns, rest)}
    uncovered = rest if patterns is not None else ()
    return Assignment({fqn: label_of[fqn] for fqn in fqns}, uncovered)


def _expand(patterns: Patterns, paths: Sequence[str]) -> dict[str, str]:
    """Bucket label by the path of each module (or parameter) that the patterns match."""
    bucket_of: dict[str, str] = {}
    for entry in patterns:
        globs = [entry] if isinstance(entry, str) else entry
        found = list(dict.fromkeys(path for glob in globs for path in _matching(glob, paths)))
        for path in found:
            label = path if isinstance(entry, str) else "+".join(found)
            if bucket_of.setdefault(path, label) != label:
                raise ValueError(
                    f"buckets: {path!r} is named for two buckets, {bucket_of[path]!r} and "
                    f"{label!r}; name it once"
                )
    return bucket_of


def check_patterns(patterns: object) -> Patterns:
    """``patterns`` as a list, if they are valid.

    Raises:
        TypeError: not a list of strings and lists of strings, or an empty one.
    """
    entries: list[Any] = list(patterns) if isinstance(patterns, (list, tuple)) else []
    for entry in entries or [None]:
        globs = [entry] if isinstance(entry, str) else entry
        if not (
            isinstance(globs, (list, tuple)) and globs and all(isinstance(g, str) for g in globs)
        ):
            raise TypeError(
                "buckets: expected module FQNs (globs) and lists of them that share a bucket, "
                f"got {patterns!r}"
            )
    return entries


def _matching(glob: str, paths: Sequence[str]) -> list[str]:
    found = [path for path in paths if _matches(path, glob)]
    if not found:
        close = difflib.get_close_matches(glob, paths, n=3, cutoff=0.5)
        hint = f"the closest are {', '.join(map(repr, close))}; " if close else ""
        raise ValueError(
            f"buckets: {glob!r} matches no module that has parameters; {hint}see "
            "model.named_modules(); * stays within one component, and a weight that modules share "
            "(tied) counts for the first of them alone"
        )
    return found


def _prefixes(fqn: str) -> list[str]:
    """Modules around a parameter, outermost first, and the parameter itself."""
    parts = fqn.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _matches(path: str, pattern: str) -> bool:
    parts, globs = path.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _by_default(fqns: Sequence[str], rest: Sequence[str]) -> dict[str, str]:
    """Labels for the parameters in ``rest``, which keep the order of ``fqns``."""
    elements = layer_of(fqns)
    left = set(rest)

    def run_of(fqn: str) -> str | None:
        """A key that is equal within a run; None for a parameter that has a bucket already."""
        if fqn in elements or fqn not in left:
            return None
        return "" if elements else fqn.partition(".")[0]

    labels = {fqn: elements[fqn] for fqn in rest if fqn in elements}
    for key, run in groupby(fqns, run_of):
        if key is None:
            continue
        members = list(run)
        label = "+".join(dict.fromkeys(fqn.rpartition(".")[0] or fqn for fqn in members))
        labels.update(dict.fromkeys(members, new_label(label, labels.values())))
    return labels


def new_label(label: str, taken: Iterable[str]) -> str:
    """``label`` if no other bucket has it, else with primes.

    Ordering takes buckets of one kind and group that share a label for one bucket, so every new
    label is made here.
    """
    others = set(taken)
    while label in others:
        label += "'"
    return label


def repeated_modules(fqns: Sequence[str]) -> tuple[str, ...]:
    """The elements of a model's repeated lists, its layers, from the FQNs of its parameters."""
    return tuple(dict.fromkeys(layer_of(fqns).values()))


def layer_of(fqns: Sequence[str]) -> dict[str, str]:
    """The layer of each parameter that is inside an element of a list.

    A parameter inside several lists belongs to the element of the outermost list of 3 or more
    elements (so a layer is not one of its experts, nor a whole encoder or decoder of a list of
    two); if there is no such list, to the element of the longest.
    """
    prefixes = {fqn: [p for p in _prefixes(fqn)[:-1] if p.split(".")[-1].isdigit()] for fqn in fqns}
    length = Counter(
        p.rpartition(".")[0] for p in {p for found in prefixes.values() for p in found}
    )
    elements = {}
    for fqn, found in prefixes.items():
        if found:
            lengths = [length[p.rpartition(".")[0]] for p in found]
            long = next((i for i, n in enumerate(lengths) if n >= 3), lengths.index(max(lengths)))
            elements[fqn] = found[long]
    return elements


def plan_buckets(program: Program, assignment: Assignment) -> tuple[Bucket, ...]:
    """The buckets of one graph, in the order of their first members.

    Members share label, kind, group, reduce op, dtype (Gloo reads all tensors of a coalesced reduce
    as if they had the dtype of the first), and how often their parameter was sent before: a whole
    step gathers it for forward, and again for backward. Members travel in the order of the
    assignment, so that all ranks lay them out alike. Collectives that are not data parallelism's
    are in no bucket. Buckets of more than :data:`MOST_MEMBERS` members are split.
    """
    groups: dict[tuple[object, ...], list[tuple[int, str]]] = defaultdict(list)
    place = {fqn: i for i, fqn in enumerate(assignment.label_of)}
    seen: Counter[tuple[object, ...]] = Counter()
    for name, c in program.sent.items():
        if c.kind != "other" and c.fqns:
            label = assignment.label_of.get(c.fqns[0], c.fqns[0])
            times = seen[c.fqns[0], c.kind, c.group]
            seen[c.fqns[0], c.kind, c.group] += 1
            groups[label, times, c.kind, c.group, c.ranks, c.reduce_op, c.dtype].append(
                (place.get(c.fqns[0], len(place)), name)
            )
    first = {str(label) for label, times, *_ in groups if not times}
    return of_few_members(
        Bucket(
            str(label) if not times else new_label(str(label), first),
            tuple(name for _, name in sorted(found, key=lambda pair: pair[0])),
        )
        for (label, times, *_), found in groups.items()
    )


def of_few_members(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """``buckets``, with those of more than :data:`MOST_MEMBERS` members split into parts."""
    whole = list(buckets)
    taken = {bucket.label for bucket in whole}
    found: list[Bucket] = []
    for bucket in whole:
        starts = bucket.starts
        runs = [starts[i : i + MOST_MEMBERS] for i in range(0, len(starts), MOST_MEMBERS)]
        found += parts_of(bucket, runs, taken)
    return tuple(found)


def parts_of(bucket: Bucket, runs: Sequence[Sequence[str]], taken: Iterable[str]) -> list[Bucket]:
    """``bucket`` cut into one bucket per run, with labels not in ``taken``; itself if one run."""
    if len(runs) == 1:
        return [bucket]
    return [
        replace(bucket, label=new_label(f"{bucket.label}/{i}", taken), starts=tuple(run))
        for i, run in enumerate(runs)
    ]
