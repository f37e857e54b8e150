"""Measured transfers by launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from simplefsdp.inspection.intervals import length, union
from simplefsdp.inspection.measured import Measured


class Launch(NamedTuple):
    """What one launch sent: several transfers, if gloo reduces tensor by tensor."""

    kind: str
    begin_us: float
    end_us: float
    exposed_us: float
    nbytes: int | None


def launches_of(transfers: Sequence[Measured]) -> list[Launch]:
    """Transfers by launch, in the order of the launches."""
    found = []
    numbered = sorted(transfers, key=lambda m: (m.transfer.launch, m.transfer.begin_us))
    for _, group in groupby(numbered, key=lambda m: m.transfer.launch):
        members = list(group)
        sizes = [m.transfer.nbytes for m in members]
        known = [n for n in sizes if n is not None]
        found.append(
            Launch(
                members[0].transfer.kind,
                min(m.transfer.begin_us for m in members),
                max(m.transfer.end_us for m in members),
                _exposed_us(members),
                sum(known) if len(known) == len(sizes) else None,
            )
        )
    return found


def _exposed_us(members: Sequence[Measured]) -> float:
    """Exposed time of one launch; transfers side by side expose the same time once."""
    return length(union(span for m in members for span in m.exposed))
