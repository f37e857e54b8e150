"""The largest batch, or the longest sequence, that a device has memory for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from simplefsdp.sweep.cells import CellStep

MOST = {"batch": 1 << 16, "seq": 1 << 24}
_AT_ONCE = 32


def largest(
    steps: Callable[[Sequence[int]], Sequence[CellStep]], most: int, multiple: int = 1
) -> tuple[CellStep | None, CellStep | None]:
    """The step of the largest size up to ``most`` that fits, and of the next one, which does not;
    either may be None. Of sizes, only multiples of ``multiple`` are looked at.

    ``steps`` gives the steps of some sizes; if one does not fit, no larger one does.
    """
    most //= multiple
    fits, not_ = None, None
    low, high = 0, most + 1  # which fits, which does not
    while high - low > 1:
        # Each as much larger than the one before.
        between = numpy.geomspace(low + 1, high - 1, _AT_ONCE)
        sizes = sorted({round(n) for n in between.tolist()})
        found = steps([size * multiple for size in sizes])
        for step, size in zip(found, sizes, strict=True):
            if step.fits:
                low, fits = size, step
            else:
                high, not_ = size, step
                break
    return fits, not_
