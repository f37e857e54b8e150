"""What fails a compilation, and what is only said."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from inductor_passes import rehearsal
from inductor_passes.adapters import fx
from inductor_passes.adapters._torch_fusions import fusions_as_planned
from inductor_passes.ir.program import ProgramError
from inductor_passes.passes import PassError
from simplefsdp import simple_fsdp
from simplefsdp.compiler import census, observed
from simplefsdp.compiler.backend import pass_settings
from simplefsdp.compiler.compilation import _Compiler
from simplefsdp.compiler.observers import observing
from simplefsdp.compiler.options import parse_options
from simplefsdp.compiler.plans import Compilation


@pytest.fixture
def step(fake_mesh, caplog):
    """Compiles and runs two layers; gives the buckets of what was planned, and the log."""
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fake_mesh(2))

    def run(**options: object) -> tuple[list[int], str]:
        torch._dynamo.reset()
        found = []
        compiled = torch.compile(
            model, backend="simplefsdp", options={"executor": "aot_eager", **options}
        )
        with observing(found.append), caplog.at_level(logging.INFO, "simplefsdp"):
            compiled(torch.ones(2, 4)).sum().backward()
        return [len(seen.rehearsal.planned) for seen in found], caplog.text

    return run


def failing(*args, **kwargs):
    raise ProgramError("cannot be read")


@pytest.mark.parametrize("bucketing", ["manual", "auto"])
def test_a_graph_that_cannot_be_read(step, monkeypatch, bucketing):
    monkeypatch.setattr(fx, "read", failing)
    with pytest.raises(PassError, match=r"forward graph: cannot be read; options=.*\"none\"}"):
        step(bucketing=bucketing)
    buckets, log = step(bucketing="none")  # as that error advises
    assert buckets == []
    for part in ("forward", "backward"):
        assert f"{part} graph: compiled as it is: it cannot be read: cannot be read" in log


@pytest.mark.parametrize("bucketing", ["none", "manual", "auto"])
def test_a_prediction_that_fails_decides_nothing(step, monkeypatch, bucketing):
    """Of the log line; a planner's own simulations are not its."""
    expected, _ = step(bucketing=bucketing)
    monkeypatch.setattr(rehearsal, "simulate", failing)
    buckets, log = step(bucketing=bucketing)
    assert buckets == expected and len(buckets) == 2
    assert ("the log cannot describe all of it" in log) == (bucketing != "none")


def test_a_log_line_that_fails(step, monkeypatch):
    monkeypatch.setattr(observed, "describe", failing)
    buckets, log = step(bucketing="manual")
    assert len(buckets) == 2
    assert "forward graph: the log cannot describe all of it: ProgramError" in log
    assert "forward:; 4 gathers -> " in log


def test_what_nobody_reads_is_not_predicted(step, monkeypatch, caplog):
    predictions = []
    monkeypatch.setattr(census, "predict", lambda *args: predictions.append(args))
    with monkeypatch.context() as patch:
        patch.setattr(observed.log, "isEnabledFor", lambda level: level > logging.INFO)
        buckets, _ = step(bucketing="manual")
    assert len(buckets) == 2 and predictions == []
    step(bucketing="manual")
    assert len(predictions) == 2


@pytest.mark.parametrize(
    ("bucketing", "whole_step", "asked"),
    [("auto", False, True), ("manual", False, False), ("manual", True, True)],
)
def test_fusions_are_asked_for_of_plans_and_of_whole_steps(bucketing, whole_step, asked):
    options = parse_options({"bucketing": bucketing, "executor": "inductor"})
    settings = pass_settings(options, ["weight"], torch.device("cpu"))
    known = Compilation(options, settings, (), True, 0, None, set(), whole_step)
    _, lowering = _Compiler(known, None)._orders()
    assert (lowering is fusions_as_planned) is asked
