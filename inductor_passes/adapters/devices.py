"""Which cluster a device belongs to, by its name, or by what its driver tells of it."""

from __future__ import annotations

import torch

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.estimate import Device, estimated
from inductor_passes.machine.presets import DEVICES, PRESETS, preset


def cluster_of(device: torch.device) -> Cluster:
    """The preset for a device, by its name; for another GPU of NVIDIA's an estimate.

    Raises:
        ValueError: there is neither; lists the presets.
    """
    if (known := preset_of(device)) is not None:
        return known
    if (told := told_of(device)) is not None:
        return estimated(told)
    name = device_name(device)
    raise ValueError(
        f"there is no preset for {name!r}: pass options={{'cluster': ...}}, one of "
        f"{', '.join(PRESETS)}, or the path of a file that `simplefsdp calibrate` wrote; or "
        "options={'bucketing': 'manual'}, which needs none"
    )


def preset_of(device: torch.device) -> Cluster | None:
    """The preset for a device, by its name."""
    name = device_name(device)
    if name == "cpu":
        return preset("cpu-gloo")
    return preset(DEVICES[name]) if name in DEVICES else None


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
    # Memory moves the width of its bus, in bits, at both edges of its clock, which is in kHz.
    memory_gb_s = 2 * told.memory_clock_rate * told.memory_bus_width / 8 / 1e6
    figures = (told.multi_processor_count, told.clock_rate / 1e6, memory_gb_s)
    if min(figures) <= 0 or told.major < 7:  # Triton makes no code for older GPUs
        return None
    return Device(told.name, (told.major, told.minor), *figures, told.total_memory / 1e9)
