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
    """The step of the largest size up to ``most`` that fits, and that of the next size, which does
    not fit; either may be None. Only multiples of ``multiple`` are tried.

    ``steps`` gives the steps of several sizes. If one size does not fit, no larger one may fit.
    """
    most //= multiple
    fits, not_ = None, None
    low, high = 0, most + 1  # a size that fits, and one that does not
    while high - low > 1:
        # A geometric series of sizes between them.
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
