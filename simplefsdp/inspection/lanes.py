"""Busy and idle times of a simulated run's lanes, and when the compute lane reaches each op."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from inductor_passes.ir.program import Program
from inductor_passes.machine.simulate import Span, Timeline


def arrivals(program: Program, timeline: Timeline) -> list[float]:
    """When the compute lane reaches each op, in us; the last entry is the end of the program."""
    span_of = {span.op: span for span in timeline.spans}
    now, found = 0.0, []
    for i, op in enumerate(program.ops):
        found.append(now)
        if op.kind == "compute":
            now = span_of[op.name].end_us
        elif op.kind == "wait":
            ends = [span_of[program.ops[s].name].end_us for s in program.start_of[i]]
            now = max(now, *ends)
    return [*found, now]


class Lane:
    """Spans of one lane, which do not overlap, and the time between them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.begin_us, span.end_us))
        self._begins = [span.begin_us for span in self.spans]
        self._ends = [span.end_us for span in self.spans]
        self._busy = [0.0, *accumulate(span.end_us - span.begin_us for span in self.spans)]

    def busy_us(self, begin_us: float, end_us: float) -> float:
        """Time in ``[begin_us, end_us]`` during which the lane is busy."""
        return max(0.0, self._busy_until(end_us) - self._busy_until(begin_us))

    def idle_us(self, begin_us: float, end_us: float) -> float:
        """Time in ``[begin_us, end_us]`` during which the lane is idle."""
        return max(0.0, end_us - begin_us - self.busy_us(begin_us, end_us))

    def overlapping(self, begin_us: float, end_us: float) -> Sequence[Span]:
        """Spans that overlap ``(begin_us, end_us)``."""
        return self.spans[bisect_right(self._ends, begin_us) : bisect_left(self._begins, end_us)]

    def idle_before(self, us: float, idle_us: float) -> float:
        """The latest time from which the lane is idle for ``idle_us`` in all until ``us``."""
        end = us
        for span in reversed(self.spans[: bisect_left(self._begins, us)]):
            gap = end - span.end_us
            if gap >= idle_us:
                return end - idle_us
            idle_us -= max(0.0, gap)
            end = span.begin_us
        return max(0.0, end - idle_us)

    def _busy_until(self, us: float) -> float:
        n = bisect_left(self._begins, us)
        return self._busy[n] - (max(0.0, self._ends[n - 1] - us) if n else 0.0)


def lanes_of(timeline: Timeline) -> Mapping[str, Lane]:
    """The lanes of a timeline by name; there always is one for ``"compute"``."""
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.lane].append(span)
    spans.setdefault("compute", [])
    return {name: Lane(found) for name, found in spans.items()}
