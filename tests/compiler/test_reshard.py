"""``reshard_after_forward="auto"``: the planner decides what stays, and the graphs show it."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from graphs import Captured, capture, gathers, reduces
from layers import Layers

from simplefsdp import simple_fsdp
from simplefsdp.compiler.observers import observing

OPTIONS = {"executor": "aot_eager", "cluster": "cpu-gloo"}
FQNS = [f"layers.{i}.weight" for i in range(4)]


def graphs_of(mesh, reshard_after_forward, **options) -> Captured:
    torch._dynamo.reset()
    model = simple_fsdp(Layers(), mesh, reshard_after_forward=reshard_after_forward)
    with capture() as captured:
        run = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={**OPTIONS, **options}
        )
        run(torch.ones(2, 64)).sum().backward()
    return captured


def kept_by(captured: Captured) -> set[str]:
    assert gathers(captured.forward[0]) == FQNS
    assert sorted(reduces(captured.backward[0])) == FQNS
    return set(FQNS) - set(gathers(captured.backward[0]))


def test_memory_decides(fake_mesh, caplog):
    mesh = fake_mesh(64)
    with caplog.at_level(logging.INFO, logger="simplefsdp"):
        assert kept_by(graphs_of(mesh, "auto", memory_budget_gb=1.0)) == set(FQNS)
    # The first layer's input needs no gradient, so backward has no use for its weight.
    assert f"kept from forward to backward: {', '.join(FQNS[1:])}" in caplog.text
    # With one of them backward takes 52,500 bytes at the peak, and more with all.
    assert kept_by(graphs_of(mesh, "auto", memory_budget_gb=53.2e-6)) == {FQNS[0], FQNS[3]}
    assert kept_by(graphs_of(mesh, True, memory_budget_gb=1.0)) == {FQNS[0]}


def test_parts_are_kept_of_several_machines(fake_mesh, monkeypatch, caplog):
    """With room for parts, and not for all; gathers within a machine are faster."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    mesh = fake_mesh(64)
    over = []

    def note(seen) -> None:
        sent = [c for c in seen.rehearsal.reading.program.sent.values() if c.kind == "gather"]
        over.append(Counter(int(c.ranks) for c in sent))

    with observing(note), caplog.at_level(logging.INFO, logger="simplefsdp"):
        graphs_of(mesh, "auto", memory_budget_gb=70e-6)
    assert over == [{64: 4}, {8: 3}]
    assert "of the others, parts are kept, gathered from 8 neighbours" in caplog.text


@pytest.mark.slow
def test_another_batch_keeps_what_the_first_one_kept(fake_mesh):
    """One rank may compile again, alone; it must launch what the others launch."""
    mesh, kept = fake_mesh(64), []
    for rows in ((2, 3), (3,)):  # 3 rows take more, and alone there would be no room
        torch._dynamo.reset()
        model = simple_fsdp(Layers(), mesh, reshard_after_forward="auto")
        options = {**OPTIONS, "memory_budget_gb": 53.2e-6}
        run = torch.compile(model, backend="simplefsdp", dynamic=False, options=options)
        with capture() as captured:
            for n in rows:
                run(torch.ones(n, 64)).sum().backward()
        kept += [set(FQNS) - set(gathers(backward)) for backward in captured.backward]
    assert kept == [{FQNS[0], FQNS[3]}, {FQNS[0], FQNS[3]}, {FQNS[0]}]


def test_without_gradients_there_is_nothing_to_decide(fake_mesh):
    model = simple_fsdp(Layers(), fake_mesh(4), reshard_after_forward="auto")
    with capture() as captured, torch.no_grad():
        torch.compile(model, backend="simplefsdp", options=OPTIONS)(torch.ones(2, 64))
    assert gathers(captured.forward[0]) == FQNS and not captured.backward


@pytest.mark.parametrize("bucketing", ["manual", "none"])
def test_only_the_planner_can_decide(fake_mesh, bucketing):
    model = simple_fsdp(Layers(), fake_mesh(4), reshard_after_forward="auto")
    options = {"executor": "aot_eager", "bucketing": bucketing}
    with pytest.raises(ValueError, match=r"layers.0.weight: .*bucketing='auto'"):
        torch.compile(model, backend="simplefsdp", options=options)(torch.ones(2, 64))


def test_uncompiled_it_is_no_different(fake_mesh):
    model = simple_fsdp(Layers(), fake_mesh(4), reshard_after_forward="auto")
    model(torch.ones(2, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
