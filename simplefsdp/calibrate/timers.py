"""How calls are timed: one by one on the host's clock, or in a queue between a device's events."""

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
_LONG_US = 2e4  # a queue of calls takes no longer, or has one


@dataclass(frozen=True)
class Timer:
    """What a moment is, and how long it is from one to another."""

    queued: int  # most calls between two moments
    # Note the moment that is now, or that will be when the device gets there.
    mark: Callable[[], Any]
    # Microseconds from one to another, which may be waited for.
    between_us: Callable[[Any, Any], float]
    # Make the device wait while calls are queued up, so that it never waits for one.
    hold: Callable[[], None] = lambda: None

    def us(self, call: Call, count: int = 1) -> float:
        """The time of one of ``count`` calls in a row."""
        if count > 1:
            self.hold()
        return self.elapsed_us(call, count) / count

    def elapsed_us(self, call: Call, count: int) -> float:
        """The time of ``count`` calls, from now on; on CUDA on the current stream alone."""
        begin = self.mark()
        for _ in range(count):
            call()
        return self.between_us(begin, self.mark())


def timer_for(device: torch.device) -> Timer:
    """On CPU the host's clock; on CUDA events, between which calls follow each other closely.

    One call between two synchronizations would be timed with its launch, which a step hides.
    """
    return events(device) if device.type == "cuda" else host_clock(device)


def host_clock(device: torch.device) -> Timer:
    """One call at a time, with all that the host does for it."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return Timer(1, now, lambda begin, end: float(end - begin) * 1e6)


def events(device: torch.device) -> Timer:
    """Calls in a row on the current stream, and on others that it waits for."""

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
    """The median time of each call; they take so many turns, after one untimed turn.

    ``together``: other ranks make the same calls and wait for each other's, so that how many are
    queued must not depend on how long they take here.
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
