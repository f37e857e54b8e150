"""Counts and lists of names as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def plural(n: int, word: str) -> str:
    """A number and its word: ``1 bucket``, ``2 buckets``."""
    return f"{n:,} {word}{'s'[: n != 1]}"


def counted(counts: Iterable[tuple[str, int]]) -> str:
    """Counts of several kinds, without those that are 0: ``57 gathers, 57 reduces``."""
    return ", ".join(plural(n, kind) for kind, n in counts if n) or "none"


def few(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
