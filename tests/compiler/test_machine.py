"""Which machine plans are made for: the nodes that the launcher tells of, and what is estimated."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from inductor_passes.machine.cluster_file import save
from inductor_passes.machine.estimate import Device, estimated
from inductor_passes.machine.presets import preset
from simplefsdp.compiler import machine
from simplefsdp.compiler.machine import cluster_for, is_an_example

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "here", "per_node"), [(4, 4, 8), (4, 8, 8), (4, 2, 2), (2, 1, 1), (16, 16, 16)]
)
@pytest.mark.parametrize("given", ["h100", None])
def test_a_preset_has_the_nodes_of_the_launcher(
    fake_mesh, monkeypatch, given, ranks, here, per_node
):
    fake_mesh(ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    known = preset(given or "cpu-gloo")
    cluster = cluster_for(given, CPU)
    assert cluster == (known if per_node == 8 else known.with_nodes_of(per_node))
    assert is_an_example(cluster) == (given is None)


def test_nodes_that_differ(fake_mesh, monkeypatch):
    fake_mesh(12)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    for here in ("5", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        assert cluster_for("h100", CPU) == preset("h100").with_nodes_of(4)


def test_variables_of_another_process_group(fake_mesh, monkeypatch):
    fake_mesh(64)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cluster_for("h100", CPU) == preset("h100")


def test_a_cluster_that_was_measured_has_its_own(fake_mesh, monkeypatch, tmp_path):
    fake_mesh(4)
    ours, path = replace(preset("h100"), name="ours"), tmp_path / "h100.json"
    save(path, ours)
    for given in (ours, path, str(path)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert cluster_for(given, CPU) == ours
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"'ours' has 8 ranks .* 4 ranks .* 2 to a node"):
            cluster_for(given, CPU)
    assert cluster_for(ours.with_nodes_of(2), CPU).ranks_per_node == 2


def test_an_estimate_is_told_once(monkeypatch, caplog):
    l40s = estimated(Device("NVIDIA L40S", (8, 9), 142, 2.52, 864.0, 47.7))
    monkeypatch.setattr(machine, "cluster_of", lambda device: l40s)
    monkeypatch.setattr(machine, "_said", set())
    caplog.set_level(logging.WARNING, logger="simplefsdp")
    assert cluster_for("h100", CPU) == preset("h100")
    assert not caplog.records
    assert cluster_for(None, CPU) == cluster_for(None, CPU) == l40s
    (record,) = caplog.records
    assert "no preset for NVIDIA L40S" in record.getMessage()
    assert "366 TFLOP/s in bf16, 860 GB/s and 48 GB of memory, 24 GB/s among" in caplog.text
    assert "simplefsdp calibrate" in caplog.text
