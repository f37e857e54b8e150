"""The predicted step as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

A process per plan, a thread per lane. The compute lane has the compute ops and, where it stands
still, the waits. A collective is a slice on its group's lane, and a flow from its start by its
transfer to its wait. Live bytes are a counter. Forward, backward and optimizer follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simplefsdp.inspection.report import BucketReport, GraphReport, PlanReport

_COMPUTE = 1
_INSTANT_US = 0.001
"""Flows are tied to slices, and a start takes no time: a nanosecond is the least that shows."""

Event = dict[str, Any]


def trace_events(plans: Sequence[PlanReport]) -> dict[str, Any]:
    """The trace of all plans: the JSON object format of the trace-event specification."""
    events = [event for pid, plan in enumerate(plans, 1) for event in _plan(pid, plan)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _plan(pid: int, plan: PlanReport) -> Iterator[Event]:
    lanes = {
        bucket.group: f"wire, {bucket.ranks} ranks (group {bucket.group})"
        for graph in plan.graphs.values()
        for bucket in graph.buckets
    }
    tid_of = {group: tid for tid, group in enumerate(lanes, _COMPUTE + 1)}
    yield _named("process_name", pid, 0, f"simplefsdp, plan {plan.name}")
    yield _named("thread_name", pid, _COMPUTE, "compute")
    for group, name in lanes.items():
        yield _named("thread_name", pid, tid_of[group], name)
    begin_us = 0.0
    for number, graph in enumerate(plan.graphs.values()):
        lane = _Lanes(pid, tid_of, begin_us, flow=pid * 10**6 + number * 10**5)
        yield from lane.graph(graph, plan.step.parameters_nbytes + plan.step.optimizer_nbytes)
        begin_us += graph.prediction.timeline.total_us
    optimizer = _Lanes(pid, tid_of, begin_us, flow=0)
    yield optimizer.slice(_COMPUTE, "optimizer", "compute", 0, plan.step.optimizer_us)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


class _Lanes:
    """Events of one graph of a plan."""

    def __init__(self, pid: int, tid_of: dict[str, int], begin_us: float, flow: int) -> None:
        self.pid, self.tid_of, self.begin_us, self.flow = pid, tid_of, begin_us, flow

    def graph(self, graph: GraphReport, at_rest_nbytes: int) -> Iterator[Event]:
        timeline = graph.prediction.timeline
        yield self.slice(_COMPUTE, graph.name, "graph", 0.0, timeline.total_us)  # around its ops
        for span in timeline.spans:
            if span.lane == "compute":
                module = graph.module_of.get(span.op, "")
                us = span.end_us - span.begin_us
                yield self.slice(_COMPUTE, span.op, "compute", span.begin_us, us, module=module)
        for number, bucket in enumerate(graph.buckets):
            yield from self._bucket(bucket, self.flow + number)
        for us, nbytes in graph.memory.curve:
            args = {"bytes": nbytes + at_rest_nbytes}
            yield self._event("C", 0, "memory", us, args=args)

    def _bucket(self, bucket: BucketReport, flow: int) -> Iterator[Event]:
        exposure = bucket.exposure
        what = f"{bucket.kind} {bucket.parameters}"
        tid = self.tid_of[bucket.group]
        told = {
            "bytes": bucket.nbytes,
            "dtype": bucket.dtype,
            "ranks": bucket.ranks,
            "collectives": bucket.members,
            "exposed_us": exposure.exposed_us,
            "reason": exposure.reason,
            "why": exposure.why,
            "parameters": ", ".join(bucket.fqns),
        }
        begin, end = exposure.begin_us, exposure.end_us
        stall = max(exposure.exposed_us, _INSTANT_US)
        yield self.slice(_COMPUTE, f"start {what}", "start", exposure.launch_us, _INSTANT_US)
        yield self.slice(tid, what, bucket.kind, begin, end - begin, **told)
        yield self.slice(_COMPUTE, f"wait {what}", "wait", exposure.needed_us, stall, **told)
        for phase, at, thread in (
            ("s", exposure.launch_us, _COMPUTE),
            ("t", begin, tid),
            ("f", exposure.needed_us, _COMPUTE),
        ):
            event = self._event(phase, thread, what, at, cat="collective", id=flow)
            yield {**event, "bp": "e"} if phase == "f" else event

    def slice(
        self, tid: int, name: str, category: str, begin_us: float, us: float, **args: object
    ) -> Event:
        given = {key: value for key, value in args.items() if value not in ("", None)}
        return self._event("X", tid, name, begin_us, dur=us, cat=category, args=given)

    def _event(self, phase: str, tid: int, name: str, us: float, **more: object) -> Event:
        at = self.begin_us + us
        return {"ph": phase, "name": name, "pid": self.pid, "tid": tid, "ts": at, **more}
