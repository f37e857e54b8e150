"""The predicted trace against the trace-event format."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from programs import ROUND_COST, layers

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.text import parse
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlap
from simplefsdp.inspection.explain import Limits
from simplefsdp.inspection.perfetto import trace_events
from simplefsdp.inspection.report import PlanReport, report_graph
from simplefsdp.simulation.prediction import StepPrediction, predict_program

FIELDS = {
    "M": {"args"},
    "X": {"dur", "cat", "args"},
    "s": {"cat", "id"},
    "t": {"cat", "id"},
    "f": {"cat", "id", "bp"},
    "C": {"args"},
}
TINY_US = 0.0011  # a start's slice


def plan(name: str, n: int = 3) -> PlanReport:
    graphs = {}
    for part in ("forward", "backward"):
        before = parse(layers(n, part))
        fqns = [f"layers.{k}.weight" for k in range(n)]
        merged = merge(before, plan_buckets(before, assign_by_module(fqns)))
        after = merged.reorder(overlap(merged, OverlapPolicy())) if name == "manual" else before
        prediction = predict_program(part, before, after, ROUND_COST, 0.0)
        graphs[part] = report_graph(prediction, Limits(), {"mm0": "layers.0"})
    predictions = [graph.prediction for graph in graphs.values()]
    return PlanReport(name, StepPrediction(tuple(predictions), 7.0, 48, 96), graphs, None)


@pytest.fixture(scope="module")
def events():
    found = json.loads(json.dumps(trace_events([plan("manual"), plan("none")])))
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    return found["traceEvents"]


def test_events_have_what_the_format_asks_for(events):
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert set(event) == {"ph", "name", "pid", "tid", "ts"} | FIELDS[event["ph"]]
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        "simplefsdp, plan manual",
        "simplefsdp, plan none",
        "compute",
        "wire, 4 ranks (group dp)",
    }
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["tid"]}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xstf"} == threads


def test_slices_of_a_thread_nest(events):
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for found in slices.values():
        stack: list[float] = []
        for begin, end in sorted(found, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin + TINY_US:
                stack.pop()
            assert not stack or end <= stack[-1] + TINY_US, (begin, end)
            stack.append(end)


def test_flows_go_from_start_by_transfer_to_wait(events):
    flows = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            flows[e["id"]].append(e)
    assert len(flows) == 2 * (3 + 3 + 3)  # plans; gathers, and again, and reduces
    for found in flows.values():
        assert [e["ph"] for e in found] == ["s", "t", "f"]
        assert found[0]["ts"] <= found[1]["ts"] and found[0]["ts"] <= found[2]["ts"]
        assert len({e["pid"] for e in found}) == 1
        for e, kind in zip(found, ("start ", "", "wait "), strict=True):
            ties = [
                s
                for s in events
                if s["ph"] == "X"
                and (s["pid"], s["tid"]) == (e["pid"], e["tid"])
                and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]
                and s["name"] == kind + e["name"]
            ]
            assert ties, e


def test_times_are_those_of_the_timeline(events):
    report = plan("manual")
    mine = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
    compute = sum(e["dur"] for e in mine if e["cat"] == "compute" and e["name"] != "optimizer")
    stalls = sum(e["dur"] for e in mine if e["cat"] == "wait" and e["dur"] > TINY_US)
    assert compute == sum(g.prediction.timeline.compute_us for g in report.graphs.values())
    assert stalls == pytest.approx(report.step.exposed_us)
    assert max(e["ts"] + e["dur"] for e in mine) == pytest.approx(report.step.step_us)


def test_memory_is_a_counter(events):
    report = plan("manual")
    mine = [e for e in events if e["pid"] == 1 and e["ph"] == "C"]
    peak = max(e["args"]["bytes"] for e in mine)
    assert peak == report.step.peak_nbytes
    assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
