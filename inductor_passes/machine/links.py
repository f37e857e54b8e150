"""What a link costs: latency plus bytes over a bandwidth that small messages do not reach.

A bucket may travel as one buffer or as several tensors that are launched together (coalesced). NCCL
puts all collectives of a group call into one kernel. It deals their bytes out over its channels,
the largest tensor first, an equal share to each channel. So a large tensor has channels of its own,
but small ones queue up on one channel, where each takes all steps of the ring in turn
(``scheduleCollTasksToPlan`` in NCCL's ``enqueue.cc``; NVIDIA/nccl issues 559, 725 and 1028: a group
of 980 vectors, 21 MB together, took 70 times as long as one buffer). The cost of this is modelled
as a fixed time per tensor (``member_us``).

Sizes are those of the full tensor: gathered, or not yet scattered. The tables of nccl-tests give
bandwidths for that size, too (``algbw``); a bus bandwidth is ``(ranks - 1) / ranks`` of it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from inductor_passes.ir.json_file import shown

Ramp = tuple[tuple[float, float], ...]
"""What fraction of a peak is reached, by size: ``((size, fraction), ...)`` with rising sizes."""


def fraction(ramp: Ramp, size: float) -> float:
    """The fraction at ``size``: log-log between the ramp's points, level beyond its ends."""
    if not ramp:
        return 1.0
    sizes = [at for at, _ in ramp]
    after = bisect_right(sizes, size)
    if after in (0, len(ramp)):
        return ramp[min(after, len(ramp) - 1)][1]
    return log_log(size, ramp[after - 1], ramp[after])


def log_log(x: float, before: tuple[float, float], after: tuple[float, float]) -> float:
    """The power law through two points, at ``x``."""
    (x0, y0), (x1, y1) = before, after
    if y0 == y1 or x0 == x1:
        return y0
    return y0 * math.exp(math.log(x / x0) * math.log(y1 / y0) / math.log(x1 / x0))


_LEAST, _MOST = 1e-9, 1e21
"""All figures of machines, in whatever unit, must lie between these two, so that products and
quotients of them are finite."""
_MOST_RANKS = 10**9


def check_number(what: str, value: object, *, zero: bool = False) -> None:
    """Raise unless ``value`` is a finite number above 0, or, with ``zero``, not below it.

    Raises:
        TypeError: not a number.
        ValueError: NaN, infinite, negative or, unless allowed, zero; or of a size that no machine
            has.
    """
    expected = f"{what}: expected a finite number {'of 0 or more' if zero else 'above 0'}"
    remedy = "measure it with `simplefsdp calibrate`, or correct it by hand"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{expected}, got {shown(value)}; {remedy}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{expected}, got {shown(value)}; {remedy}")
    if value > _MOST or (value < _LEAST and not zero):
        raise ValueError(
            f"{what}: no machine has {shown(value)}, which is not between {_LEAST:g} and "
            f"{_MOST:g}; {remedy}"
        )


def check_count(what: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a whole number from 1 to :data:`_MOST_RANKS`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what}: expected a whole number of 1 or more, got {shown(value)}")
    if value > _MOST_RANKS:
        raise ValueError(f"{what}: expected at most {_MOST_RANKS:,}, got {shown(value)}")


def check_ramp(what: str, ramp: Ramp, *, falls: bool = False) -> None:
    """Raise unless larger sizes take at least as much time and, unless the ramp may fall
    (``falls``), reach at least the same fraction.

    With both conditions, the time ``size / fraction(size)`` never falls as sizes grow, and is no
    less for two halves than for the whole: a bigger bucket costs more, two cost more than one.

    Raises:
        TypeError: a point that is not a pair of numbers.
        ValueError: names the point.
    """
    for point in ramp:
        if not isinstance(point, tuple) or len(point) != 2:
            raise TypeError(f"{what}: expected points (size, fraction), got {shown(point)}")
        check_number(f"{what}: a size", point[0])
        check_number(f"{what}: the fraction at {point[0]}", point[1])
        if point[1] > 1:
            raise ValueError(f"{what}: the fraction at {point[0]} is above 1: {point[1]}")
    for (size, reached), (larger, more) in pairwise(ramp):
        if larger <= size:
            raise ValueError(f"{what}: sizes must rise, but {larger} follows {size}")
        if more < reached and not falls:
            raise ValueError(f"{what}: from {size} to {larger} the fraction falls to {more}")
        if more > reached * larger / size * (1 + 1e-9):
            raise ValueError(
                f"{what}: from {size} to {larger} the fraction rises from {reached} to {more}, by "
                "more than the size does"
            )


@dataclass(frozen=True)
class Link:
    """How long one kind of collective takes between some ranks.

    Raises:
        TypeError, ValueError: a figure that is no number, negative, NaN or zero (``latency_us`` and
            ``member_us`` may be zero), ``member_us`` above ``latency_us``, or a ramp by which more
            bytes would take less time.
    """

    latency_us: float  # of the smallest message
    gb_s: float  # 1e9 bytes of the full tensor per second, for large messages
    ramp: Ramp = ()  # fraction of ``gb_s`` by bytes per rank; none: all of it, always
    # Time of each member of a bucket but the first; no more than the latency, or a bucket would
    # cost more than its members do.
    member_us: float = 0.0

    def __post_init__(self) -> None:
        check_number("latency_us", self.latency_us, zero=True)
        check_number("gb_s", self.gb_s)
        check_ramp("ramp", self.ramp)
        check_number("member_us", self.member_us, zero=True)
        if self.member_us > self.latency_us:
            raise ValueError(
                f"member_us: expected no more than latency_us, {self.latency_us}, got "
                f"{self.member_us}; measure it with `simplefsdp calibrate`, or correct it by hand"
            )

    def us(self, nbytes: float, ranks: int, members: int = 1) -> float:
        """Time for full tensors of ``nbytes`` in all; never falls with them, and is subadditive."""
        reached = self.gb_s * fraction(self.ramp, nbytes / ranks)
        return self.latency_us + self.member_us * (members - 1) + nbytes / (reached * 1e3)


def between(points: Sequence[tuple[float, Link]], x: float) -> Link:
    """The link at ``x``, interpolated from two or more links at rising places.

    Latency and bandwidth follow the power law through the two nearest points, also beyond the ends;
    but there latency never falls, nor does bandwidth rise, with ``x``. The ramp, and the fraction
    of the latency that a member costs, are those of the nearest point.
    """
    after = min(max(bisect_right([at for at, _ in points], x), 1), len(points) - 1)
    (x0, low), (x1, high) = points[after - 1], points[after]
    latency = low.latency_us
    if low.latency_us > 0 and high.latency_us > 0:
        latency = log_log(x, (x0, low.latency_us), (x1, high.latency_us))
    bandwidth = log_log(x, (x0, low.gb_s), (x1, high.gb_s))
    if not x0 <= x <= x1:
        end = low if x < x0 else high
        rises = x > x1
        latency = max(latency, end.latency_us) if rises else min(latency, end.latency_us)
        bandwidth = min(bandwidth, end.gb_s) if rises else max(bandwidth, end.gb_s)
    near = low if x * x < x0 * x1 else high
    each = latency * (near.member_us / near.latency_us) if near.latency_us > 0 else 0.0
    return Link(latency, bandwidth, near.ramp, min(latency, each))
