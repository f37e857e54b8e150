"""Models that Dynamo cannot take in one graph: each graph is compiled, and a warning says so."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
import torch.distributed as dist
from broken import WIDTH, Broken, Twice
from parity import compare_gradients, global_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import inspect, simple_fsdp
from simplefsdp.compiler import breaks


def train_and_compare(names, options):
    """Two steps beside one process; gives the graphs and the gathers of the first."""
    torch.manual_seed(1)
    plain = Broken(*names)
    model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)))
    model.compile(backend="simplefsdp", options=options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    with inspect() as report:
        for step in range(2):
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
            wanted, loss = plain(x).square().mean(), model(local_rows(x)).square().mean()
            wanted.backward()
            loss.backward()
            assert global_loss(loss) == pytest.approx(wanted.item(), rel=1e-5)
            compare_gradients(plain, model, 1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    gathered = [b.fqns for g in report.graphs.values() for b in g.buckets if b.kind == "gather"]
    return len(report.graphs), [fqn for fqns in gathered for fqn in fqns]


def local_rows(x):
    """The rank's share of the rows, so that both items of dimension 0 are everywhere."""
    return x.transpose(0, 1).tensor_split(dist.get_world_size())[dist.get_rank()].transpose(0, 1)


EAGER = {"executor": "aot_eager", "bucketing": "manual"}


@pytest.mark.slow(quick=["Crossing", "Twice"])
@pytest.mark.parametrize("name", ["Views", "Crossing", "Twice", "Recomputed", "Guarded"])
def test_one_break_more(pools, name):
    one, other = pools(2).run(train_and_compare, (name,), EAGER)
    assert one == other


@pytest.mark.slow
def test_all_breaks_in_generated_code(pools):
    one, other = pools(2).run(train_and_compare, (), {"executor": "inductor"})
    assert one == other


class InARow(nn.Module):
    """Four graphs, of which the second gathers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Twice(), nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return self.parts[1](self.parts[0](x))


def compiled(model, **how):
    model.compile(backend="simplefsdp", options=EAGER, **how)
    return model


@pytest.fixture
def first_time(monkeypatch):
    monkeypatch.setattr(breaks, "_warned", set())


def test_one_warning_says_where_and_what_it_costs(fake_mesh, caplog, first_time):
    model = compiled(simple_fsdp(InARow(), fake_mesh(2)))
    x = torch.ones(2, 4, WIDTH)
    with caplog.at_level(logging.INFO, logger="simplefsdp"):
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            model(x)
    ours = [r for r in caplog.records if r.name == "simplefsdp" and "graph break" in r.message]
    (warning,) = [r.message for r in ours if r.levelno == logging.WARNING]
    assert re.search(
        r"graph break.*, at .*broken.py:\d+ \(torch._dynamo.graph_break\(\)\)", warning
    )
    assert re.search(r"first gathers of the forward graph behind it: 0\.\d+ ms exposed", warning)
    assert "Dynamo's reason: Call to `torch._dynamo.graph_break()`" in warning
    said = [r.message for r in ours if r.levelno == logging.INFO]
    assert len([m for m in said if "the last reduces of the backward graph behind it" in m]) == 2
    assert len([m for m in said if "the first gathers of the forward graph behind it" in m]) == 3


def test_a_failing_prediction_decides_nothing(fake_mesh, caplog, first_time, monkeypatch):
    def fail(*args):
        raise KeyError("no such op")

    monkeypatch.setattr(breaks, "_exposed_us", fail)
    model = compiled(simple_fsdp(InARow(), fake_mesh(2)))
    model(torch.ones(2, 4, WIDTH)).sum().backward()
    assert "graph break: what it costs cannot be predicted: 'no such op'" in caplog.text


def test_fullgraph_refuses_as_torch_does(fake_mesh):
    model = compiled(simple_fsdp(InARow(), fake_mesh(2)), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        model(torch.ones(2, 4, WIDTH))


@pytest.mark.slow
def test_the_graphs_of_a_call_are_one_step_of_the_report(fake_mesh):
    model = compiled(simple_fsdp(InARow(), fake_mesh(2)))
    x = torch.ones(2, 4, WIDTH)
    with inspect() as report:
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
    step, evaluation = report.plans()
    forwards = ["forward", "forward 2", "forward 3", "forward 4"]
    backwards = ["backward 4", "backward 3", "backward 2", "backward"]
    assert [*step.graphs] == [*forwards, *backwards]
    assert [*evaluation.graphs] == ["forward 5", "forward 6", "forward 7", "forward 8"]
    assert step.name == "manual, 4 graphs (graph breaks)"
    assert evaluation.name == "manual, 4 graphs (graph breaks), compilation 2"
    totals = [g.prediction.exposed_us for g in step.graphs.values()]
    assert step.step.exposed_us == pytest.approx(sum(totals)) and sum(totals) > 0
    gathered = [[f for b in step.graphs[g].buckets for f in b.fqns] for g in forwards]
    assert gathered == [["parts.0.fc.weight"], [], ["parts.0.fc.weight"], ["parts.1.weight"]]


def test_an_unbroken_model_is_reported_as_before(fake_mesh):
    model = compiled(simple_fsdp(nn.Linear(4, 4), fake_mesh(2)))
    with inspect() as report:
        for rows in (2, 3):
            torch._dynamo.reset()
            model(torch.ones(rows, 4)).sum().backward()
    assert [[*plan.graphs] for plan in report.plans()] == [
        ["forward", "backward"],
        ["forward 2", "backward 2"],
    ]


def ranks_break_differently():
    model = simple_fsdp(InARow(), init_device_mesh("cpu", (2,)))
    options = {**EAGER, "rank_guard_timeout_s": 5}
    if dist.get_rank():
        Twice.forward = lambda self, x: self.fc(self.fc(x).sin() + 1).tanh()
    model.compile(backend="simplefsdp", options=options)
    with pytest.raises(Exception, match="graph to compile is not the same on all ranks") as caught:
        model(torch.ones(2, 4, WIDTH)).sum().backward()
    return str(caught.value)


def test_ranks_that_break_differently_raise(pools):
    for text in pools(2).run(ranks_break_differently):
        assert "parts.1.weight" in text
    pools(2).stop()  # of the class that was changed


class Masked(nn.Module):
    """As wav2vec 2.0 masks features: how many rows that are is known when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.row = nn.Parameter(torch.ones(WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.before(x)
        mask = torch.arange(x.shape[0]) % 2 == 0
        x[mask] = self.row
        return self.after(x)


@pytest.mark.slow
def test_an_operator_that_depends_on_data_breaks_the_graph_as_it_does_for_torch(solo_mesh, caplog):
    torch.manual_seed(0)
    plain = Masked()
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    run = torch.compile(model, backend="simplefsdp", options=EAGER)
    x = torch.randn(4, WIDTH)
    run(x).square().sum().backward()
    plain(x).square().sum().backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), wanted.grad)
    assert "graph break: aten.nonzero.default. The code of this graph runs eagerly" in caplog.text
