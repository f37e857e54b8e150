"""Times calls: one by one on the host's clock, or in a queue between events of a device."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from simplefsdp import _torch

Call = Callable[[], object]
K = TypeVar("K", bound=Hashable)
_QUEUED = 20
_LONG_US = 2e4  # a queue of several calls takes no longer than this


@dataclass(frozen=True)
class Timer:
    """Notes moments, and gives the time between two of them."""

    queued: int  # the most calls between two moments
    # Notes the present moment, or, in a queue, the one at which the device will get there.
    mark: Callable[[], Any]
    # Microseconds from one moment to another; waits for the latter.
    between_us: Callable[[Any, Any], float]
    # Keeps the device busy while calls are queued, so that later it never waits for the host.
    hold: Callable[[], None] = lambda: None

    def us(self, call: Call, count: int = 1) -> float:
        """The mean time of ``count`` calls in a row."""
        if count > 1:
            self.hold()
        return self.elapsed_us(call, count) / count

    def elapsed_us(self, call: Call, count: int) -> float:
        """The time of ``count`` calls together; on CUDA, on the current stream alone."""
        begin = self.mark()
        for _ in range(count):
            call()
        return self.between_us(begin, self.mark())


def timer_for(device: torch.device) -> Timer:
    """The timer for a device: the host's clock on CPU; on CUDA, events around a queue of calls.

    The time of one call between two synchronizations would include its launch, which a step hides.
    """
    return events(device) if device.type == "cuda" else host_clock(device)


def host_clock(device: torch.device) -> Timer:
    """A timer for one call at a time, which includes all that the host does for the call."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return Timer(1, now, lambda begin, end: float(end - begin) * 1e6)


def events(device: torch.device) -> Timer:
    """A timer for calls in a row on the current CUDA stream, and on streams that it waits for."""

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between_us(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return Timer(_QUEUED, mark, between_us, _torch.hold_up_stream)


def medians_us(
    calls: Mapping[K, Call], repeats: int, timer: Timer, *, together: bool = False
) -> dict[K, float]:
    """The median time of each call, over ``repeats`` turns after an untimed one.

    ``together``: other ranks make the same calls, and wait for each other in them. Then the number
    of queued calls must not depend on how long they take on this rank.
    """
    times: defaultdict[K, list[float]] = defaultdict(list)
    counts: dict[K, int] = {}
    for key, call in calls.items():
        call()
        counts[key] = timer.queued if together else _count(call, timer)
    for _ in range(repeats):
        for key, call in calls.items():
            times[key].append(timer.us(call, counts[key]))
    return {key: statistics.median(found) for key, found in times.items()}


def _count(call: Call, timer: Timer) -> int:
    return 1 if timer.queued == 1 else max(1, min(timer.queued, int(_LONG_US / timer.us(call))))
