"""A cluster for a GPU that no preset is of, from what its driver tells of it.

Every figure is **estimated**. Plans need orders of magnitude: what hides a transfer, and what does
not. ``simplefsdp calibrate`` measures a machine.
"""

from __future__ import annotations

from typing import NamedTuple

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.presets import gpu_node, gpu_peaks


class Device(NamedTuple):
    """What a driver tells of an NVIDIA GPU.

    Attributes:
        name: its maker's.
        capability: of its architecture: (9, 0) is Hopper's.
        multiprocessors: that it has.
        clock_ghz: at most.
        memory_gb_s: 1e9 bytes per second, by its memory's clock and width.
        memory_gb: 1e9 bytes.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    memory_gb_s: float
    memory_gb: float


# Floating-point operations of a multiprocessor in a cycle, by capability: matrices of 16 bits that
# are summed in fp32, dense; fp32 without TF32; fp64. By NVIDIA's whitepapers of Volta, Turing,
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
# NVLink by generation, as multiples of an H100's links: 300, 600, 900 and 1800 GB/s of a GPU.
_NVLINK = {7: 1 / 3, 8: 0.7, 9: 1.0, 10: 2.0}
# Without it: PCIe 4.0, of which NCCL gets some 20 GB/s for an H100's 345; and one card of 400 Gb/s
# for the eight GPUs of a node.
_PCIE, _SHARED_CARD = 0.06, 1 / 8


def estimated(device: Device) -> Cluster:
    """Nodes of eight such GPUs, linked by NVLink if its name and architecture say so, else by PCIe.

    Figures are rounded, for GPUs of one name may differ by a little memory, and all ranks must have
    the same plan.
    """
    known = max((c for c in _PER_CYCLE if c <= device.capability), default=min(_PER_CYCLE))
    cycles = device.multiprocessors * device.clock_ghz / 1e3
    half, single, double = (per_cycle * cycles for per_cycle in _PER_CYCLE[known])
    if "GeForce" in device.name and known > (7, 0):
        half /= 2  # those sum in fp32 at half the speed
    half, single, double = (float(f"{tflops:.3g}") for tflops in (half, single, double))
    peaks = gpu_peaks(half, single, double, matmul=0.65, attention=0.45)
    if known < (8, 0):
        peaks = {**peaks, "bfloat16": peaks["float32"]}  # there are no units for it
    linked = has_nvlink(device)
    return gpu_node(
        device.name,
        peaks,
        float(f"{device.memory_gb_s:.2g}"),
        float(round(device.memory_gb)),
        nvlink=_NVLINK.get(known[0], 1.0) if linked else _PCIE,
        network=(0.5 if known < (9, 0) else 1.0) if linked else _SHARED_CARD,
        source="estimated from what the driver tells; see inductor_passes/machine/estimate.py",
    )


def has_nvlink(device: Device) -> bool:
    """Whether all GPUs of a node are linked by NVLink, to judge by its name."""
    words = device.name.replace("-", " ").split()
    if any(word.startswith("SXM") for word in words):
        return True
    is_of_a_server = device.capability[0] in (9, 10)
    return is_of_a_server and not {"PCIe", "NVL"} & set(words)
