"""Inspection: reasons against runs done by hand, and the reports of small programs.

Compute takes 10 us, a wire 1 us a byte.
"""

from __future__ import annotations

import io

import pytest
from programs import ROUND_COST, layers, random_program
from rich.console import Console

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.text import parse
from inductor_passes.machine.simulate import memory, simulate
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlap
from simplefsdp.inspection.diff import describe_changes, texts
from simplefsdp.inspection.document import graph_document
from simplefsdp.inspection.explain import Limits, explain
from simplefsdp.inspection.lanes import Lane, arrivals, lanes_of
from simplefsdp.inspection.memory import memory_report
from simplefsdp.inspection.names import shorten_blocks, shorten_fqns
from simplefsdp.inspection.report import GraphReport, report_graph
from simplefsdp.inspection.tables import print_graph
from simplefsdp.simulation.prediction import predict_program


def gather(name: str, nbytes: int, shard: str = "p", group: str = "dp") -> str:
    return (
        f"start {name}({shard}) -> full_{name}: {nbytes} | "
        f"gather group={group} ranks=4 nbytes={nbytes} dtype=f32 fqns={name}.weight"
    )


def reduce(name: str, nbytes: int, full: str) -> str:
    return (
        f"start {name}({full}) -> part_{name}: 8 | "
        f"reduce group=dp ranks=4 nbytes={nbytes} dtype=f32 op=sum fqns={name}.weight"
    )


def explained(*lines: str, limits: Limits | None = None):
    program = parse("\n".join(("input x: 8", "resident p: 8", *lines)))
    return explain(program, simulate(program, ROUND_COST), limits or Limits())


def test_a_gather_at_the_start_has_nothing_to_hide_behind():
    found = explained(gather("g", 25), "wait w(full_g)", "compute f(x) -> y: 8")["g"]
    assert (found.reason, found.shares) == ("first use", {"first use": 25})
    assert (found.launch_us, found.needed_us, found.end_us) == (0, 0, 25)


def test_a_cast_before_the_first_gather_is_no_room_to_hide_in():
    found = explained("compute cast(p) -> c: 8", gather("g", 25, "c"), "wait w(full_g)")["g"]
    assert (found.ready_us, found.shares) == (10, {"first use": 25})


LATE = (
    "compute f(x) -> y: 8",
    "compute f2(x) -> z: 8",
    gather("g", 25),
    "wait w(full_g)",
    "compute f3(x, full_g) -> u: 8",
)


def test_a_gather_that_starts_late_is_held_back():
    found = explained(*LATE, limits=Limits(OverlapPolicy(1, 1)))["g"]
    # Started at 0 it would have the 20 us of f and f2 to hide behind; 5 are left.
    assert found.shares == {"prefetch limit": 20, "first use": 5}
    assert found.reason == "prefetch limit"
    assert found.why == (
        "window 1: at most 1 bucket in flight; started 20 us earlier, 20 us would be hidden"
    )
    assert explained(*LATE)["g"].why.startswith("nothing moves it: it starts in place")
    theirs = explained(*LATE, limits=Limits(placed_by="torch-auto"))["g"]
    assert theirs.why.startswith("torch-auto left it here; started 20 us earlier, 20 us would be")


@pytest.mark.parametrize(("budget", "reason"), [(124, "memory budget"), (125, "prefetch limit")])
def test_what_holds_it_back_is_the_budget_if_it_does_not_fit(budget, reason):
    live = (70, 100, 40, 40, 40)
    found = explained(*LATE, limits=Limits(OverlapPolicy(), budget, live))["g"]
    assert found.shares == {reason: 20, "first use": 5}  # 100 + 25 bytes
    beside = "but 25 B more do not fit beside 100 B into 124 B"
    assert (beside in found.why) == (reason == "memory budget")


def test_a_lane_that_is_busy():
    found = explained(
        gather("a", 30),
        gather("b", 20),
        "wait w(full_a)",
        "compute f(x) -> y: 8",
        "wait v(full_b)",
    )
    assert found["b"].shares == {"wire-bound": 10}
    assert "busy with other transfers for 30 us since it could have started, at 0 us" in (
        found["b"].why
    )


def test_idle_time_is_given_away_once():
    found = explained(
        "compute f(x) -> y: 8",
        gather("a", 30),
        "wait w(full_a)",
        gather("b", 30),
        "wait v(full_b)",
    )
    assert found["a"].shares == {"prefetch limit": 10, "first use": 20}
    assert found["b"].shares == {"wire-bound": 30}


def test_a_gather_of_what_was_computed_depends_on_it():
    found = explained(
        gather("a", 5),
        "wait w(full_a)",
        "compute f(full_a) -> y: 8",
        gather("b", 30, "y"),
        "wait v(full_b)",
        "compute h(full_b) -> u: 8",
    )["b"]
    assert (found.ready_us, found.shares) == (15, {"dependency": 30})
    assert found.why == "it began as soon as f was done, and is needed 0 us later"


def test_other_collectives_are_needed_where_they_are():
    found = explained(
        "compute f(x) -> y: 8",
        "start t(y) -> sum: 8 | other group=tp ranks=2 nbytes=30 dtype=f32",
        "wait w(sum)",
        "compute g(x) -> z: 8",
    )["t"]
    assert found.shares == {"dependency": 30}


BACKWARD = ("compute f(x) -> d: 8", reduce("r", 30, "d"), "wait w(part_r) -> s: 8 @part_r")


def test_the_last_gradients_have_nothing_to_hide_behind():
    found = explained(*BACKWARD, "compute divide(s) -> g: 8")["r"]
    assert found.shares == {"first use": 30}
    assert "its gradients are the last" in found.why


def test_a_reduce_that_is_waited_for_early_is_held_back():
    more = [f"compute f{k}(x) -> y{k}: 8" for k in range(2)]
    found = explained(*BACKWARD, *more, limits=Limits(OverlapPolicy(2, 3)))["r"]
    assert found.shares == {"prefetch limit": 20, "dependency": 10}
    assert found.why == (
        "window 3: at most 3 buckets of gradients pending; waited for 20 us later, 20 us would be "
        "hidden"
    )
    full = Limits(OverlapPolicy(), 100, (80,) * 5)
    assert explained(*BACKWARD, *more, limits=full)["r"].reason == "memory budget"


def test_a_reduce_that_starts_late_is_held_back():
    lines = (*BACKWARD[:1], "compute g(x) -> e: 8", *BACKWARD[1:])
    found = explained(*lines, limits=Limits(OverlapPolicy(2, 1), 108, (100,) * 4))["r"]
    # Its 30 bytes of gradients are alive anyhow, and 8 of shards fit.
    assert (found.ready_us, found.shares) == (10, {"prefetch limit": 10, "first use": 20})
    assert explained(*lines, limits=Limits(OverlapPolicy(2, 1), 107, (100,) * 4))["r"].shares == {
        "memory budget": 10,
        "first use": 20,
    }


def test_shares_add_up_to_the_timeline():
    for seed in range(200):
        program = random_program(seed, 30)
        timeline = simulate(program, ROUND_COST)
        found = explain(program, timeline, Limits(OverlapPolicy()))
        assert arrivals(program, timeline)[-1] == pytest.approx(timeline.total_us)
        assert list(found) == [op.name for _, op in program.starts()]
        for name, exposure in found.items():
            shares = exposure.shares
            assert sum(shares.values()) == pytest.approx(timeline.exposed_us[name]), (seed, name)
            assert min(shares.values(), default=1) > 0
            assert bool(exposure.reason) == (timeline.exposed_us[name] > 1e-6)
            assert exposure.ready_us <= exposure.begin_us
        total = sum(exposure.exposed_us for exposure in found.values())
        assert total == pytest.approx(timeline.total_us - timeline.compute_us)


def test_lanes():
    timeline = simulate(parse("\n".join(("input x: 8", "resident p: 8", *LATE))), ROUND_COST)
    wire = lanes_of(timeline)["dp"]
    assert (wire.busy_us(0, 100), wire.busy_us(25, 30), wire.idle_us(0, 30)) == (25, 5, 20)
    assert wire.idle_before(60, 20) == 15
    assert Lane([]).idle_us(3, 5) == 2
    assert [span.op for span in lanes_of(timeline)["compute"].overlapping(10, 45)] == ["f2"]


def planned(n: int, part: str) -> GraphReport:
    before = parse(layers(n, part))
    fqns = [f"layers.{k}.weight" for k in range(n)]
    merged = merge(before, plan_buckets(before, assign_by_module(fqns)))
    after = merged.reorder(overlap(merged, OverlapPolicy()))
    modules = {f"{op}{k}": f"layers.{k}.fc" for k in range(n) for op in ("mm", "dgrad", "wgrad")}
    prediction = predict_program(part, before, after, ROUND_COST, 0.25)
    return report_graph(prediction, Limits(OverlapPolicy()), modules)


def test_json_of_a_small_graph():
    found = graph_document(planned(2, "forward"))
    second = found.pop("buckets")[1]
    assert found == {
        "name": "forward",
        "nodes": 8,
        "collectives": 2,
        "collectives_by_kind": {"gather": 2, "reduce": 0, "all_reduce": 0, "other": 0},
        "bytes": 128,
        "compute_us": 20,
        "slowed_us": 0,
        "wire_us": 128,
        "exposed_us": 118,
        "exposed_by_reason": {"first use": 64, "wire-bound": 54},
        "total_us": 138,
        "lower_bound_us": 138,
        "peak_bytes": 288,  # h0, h1, h2, a gathered weight, and 32 of shards
        "peak_op": "mm0",
        "peak_by_kind": {"activations": 128, "gathered parameters": 128},
        "peak_by_module": {"layers.0": 128, "layers.1": 64, "(no module)": 64},
        "memory": [[0, 192], [64, 256], [74, 128], [128, 192], [138, 192]],
        "pass_seconds": 0.25,
        "ranges": [],
    }
    assert second == {
        "name": "g1",
        "label": "layers.1",
        "kind": "gather",
        "parameters": ["layers.1.weight"],
        "collectives": 1,
        "bytes": 64,
        "dtype": "f32",
        "group": "dp",
        "ranks": 4,
        "window": 0,
        "launch_us": 0,
        "launched_at": "layers.0.fc (mm0)",
        "begin_us": 64,
        "end_us": 128,
        "duration_us": 64,
        "needed_us": 74,
        "needed_at": "layers.1.fc (mm1)",
        "hidden_us": 10,
        "hidden_by": ["layers.0"],
        "exposed_us": 54,
        "reason": "wire-bound",
        "exposed_by_reason": {"wire-bound": 54},
        "why": "the lane was busy with other transfers for 64 us since it could have started, at "
        "0 us",
    }


def test_table_of_a_small_graph():
    out = Console(file=io.StringIO(), width=160)
    print_graph(out, planned(2, "backward"))
    text = out.file.getvalue()
    assert "backward: 16 nodes; 2 gathers, 2 reduces -> 4 buckets (2 gathers, 2 reduces)" in text
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[1:4]] for row in rows] == [
        ["gather", "layers.1.weight", "64 B"],
        ["gather", "layers.0.weight", "64 B"],
        ["reduce", "layers.1.weight", "64 B"],
        ["reduce", "layers.0.weight", "64 B"],
    ]
    reasons = [row[-2].strip() for row in rows]
    assert reasons == ["first use", "wire-bound", "wire-bound", "wire-bound"]


def test_diff_says_what_merged_and_moved():
    before = parse(layers(3, "forward"))
    merged = merge(
        before, plan_buckets(before, assign_by_module(["layers.0.weight", "layers.1.weight"]))
    )
    after = merged.reorder(overlap(merged, OverlapPolicy()))
    assert describe_changes(before, before) == []
    assert describe_changes(before, after) == [
        "gather layers.1.weight: start 1 compute op earlier",
        "gather layers.2.weight: start 1 compute op earlier",
    ]
    first, second = texts(before, after).split("# after the passes\n")
    assert (parse(first), parse(second)) == (before, after)


def test_diff_of_a_merger():
    before = parse(layers(3, "backward"))
    fqns = [f"layers.{k}.weight" for k in range(3)]
    buckets = plan_buckets(before, assign_by_module(fqns, [["layers.1", "layers.2"]]))
    assert describe_changes(before, merge(before, buckets)) == [
        "gather layers.1.weight, layers.2.weight: 2 gathers merged",
        "reduce layers.1.weight, layers.2.weight: 2 reduces merged; start 2 compute ops later; "
        "wait 2 compute ops later",
    ]


def test_memory_is_owned_by_modules():
    report = planned(2, "backward")
    at_peak = memory(report.prediction.after)
    assert sum(report.memory.by_kind.values()) == at_peak.peak_nbytes - at_peak.resident_nbytes
    assert sum(report.memory.by_module.values()) == sum(report.memory.by_kind.values())


def test_what_is_written_over_is_owned_by_who_wrote_last():
    program = parse(
        "input x: 8\n"
        "compute a(x) -> a: 8\n"
        "compute b(a) -> b: 8 @a\n"
        "compute c(b) -> c: 64\n"
        "compute d(c, b) -> d: 8 @a\n"
        "output d"
    )
    module_of = {name: f"layers.{i}" for i, name in enumerate("abcd")}
    report = memory_report(program, memory(program), range(5), module_of)
    assert report.peak_op == "c"
    assert report.by_module == {"layers.2": 64, "layers.1": 8}


def test_names():
    layer = [f"layers.3.{name}.weight" for name in ("wq", "wk", "norm")]
    assert shorten_fqns(layer) == "layers.3.* (3)"
    assert shorten_fqns([f"layers.3.attn.{n}.weight" for n in "qk"]) == "layers.3.attn.* (2)"
    assert shorten_fqns(["norm.weight", "head.weight"]) == "norm.weight, head.weight"
    assert shorten_fqns([f"layers.{k}.w.weight" for k in (3, 4, 5)]) == "layers.{3..5} (3)"
    assert shorten_fqns(["a.weight", "a.bias"]) == "a.* (2)"
    assert (shorten_fqns(["weight"]), shorten_fqns([])) == ("weight", "")
    assert shorten_blocks(["2", "1", "0", "head"]) == "{2..0}, head"
    assert shorten_blocks(list("abcde")) == "a, b .. e"
