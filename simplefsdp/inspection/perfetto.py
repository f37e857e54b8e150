"""The predicted step as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

There is a process per plan, and a thread per lane. The compute lane has the compute ops and, while
it is blocked, the waits. A collective is a slice on its group's lane, with a flow from its start
through its transfer to its wait. Live bytes are a counter. Forward, backward and optimizer follow
one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simplefsdp.inspection.report import BucketReport, GraphReport, PlanReport

_COMPUTE = 1
_INSTANT_US = 0.001
"""Duration drawn for a start, which takes no time. A flow must be tied to a slice, and a nanosecond
is the shortest slice that is shown."""

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
    at_rest = plan.step.parameters_nbytes + plan.step.optimizer_nbytes
    for number, graph in enumerate(plan.graphs.values()):
        for event in _graph(graph, at_rest, tid_of, flow=pid * 10**6 + number * 10**5):
            yield {**event, "pid": pid, "ts": begin_us + event["ts"]}
        begin_us += graph.prediction.timeline.total_us
    optimizer = _slice(_COMPUTE, "optimizer", "compute", begin_us, plan.step.optimizer_us)
    yield {**optimizer, "pid": pid}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _graph(
    graph: GraphReport, at_rest_nbytes: int, tid_of: Mapping[str, int], flow: int
) -> Iterator[Event]:
    """Events of a graph, in times from its begin on; flows are numbered from ``flow`` on."""
    timeline = graph.prediction.timeline
    yield _slice(_COMPUTE, graph.name, "graph", 0.0, timeline.total_us)  # around its ops
    for span in timeline.spans:
        if span.lane == "compute":
            module = graph.module_of.get(span.op, "")
            us = span.end_us - span.begin_us
            yield _slice(_COMPUTE, span.op, "compute", span.begin_us, us, module=module)
    for number, bucket in enumerate(graph.buckets):
        yield from _bucket(bucket, tid_of[bucket.group], flow + number)
    for us, nbytes in graph.memory.curve:
        yield _event("C", 0, "memory", us, args={"bytes": nbytes + at_rest_nbytes})


def _bucket(bucket: BucketReport, tid: int, flow: int) -> Iterator[Event]:
    exposure = bucket.exposure
    what = f"{bucket.kind} {bucket.parameters}"
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
    begin, us = exposure.begin_us, exposure.duration_us
    stall = max(exposure.exposed_us, _INSTANT_US)
    yield _slice(_COMPUTE, f"start {what}", "start", exposure.launch_us, _INSTANT_US)
    yield _slice(tid, what, bucket.kind, begin, us, **told)
    yield _slice(_COMPUTE, f"wait {what}", "wait", exposure.needed_us, stall, **told)
    of_flow = {"cat": "collective", "id": flow}
    yield _event("s", _COMPUTE, what, exposure.launch_us, **of_flow)
    yield _event("t", tid, what, begin, **of_flow)
    yield _event("f", _COMPUTE, what, exposure.needed_us, **of_flow, bp="e")


def _slice(tid: int, name: str, category: str, begin_us: float, us: float, **args: object) -> Event:
    given = {key: value for key, value in args.items() if value not in ("", None)}
    return _event("X", tid, name, begin_us, dur=us, cat=category, args=given)


def _event(phase: str, tid: int, name: str, us: float, **more: object) -> Event:
    return {"ph": phase, "name": name, "tid": tid, "ts": us, **more}
