"""Positions in a list, and what is known of them once the list is in another order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def by_key(keys: Sequence[Any]) -> list[int]:
    """All positions in ``keys``, sorted by their keys. If ``keys`` is itself an order of positions,
    the result is its inverse: the place of each position in that order."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def moved(found: Mapping[int, Iterable[int]], to: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """``found`` with each position replaced by its new one, which ``to`` gives. Positions among the
    values may become equal, and are then kept once; keys must stay distinct."""
    known = ((to[i], tuple(dict.fromkeys(map(to.__getitem__, of)))) for i, of in found.items())
    return dict(sorted(known))
