"""Part a: versions, which attention is taken and how fast it is, and the calibration."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ledger import Part, part, seconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from simplefsdp.calibrate.measure import sweep_for
from simplefsdp.calibrate.session import CalibrationReport, measure_compute
from simplefsdp.launcher.ranks import Rank

LIBRARIES = ("triton", "numpy", "rich", "tyro", "pytest", "safetensors", "plotly", "tensorboard")


def versions(device: torch.device) -> dict[str, Any]:
    """Of what the figures depend on."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "nccl_is_there": dist.is_nccl_available(),
        "libraries": {name: importlib.util.find_spec(name) is not None for name in LIBRARIES},
        "compiler": [name for name in ("gcc", "cc", "g++", "ptxas") if shutil.which(name)],
        "python_headers": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cudnn": torch.backends.cudnn.version(),
            "nccl": list(torch.cuda.nccl.version()),
            "device": properties.name,
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count,
            "memory_nbytes": properties.total_memory,
            "nvidia_smi": _nvidia_smi(),
        }
    return found


def _nvidia_smi() -> str:
    asked = "driver_version,power.limit,clocks.max.sm,clocks.sm,temperature.gpu,utilization.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as error:
        return f"not there: {error}"


def attention(device: torch.device, *, smallest: bool) -> dict[str, Any]:
    """Causal attention in bf16, forward and backward: each backend, and the one that is taken."""
    heads, length = (2, 128) if smallest else (32, 8192)
    shape = (1, heads, length, 128)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    # Two matmuls forward and five backward; half of each is masked.
    flops = 7.0 * heads * 128 * length**2
    times = {"default": seconds(step, device, 5)}
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        if backend is SDPBackend.MATH and not smallest:
            continue  # it holds the square of the length
        try:
            with sdpa_kernel(backend):
                times[backend.name] = seconds(step, device, 5)
        except RuntimeError as error:
            print(f"{backend.name}: {error}", flush=True)
    return {
        "shape": list(shape),
        "ms": {name: 1e3 * s for name, s in times.items()},
        "tflops": {name: flops / s / 1e12 for name, s in times.items()},
        "kernels": _kernels(step),
    }


def _kernels(step: Any) -> list[str]:
    """What the default launches: it tells the backend."""
    with torch.profiler.profile() as profile:
        step()
    events = profile.key_averages()
    names = [e.key for e in events if "attention" in e.key or e.device_type.name == "CUDA"]
    return sorted(names)


def calibration(device: torch.device, *, smallest: bool) -> dict[str, Any]:
    """The compute fields of a cluster file, as ``simplefsdp calibrate`` measures them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sweep = sweep_for(device.type, quick=smallest, nbytes_max=None)
    found = measure_compute(sweep, Rank(0, 1, device), CalibrationReport(enabled=False))
    dist.destroy_process_group()
    peaks = {name: asdict(peak) for name, peak in found["peaks"].items()}
    return {**found, "peaks": peaks}


def measure(run: Part) -> None:
    """The part."""
    run.cell("versions", lambda: versions(run.device))
    run.cell("attention", run.alone(lambda: attention(run.device, smallest=run.smallest)))
    run.cell("calibration", run.alone(lambda: calibration(run.device, smallest=run.smallest)))
    found = run.cells["calibration"]
    bf16 = found.get("peaks", {}).get("bfloat16", {}).get("tflops", float("nan"))
    taken = run.cells["attention"].get("tflops", {}).get("default", float("nan"))
    memory = found.get("memory_gb_s", float("nan"))
    run.finish(
        f"bf16 {bf16:.4g} TFLOP/s, attention {taken:.4g}, memory {memory:.4g} GB/s, "
        f"a launch {found.get('launch_us', float('nan')):.3g} us"
    )


if __name__ == "__main__":
    measure(part(__doc__))
