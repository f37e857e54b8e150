"""Positions in a list, and what is known of them once the list is in another order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def places(order: Sequence[int]) -> list[int]:
    """Where each position is in an ``order`` of them."""
    return sorted(range(len(order)), key=order.__getitem__)


def moved(found: Mapping[int, Iterable[int]], to: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """What is known of positions, each now where ``to`` says. Several of those that are told of may
    be at one place now, of the keys none."""
    known = ((to[i], tuple(dict.fromkeys(map(to.__getitem__, of)))) for i, of in found.items())
    return dict(sorted(known))
