"""Positions in a list, and what is known of them once the list is in another order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def by_key(keys: Sequence[Any]) -> list[int]:
    """Positions, by the key of each. By an order of positions: where each of them is in it."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def moved(found: Mapping[int, Iterable[int]], to: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """What is known of positions, each now where ``to`` says. Several of those that are told of may
    be at one place now, of the keys none."""
    known = ((to[i], tuple(dict.fromkeys(map(to.__getitem__, of)))) for i, of in found.items())
    return dict(sorted(known))
