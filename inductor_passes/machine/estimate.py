"""A cluster for a GPU without a preset, from what its driver reports.

Every figure is **estimated**. A plan needs only orders of magnitude, to tell which compute hides
which transfer. ``simplefsdp calibrate`` measures a machine.
"""

from __future__ import annotations

from typing import NamedTuple

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.presets import gpu_node, gpu_peaks


class Device(NamedTuple):
    """What a driver reports of an NVIDIA GPU."""

    name: str  # its product name
    capability: tuple[int, int]  # compute capability: (9, 0) is Hopper's
    multiprocessors: int  # their number
    clock_ghz: float  # highest clock
    memory_gb_s: float  # 1e9 bytes per second, from its memory's clock and bus width
    memory_gb: float  # 1e9 bytes


# Floating-point operations of a multiprocessor per cycle, by compute capability: dense matmuls of
# 16 bits that sum in fp32; fp32 without TF32; fp64. From NVIDIA's whitepapers of Volta, Turing,
# Ampere, Ada, Hopper and Blackwell, and the table of throughputs in its programming guide.
_PER_CYCLE = {
    (7, 0): (1024, 128, 64),
    (7, 5): (1024, 128, 4),
    (8, 0): (2048, 128, 128),
    (8, 6): (1024, 256, 4),
    (8, 9): (1024, 256, 4),
    (9, 0): (4096, 256, 256),
    (10, 0): (8192, 256, 128),
    (10, 3): (8192, 256, 4),
    (12, 0): (1024, 256, 4),
}
# Words in the names of cards that, by their data sheets, sum in fp32 at half that speed.
_HALVED = {"GeForce", "A10G", "L40"}
# TFLOP/s by the data sheet, where it is below what the cores could do, for export.
_SOLD_AS = {"H20": 148.0}
# Links as multiples of an H100's, by major compute capability: NVLink (300, 600, 900 and 1800 GB/s
# per GPU) and network (100, 200, 400 and 400 Gb/s per card; eight V100 share four cards).
_NVLINK = {7: 1 / 3, 8: 0.7, 9: 1.0, 10: 2.0}
_NETWORK = {7: 1 / 8, 8: 1 / 2, 9: 1.0, 10: 1.0}
# Likewise for GPUs on PCIe 4.0, where NCCL reaches about 20 GB/s (an H100's NVLink: 345); between
# nodes they send no faster.
_PCIE, _BEHIND_PCIE = 0.06, 0.05


def estimated(device: Device) -> Cluster:
    """Nodes of eight such GPUs, linked by NVLink if its name and architecture say so, else by PCIe.

    Figures of memory are rounded: GPUs of one name may differ by a little, and it is an error if
    ranks have different figures.

    Args:
        device: of compute capability 7.0 or more.
    """
    known = max(c for c in _PER_CYCLE if c <= device.capability)
    words = _words(device)
    cycles = device.multiprocessors * device.clock_ghz / 1e3
    half, single, double = (per_cycle * cycles for per_cycle in _PER_CYCLE[known])
    half /= 2 if words & _HALVED else 1
    half = next((_SOLD_AS[word] for word in words if word in _SOLD_AS), half)
    half, single, double = (float(f"{tflops:.3g}") for tflops in (half, single, double))
    fractions = {"matmul": 0.65, "attention": 0.45}
    peaks = gpu_peaks(half, single, double, **fractions, float8=known >= (8, 9))
    if known < (8, 0):
        peaks = {**peaks, "bfloat16": peaks["float32"]}  # such GPUs have no units for bfloat16
    linked = _has_nvlink(device)
    return gpu_node(
        device.name,
        peaks,
        float(f"{device.memory_gb_s:.2g}"),
        float(round(device.memory_gb)),
        nvlink=_NVLINK.get(known[0], 1.0) if linked else _PCIE,
        network=_NETWORK.get(known[0], 1.0) if linked else _BEHIND_PCIE,
        source="estimated from what the driver tells; see inductor_passes/machine/estimate.py",
    )


def _has_nvlink(device: Device) -> bool:
    """Whether NVLink links all GPUs of a node, as far as name and architecture tell."""
    words = _words(device)
    if words & {"PCIe", "NVL", "MIG"}:
        return False
    return device.capability[0] in (9, 10) or any(word.startswith("SXM") for word in words)


def _words(device: Device) -> set[str]:
    return set(device.name.replace("-", " ").split())
