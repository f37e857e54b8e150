"""The cluster of a device: by its name, or by what its driver tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inductor_passes.adapters.devices import cluster_of, device_name, told_of
from inductor_passes.machine.estimate import Device, estimated
from inductor_passes.machine.presets import PRESETS, preset
from simplefsdp.train.metrics import peak_flops

CUDA = torch.device("cuda")
L40S = SimpleNamespace(
    name="NVIDIA L40S",
    major=8,
    minor=9,
    multi_processor_count=142,
    clock_rate=2_520_000,
    memory_clock_rate=9_001_000,
    memory_bus_width=384,
    total_memory=47_697_362_944,
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the driver tells of a GPU that is taken to be here."""
    told = SimpleNamespace(**vars(L40S))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: told.name)
    return told


def test_names_of_devices_that_are_not_here() -> None:
    assert device_name(torch.device("cpu")) == "cpu"
    if not torch.cuda.is_available():
        assert device_name(CUDA) == "cuda"
        with pytest.raises(ValueError, match=rf"for 'cuda'.*{', '.join(PRESETS)}.*calib"):
            cluster_of(CUDA)


def test_presets_by_name(driver: SimpleNamespace) -> None:
    assert cluster_of(torch.device("cpu")) == preset("cpu-gloo")
    for name, found in [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ]:
        driver.name = name
        assert cluster_of(CUDA) == preset(found)


def test_another_gpu_is_estimated(driver: SimpleNamespace) -> None:
    cluster = cluster_of(CUDA)
    assert (cluster.name, cluster.memory_gb, cluster.memory_gb_s) == ("NVIDIA L40S", 48.0, 860.0)
    assert cluster.peaks["bfloat16"].tflops == 366.0
    assert peak_flops(CUDA) is None
    driver.name = "NVIDIA H100 80GB HBM3"
    assert peak_flops(CUDA) == 989e12


@pytest.mark.parametrize("figure", ["clock_rate", "memory_clock_rate", "memory_bus_width", "major"])
def test_a_driver_that_tells_too_little(driver: SimpleNamespace, figure: str) -> None:
    setattr(driver, figure, 0)
    assert told_of(CUDA) is None
    with pytest.raises(ValueError, match=r"no preset for 'NVIDIA L40S'.*bucketing.*manual"):
        cluster_of(CUDA)


def test_another_makers_gpu_is_not_estimated(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="no preset for 'NVIDIA L40S'"):
        cluster_of(CUDA)


# By NVIDIA's data sheets: multiprocessors and clock, and what they are said to compute, dense.
SHEETS = {
    "Tesla V100-SXM2-32GB": ((7, 0), 80, 1.53, 898, 34, 125, 15.7, "NVLink"),
    "Tesla T4": ((7, 5), 40, 1.59, 320, 16, 65, 8.1, "PCIe"),
    "NVIDIA A100-SXM4-40GB": ((8, 0), 108, 1.41, 1555, 42, 312, 19.5, "NVLink"),
    "NVIDIA A10": ((8, 6), 72, 1.695, 600, 24, 125, 31.2, "PCIe"),
    "NVIDIA A10G": ((8, 6), 80, 1.71, 600, 24, 70, 35, "PCIe"),
    "NVIDIA L40": ((8, 9), 142, 2.49, 864, 48, 181, 90.5, "PCIe"),
    "NVIDIA GeForce RTX 3090": ((8, 6), 82, 1.695, 936, 25, 71, 35.6, "PCIe"),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 2.52, 1008, 25, 165, 82.6, "PCIe"),
    "NVIDIA H20": ((9, 0), 78, 1.98, 4000, 96, 148, 39.5, "NVLink"),
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": ((9, 0), 60, 1.98, 1675, 42, 487, 30, "PCIe"),
    "NVIDIA H100 PCIe": ((9, 0), 114, 1.755, 2039, 85, 756, 51, "PCIe"),
    "NVIDIA GH200 480GB": ((9, 0), 132, 1.98, 4023, 102, 989, 67, "NVLink"),
    "NVIDIA B200": ((10, 0), 148, 1.965, 8000, 192, 2250, 75, "NVLink"),
    "NVIDIA GeForce RTX 5090": ((12, 0), 170, 2.41, 1792, 34, 209.5, 104.8, "PCIe"),
}


@pytest.mark.parametrize("name", SHEETS)
def test_an_estimate_is_near_the_data_sheet(name: str) -> None:
    capability, count, clock_ghz, memory_gb_s, memory_gb, half, single, link = SHEETS[name]
    cluster = estimated(Device(name, capability, count, clock_ghz, memory_gb_s, memory_gb))
    assert cluster.peaks["float16"].tflops == pytest.approx(half, rel=0.1)
    assert cluster.peaks["float32"].tflops == pytest.approx(single, rel=0.1)
    bf16 = "float16" if capability >= (8, 0) else "float32"
    assert cluster.peaks["bfloat16"] == cluster.peaks[bf16]
    eighths = cluster.peaks.get("float8_e4m3fn")
    assert (eighths is not None) == (capability >= (8, 9))
    assert eighths is None or eighths.tflops == 2 * cluster.peaks["float16"].tflops
    of_an_h100 = cluster.link("gather", 8, 1).gb_s / preset("h100").link("gather", 8, 1).gb_s
    assert (of_an_h100 > 0.3) == (link == "NVLink")
    for per_node in (1, 2, 4, 8, 16):
        other = cluster.with_nodes_of(per_node)
        within, across = (other.link("gather", n * per_node, n).gb_s for n in (1, 2))
        assert per_node == 1 or across <= 1.2 * within


def test_an_architecture_to_come_is_taken_for_the_last_before_it() -> None:
    known, later = (
        estimated(Device("NVIDIA GeForce RTX 6090", (major, 0), 200, 2.5, 2000.0, 48.0))
        for major in (12, 13)
    )
    assert known == later


def test_gpus_of_one_name_make_one_plan() -> None:
    """A little memory is kept back on some; all ranks must have the same cluster."""
    one, other = (
        estimated(Device("NVIDIA L40S", (8, 9), 142, 2.52, 864.1, gb)) for gb in (47.70, 47.68)
    )
    assert one == other
