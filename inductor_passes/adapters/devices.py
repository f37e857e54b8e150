"""Which cluster a device belongs to, by its name, or by what its driver tells of it."""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.estimate import Device, estimated, has_nvlink
from inductor_passes.machine.presets import DEVICES, PRESETS, preset

log = logging.getLogger("simplefsdp")


def cluster_of(device: torch.device) -> Cluster:
    """The preset for a device, by its name; for another GPU of NVIDIA's an estimate, of which a
    warning tells.

    Raises:
        ValueError: there is neither; lists the presets.
    """
    name = device_name(device)
    if name == "cpu":
        return preset("cpu-gloo")
    if name in DEVICES:
        return preset(DEVICES[name])
    if (told := told_of(device)) is not None:
        return _estimated(told)
    raise ValueError(
        f"there is no preset for {name!r}: pass options={{'cluster': ...}}, one of "
        f"{', '.join(PRESETS)}, or the path of a file that `simplefsdp calibrate` wrote; or "
        "options={'bucketing': 'manual'}, which needs none"
    )


@functools.cache
def _estimated(told: Device) -> Cluster:
    """Rank 0 says once what is assumed."""
    cluster = estimated(told)
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    log.log(
        logging.WARNING if speaks else logging.DEBUG,
        "there is no preset for %s: plans are made for an estimate (%.0f TFLOP/s in bf16, %.0f "
        "GB/s and %.0f GB of memory, linked by %s); `simplefsdp calibrate` measures it, for "
        "options={'cluster': ...}",
        told.name,
        cluster.peaks["bfloat16"].tflops,
        cluster.memory_gb_s,
        cluster.memory_gb,
        "NVLink" if has_nvlink(told) else "PCIe",
    )
    return cluster


def device_name(device: torch.device) -> str:
    """What a device's maker calls it, or its type if there is none here (a fake one)."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def told_of(device: torch.device) -> Device | None:
    """What a GPU's driver tells of it; None if it is not NVIDIA's, not here, or tells too
    little."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    told = torch.cuda.get_device_properties(device)
    # So many bits at both edges of a clock, which is told in kHz.
    memory_gb_s = 2 * told.memory_clock_rate * told.memory_bus_width / 8 / 1e6
    figures = (told.multi_processor_count, told.clock_rate / 1e6, memory_gb_s)
    if min(figures) <= 0:
        return None
    return Device(told.name, (told.major, told.minor), *figures, told.total_memory / 1e9)
