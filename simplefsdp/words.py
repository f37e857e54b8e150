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


def few_ranks(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 2 and 5``, ``ranks 0, 1, 2 and 7 more``."""
    if not ranks:
        return "a rank that came too late"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        shown[7:] = [f"{len(ranks) - 7} more"]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
