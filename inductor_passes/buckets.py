"""Which collectives go out as one: the manual planner."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from inductor_passes.program import Bucket, Program

Patterns = Sequence["str | Sequence[str]"]


@dataclass(frozen=True)
class Assignment:
    """Which bucket each parameter belongs to.

    Attributes:
        label_of: bucket label by parameter FQN.
        uncovered: FQNs that no pattern covers, in model order. They have labels of their own.
    """

    label_of: Mapping[str, str]
    uncovered: tuple[str, ...] = ()


def assign_alone(fqns: Sequence[str]) -> Assignment:
    """Every parameter by itself."""
    return Assignment({fqn: fqn for fqn in fqns})


def assign_by_module(fqns: Sequence[str], patterns: Patterns | None = None) -> Assignment:
    """One bucket per module.

    Args:
        fqns: of all parameters, in model order.
        patterns: globs on module (or parameter) FQNs, where ``*`` stays within one component.
            Each module that a pattern matches gets a bucket; those that a nested list matches
            share one. A parameter goes to the innermost module that covers it. None: one bucket
            per element of the model's repeated lists (the outermost numbered component of the
            FQNs), and one per run of the parameters before, between and after them.

    Raises:
        ValueError: a pattern matches nothing, or a module is named for two buckets.
        TypeError: ``patterns`` is not a list of strings and lists of strings.
    """
    if patterns is None:
        labels = {fqn: _list_element(fqn) for fqn in fqns}
        label_of = {fqn: label for fqn, label in labels.items() if label}
        return Assignment({**label_of, **_runs(fqns, label_of)})
    bucket_of = _expand(patterns, fqns)
    label_of = {}
    for fqn in fqns:
        covering = [bucket_of[path] for path in _prefixes(fqn) if path in bucket_of]
        if covering:
            label_of[fqn] = covering[-1]
    uncovered = tuple(fqn for fqn in fqns if fqn not in label_of)
    return Assignment({**label_of, **_runs(fqns, label_of)}, uncovered)


def _expand(patterns: Patterns, fqns: Sequence[str]) -> dict[str, str]:
    """Bucket label by the path of each module (or parameter) that the patterns match."""
    paths = list(dict.fromkeys(path for fqn in fqns for path in _prefixes(fqn)))
    bucket_of: dict[str, str] = {}
    for entry in _checked(patterns):
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


def _checked(patterns: Patterns) -> Patterns:
    entries = patterns if isinstance(patterns, (list, tuple)) else [None]
    for entry in entries:
        globs = [entry] if isinstance(entry, str) else entry
        if (
            not isinstance(globs, (list, tuple))
            or not globs
            or not all(isinstance(g, str) for g in globs)
        ):
            raise TypeError(
                "buckets: expected module FQNs (globs) and lists of them that share a bucket, "
                f"got {patterns!r}"
            )
    return patterns


def _matching(glob: str, paths: Sequence[str]) -> list[str]:
    found = [path for path in paths if _matches(path, glob)]
    if not found:
        close = difflib.get_close_matches(glob, paths, n=3, cutoff=0.5)
        hint = f"the closest are {', '.join(map(repr, close))}; " if close else ""
        raise ValueError(
            f"buckets: {glob!r} matches no module that has parameters; {hint}"
            "see model.named_modules(), and mind that * stays within one component"
        )
    return found


def _prefixes(fqn: str) -> list[str]:
    """Modules around a parameter, outermost first, and the parameter itself."""
    parts = fqn.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _matches(path: str, pattern: str) -> bool:
    parts, globs = path.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _list_element(fqn: str) -> str:
    """The list element that a parameter belongs to: its path up to the first number, or ''."""
    parts = fqn.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _runs(fqns: Sequence[str], label_of: Mapping[str, str]) -> dict[str, str]:
    """Labels for the parameters that have none: one per run of them, from its modules' names."""
    runs: list[list[str]] = []
    previous_covered = True
    for fqn in fqns:
        covered = fqn in label_of
        if not covered:
            if previous_covered:
                runs.append([])
            runs[-1].append(fqn)
        previous_covered = covered
    labels = {}
    for run in runs:
        label = "+".join(dict.fromkeys(fqn.rpartition(".")[0] or fqn for fqn in run))
        labels.update(dict.fromkeys(run, label))
    return labels


def plan_buckets(program: Program, assignment: Assignment) -> tuple[Bucket, ...]:
    """The buckets of one graph, in the order of their first members.

    Members share label, kind, group, reduce op and dtype. (Gloo reads the tensors of a coalesced
    reduce as if all had the dtype of the first.) Collectives that are not data parallelism's
    stay out.
    """
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for _, op in program.starts():
        c = op.collective
        if c is not None and c.kind != "other" and c.fqns:
            label = assignment.label_of.get(c.fqns[0], c.fqns[0])
            groups[label, c.kind, c.group, c.ranks, c.reduce_op, c.dtype].append(op.name)
    return tuple(Bucket(str(key[0]), tuple(starts)) for key, starts in groups.items())
