"""``with simplefsdp.inspect() as report``: whatever is compiled inside."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import simplefsdp
from inductor_passes.ir.text import parse
from simplefsdp.inspection.capture import compare


class Net(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def compiled(mesh, n=3, **options):
    torch._dynamo.reset()
    model = simplefsdp.simple_fsdp(Net(n), mesh)
    options = {"executor": "aot_eager", "bucketing": "manual", **options}
    model.compile(backend="simplefsdp", options=options)
    return model


def step(model):
    model(torch.ones(2, 16, requires_grad=True)).sum().backward()


def test_what_is_compiled_inside_is_seen(fake_mesh, tmp_path):
    model = compiled(fake_mesh(4))
    with simplefsdp.inspect() as report:
        step(model)
    assert list(report.graphs) == ["forward", "backward"]
    forward, backward = report.graphs.values()
    assert [bucket.label for bucket in forward.buckets] == [f"layers.{k}" for k in range(3)]
    assert [bucket.kind for bucket in backward.buckets].count("reduce") == 3
    assert forward.buckets[2].needed_at.startswith("layers.2 (")
    text = str(report)
    assert "compiled on 4 ranks, as predicted for cpu-gloo" in text
    assert "manual" in text and "forward: " in text and "backward: " in text
    found = report.to_json()
    assert json.loads(json.dumps(found)) == found
    plan = found["plans"][0]
    assert (plan["name"], plan["mfu"], plan["tokens_per_second_per_rank"]) == ("manual", None, None)
    for graph, seen in zip(plan["graphs"], report.graphs.values(), strict=True):
        assert len(graph["buckets"]) == len(seen.buckets)
        assert sum(b["exposed_us"] for b in graph["buckets"]) == pytest.approx(graph["exposed_us"])
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == found
    report.save(tmp_path / "report.perfetto.json")
    assert json.loads((tmp_path / "report.perfetto.json").read_text())["traceEvents"]
    with pytest.raises(ValueError, match=r"report\.txt: expected a name that ends in"):
        report.save(tmp_path / "report.txt")


def test_the_page_of_what_was_compiled(fake_mesh, tmp_path):
    pytest.importorskip("plotly")
    model = compiled(fake_mesh(4))
    with simplefsdp.inspect("h100") as report:
        step(model)
    report.save(str(tmp_path / "report.html"))
    assert "as predicted for h100" in (tmp_path / "report.html").read_text()


def test_what_is_compiled_outside_is_not(fake_mesh):
    model = compiled(fake_mesh(4))
    step(model)
    with simplefsdp.inspect() as report:
        step(model)
    assert (report.graphs, str(report)[:20]) == ({}, "nothing was compiled")
    with pytest.raises(ValueError, match="nothing was compiled"):
        report.to_json()
    torch._dynamo.reset()
    step(model)  # is compiled again, after the report
    assert report.graphs == {}


def test_plans_are_named(fake_mesh):
    mesh = fake_mesh(4)
    for options, name in (
        ({"bucketing": "none"}, "none"),
        ({"bucketing": "none", "reorder": True}, "none, reordered"),
        ({"bucketing": "auto", "cluster": "a100"}, "auto"),
    ):
        with simplefsdp.inspect() as report:
            step(compiled(mesh, **options))
        assert report.plan().name == name
    assert "as predicted for a100" in str(report)


def test_a_step_is_one_compilation(fake_mesh, tmp_path):
    """Evaluation and a recompilation for another batch are no part of the training step."""
    model = compiled(fake_mesh(4))
    with simplefsdp.inspect() as report:
        with torch.no_grad():
            model(torch.ones(2, 16))
        step(model)
        alone = report.plan()
        model(torch.ones(3, 16, requires_grad=True)).sum().backward()
    names = ["forward", "forward 2", "backward 2", "forward 3", "backward 3"]
    assert list(report.graphs) == names
    plan, evaluation, other = report.plans()
    assert (plan.name, evaluation.name, other.name) == (
        "manual",
        "manual, compilation 1",
        "manual, compilation 3",
    )
    assert [list(p.graphs) for p in report.plans()] == [names[1:3], names[:1], names[3:]]
    assert report.plan().step.step_us == alone.step.step_us == report.plan(2).step.step_us
    assert report.plan(1).step.step_us == evaluation.step.step_us < plan.step.step_us
    assert "manual, compilation 3" in str(report)
    report.save(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())["plans"]
    assert [len(p["graphs"]) for p in written] == [2, 1, 2]
    with pytest.raises(ValueError, match="there is no compilation 4: 3 of them, from 1 on"):
        report.plan(4)
    assert plan.graphs["backward 2"].module_of  # what it gets from forward has the names there


@pytest.mark.slow
def test_cache_hits_are_seen(fake_mesh):
    mesh, seen = fake_mesh(4), []
    for _ in range(2):
        counters.clear()
        model = compiled(mesh, 1, executor="inductor")
        with simplefsdp.inspect() as report, torch.no_grad():
            model(torch.ones(2, 16))
        seen += report.to_json()["plans"][0]["graphs"]
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    first, second = ({**graph, "pass_seconds": 0} for graph in seen)
    assert first == second


def test_a_report_that_fails_does_not_stop_the_compilation(fake_mesh, monkeypatch, caplog):
    def fail(*args):
        raise KeyError("no such thing")

    monkeypatch.setattr("simplefsdp.inspection.capture.predict_rehearsed", fail)
    with caplog.at_level(logging.WARNING, "simplefsdp"), simplefsdp.inspect() as report:
        step(compiled(fake_mesh(4)))
    assert report.graphs == {}
    assert "the forward graph is not in the report: KeyError('no such thing')" in caplog.text


def test_an_unknown_cluster():
    with pytest.raises(ValueError, match="there is no preset 'h1000'"), simplefsdp.inspect("h1000"):
        pass


def test_ranks_are_compared():
    launches = [("forward", "gather a"), ("forward", "gather b"), ("backward", "reduce a")]
    assert compare([launches, launches])
    assert str(compare([launches])) == "all ranks compiled the same plan"
    found = compare([launches, launches, [launches[0], ("forward", "gather c")]])
    assert not found
    assert found.difference == (
        "rank 2 compiled another plan than rank 0, from launch 1 on: rank 0 has gather b in "
        "forward, rank 2 has gather c in forward"
    )
    assert compare([launches, launches[:2]]).difference.endswith("rank 1 has no more")


def test_what_is_compiled_is_in_torchs_trace(fake_mesh, monkeypatch):
    from torch._logging._internal import trace_log

    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append
    monkeypatch.setattr(trace_log, "handlers", [handler])
    monkeypatch.setattr(trace_log, "level", logging.DEBUG)
    step(compiled(fake_mesh(4)))
    texts = {
        record.metadata["artifact"]["name"]: record.payload
        for record in records
        if record.metadata.get("artifact", {}).get("name", "").startswith("simplefsdp_")
    }
    parts = ("simplefsdp_forward", "simplefsdp_backward")
    assert set(texts) == {name + when for name in parts for when in ("", "_before")}
    assert len([*parse(texts["simplefsdp_forward_before"]).starts()]) > 3
    starts = [op for _, op in parse(texts["simplefsdp_forward"]).starts()]
    assert [op.collective.bucket for op in starts] == [f"layers.{k}" for k in range(3)]


def test_real_steps_beside_the_prediction(pools):
    for rank, (rate, unmatched, exposed) in enumerate(pools(2).run(_measured_steps)):
        assert (rate, unmatched) == (1.0, 0), rank
        assert all(us is not None and us >= 0 for us in exposed)


def _measured_steps():
    model = compiled(init_device_mesh("cpu", (2,)))
    with simplefsdp.inspect() as report:
        step(model)
    found = report.measure(lambda: step(model), steps=2)
    assert report.compare_ranks()
    return found.match_rate, found.unmatched, [row.exposed_us for row in found.rows]


def test_one_rank_has_nothing_to_measure(fake_mesh):
    with simplefsdp.inspect() as report:
        step(model := compiled(fake_mesh(1)))
    assert all(not graph.buckets for graph in report.graphs.values())
    with pytest.raises(ValueError, match="use two ranks or more"):
        report.measure(lambda: step(model))
