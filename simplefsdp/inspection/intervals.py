"""Sets of times as sorted lists of disjoint (begin, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """The times that are in any of ``spans``."""
    found: Intervals = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def intersection(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """The times that are in both ``a`` and ``b``."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """The times that are in ``a`` and not in ``b``."""
    if not a:
        return []
    edges = [a[0][0], *(t for span in b for t in span), a[-1][1]]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return intersection(a, [(begin, end) for begin, end in gaps if begin < end])


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
