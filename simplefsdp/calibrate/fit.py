"""Fits the figures of a cluster to measured times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from inductor_passes.machine.links import Link, Ramp, fraction

_TOLERANCE = 0.1  # a simpler fit is taken if its relative error is at most this much larger


class Sample(NamedTuple):
    """The measured time of a kernel or of a collective."""

    size: float  # bytes of the full tensors, or floating-point operations
    us: float  # the median
    members: int = 1  # tensors that are launched as one


def fit_link(samples: Sequence[Sample], ranks: int) -> Link:
    """Fit latency, bandwidth and, if these do not suffice, a ramp, to two or more sizes.

    The fits that are tried, in this order: the line with the least relative errors; then a latency
    of nine, eight, ... zero tenths of the smallest size's time, with a ramp for the rest. The
    result is the first fit whose worst error is at most 10 percentage points above the best fit's.

    Raises:
        ValueError: fewer than two sizes.
    """
    samples = without_delays(samples)
    if len({s.size for s in samples}) < 2:
        raise ValueError(f"a link is fitted to two sizes or more, got {len(samples)}")
    latency_us, us_per_byte = _line(samples)
    line = Link(latency_us, 1e-3 / us_per_byte)
    ramped = [_ramped(samples, ranks, samples[0].us * tenths / 10) for tenths in range(9, -1, -1)]
    errors = {link: worst_error(link, samples, ranks) for link in (line, *ramped)}
    good = min(errors.values()) + _TOLERANCE
    return next(link for link, error in errors.items() if error <= good)


def with_members(link: Link, samples: Sequence[Sample]) -> Link:
    """``link`` with the cost of each further member of a bucket. The cost is derived from the times
    of the same bytes as one buffer and as several tensors: it is the median over buckets, at least
    0 and at most the latency."""
    whole_us = {s.size: s.us for s in samples if s.members == 1}
    each = [(s.us - whole_us[s.size]) / (s.members - 1) for s in samples if s.members > 1]
    if not each:
        return link
    return replace(link, member_us=min(max(0.0, statistics.median(each)), link.latency_us))


def without_delays(samples: Sequence[Sample]) -> list[Sample]:
    """Samples by size, with the time of each lowered to that of a larger one if that was faster:
    other work on the machine can only add to a time."""
    kept: list[Sample] = []
    for sample in sorted(samples, reverse=True):
        us = min(sample.us, kept[-1].us) if kept else sample.us
        kept.append(Sample(sample.size, us))
    return kept[::-1]


def _ramped(samples: Sequence[Sample], ranks: int, latency_us: float) -> Link:
    floor = samples[0].us / 100  # for times that noise has brought below the latency
    peak, ramp = fit_ramp([(s.size, s.size / max(s.us - latency_us, floor)) for s in samples])
    return Link(latency_us, peak / 1e3, tuple((size / ranks, reached) for size, reached in ramp))


def worst_error(link: Link, samples: Sequence[Sample], ranks: int) -> float:
    """The largest relative error of a link's times."""
    return max(abs(link.us(s.size, ranks) / s.us - 1) for s in samples)


def _line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Intercept, not negative, and slope, positive, of the line with the least relative errors."""
    # Without numpy, because the kit in benchmarks/gpu also calibrates where there is none.
    total = sum(s.us**-2 for s in samples)
    weights = [s.us**-2 / total for s in samples]
    mean_size = sum(w * s.size for w, s in zip(weights, samples, strict=True))
    mean_us = sum(w * s.us for w, s in zip(weights, samples, strict=True))
    off = [s.size - mean_size for s in samples]
    slope = sum(w * x * (s.us - mean_us) for w, x, s in zip(weights, off, samples, strict=True))
    slope /= sum(w * x * x for w, x in zip(weights, off, strict=True))
    intercept = mean_us - slope * mean_size
    last = samples[-1]
    seen = last.us / last.size / 100  # a slope of a hundredth of the longest time; less is noise
    if slope >= seen and intercept >= 0:
        return intercept, slope
    # The noise is too large to see a latency, or a bandwidth.
    return (0.0, last.us / last.size) if slope >= seen else (samples[0].us, seen)


def fit_ramp(rates: Sequence[tuple[float, float]], *, falls: bool = False) -> tuple[float, Ramp]:
    """The peak rate, and the fraction of it that each size reaches, from ``(size, rate)`` pairs
    with ascending sizes.

    A rate that rises faster than the size is cut, since a larger size must not take less time.
    Unless ``falls``, neighbours with falling rates get their mean.
    """
    sizes, fitted = [size for size, _ in rates], [rate for _, rate in rates]
    if not falls:
        fitted = _rising(fitted)
    for i, (before, after) in enumerate(pairwise(sizes), start=1):
        fitted[i] = min(fitted[i], fitted[i - 1] * after / before)
    peak = max(fitted)
    return peak, tuple((size, rate / peak) for size, rate in zip(sizes, fitted, strict=True))


def _rising(values: Sequence[float]) -> list[float]:
    """The closest sequence that does not fall (isotonic regression)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [statistics.fmean(block) for block in blocks for _ in block]


def ramp_us(peak: float, ramp: Ramp, size: float) -> float:
    """Time of ``size`` at its fraction of ``peak`` sizes per us."""
    return size / (peak * fraction(ramp, size))
