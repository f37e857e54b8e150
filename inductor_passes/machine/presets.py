"""Clusters that need no measuring: orders of magnitude on CPU, published figures on GPU.

Every constant is marked **measured** (by whom) or **estimated** (from what). Calibrate the real
machine with ``simplefsdp calibrate`` where a few per cent matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from inductor_passes.ir.program import CollectiveKind
from inductor_passes.machine.cluster import Cluster, Peak, Wire
from inductor_passes.machine.links import Link, Ramp

_SOURCE = "preset; see inductor_passes/machine/presets.py"


def preset(name: str) -> Cluster:
    """The cluster of that name in :data:`PRESETS`.

    Raises:
        ValueError: there is no preset of that name; lists the presets.
    """
    if name not in PRESETS:
        raise ValueError(
            f"cluster: there is no preset {name!r}; expected one of {', '.join(PRESETS)}, or the "
            "path of a JSON file that `simplefsdp calibrate` wrote"
        )
    return PRESETS[name]


# One node of 8 H100, full bytes per second: (ranks, latency us, GB/s). Measured: nccl-tests,
# as fitted by meta-pytorch/autoparallel (nccl_cost_model).
_NVLINK_H100 = ((2, 8.0, 537.0), (4, 17.0, 434.0), (8, 30.0, 394.0))
# Several nodes of 8 H100 with a 400 Gb/s card per GPU: (nodes, latency us, GB/s); same source.
_NETWORK_H100 = (
    (2, 70.0, 410.0),
    (4, 146.0, 396.0),
    (8, 297.0, 390.0),
    (16, 599.0, 387.0),
    (32, 1204.0, 386.0),
)
# Across nodes, by bytes per GPU; same source. It gives 0.68 up to 8 MB, 0.79 at 16 MB, 0.87 from
# 32 MB, and below 16 KB a fall from 0.36 to 0.01; where that fall ends (256 bytes) is estimated.
_NETWORK_RAMP: Ramp = (
    (256, 0.01),
    (2**14, 0.36),
    (2**15, 0.68),
    (2**23, 0.68),
    (2**24, 0.79),
    (2**25, 0.87),
)


# Cost of each member of a bucket but the first, as a fraction of the latency. Estimated from NCCL's
# own model (tuning.cc, quoted in NVIDIA/nccl issue 1334): a hop of a ring takes 3.4 us on NVLink
# and 14 between nodes, which gives the latencies above; by the protocol for small messages, 0.6 and
# 2.7 us.
_MEMBER = 0.2
# Fraction of its speed that compute keeps beside transfers. Estimated: NCCL sends with 16 to 24
# blocks, each of which takes one of 108 to 148 SMs for itself.
_BESIDE = 0.85


_Row = tuple[int, int, float, float, Ramp]  # ranks, nodes, latency us, GB/s, ramp


def _gpu_rows(nvlink: float, network: float) -> tuple[_Row, ...]:
    """Links that are the given multiples of an H100's, at the same latencies (estimated)."""
    within = [(ranks, 1, us, gb_s * nvlink, ()) for ranks, us, gb_s in _NVLINK_H100]
    across = [(8 * n, n, us, gb_s * network, _NETWORK_RAMP) for n, us, gb_s in _NETWORK_H100]
    return (*within, *across)


def _wires(rows: Iterable[_Row], member: float = 0.0) -> tuple[Wire, ...]:
    """Links of all kinds from those of gathers.

    A reduce-scatter is taken to cost what a gather does, and an all-reduce to move twice the
    bytes at the same latency (estimated; a ring moves just that, and NVLink SHARP less). Each
    further member of a bucket costs the fraction ``member`` of the latency.
    """
    kinds: tuple[tuple[CollectiveKind, int], ...] = (
        ("gather", 1),
        ("reduce", 1),
        ("all_reduce", 2),
    )
    return tuple(
        Wire(kind, ranks, nodes, Link(us, gb_s / passes, ramp, us * member))
        for kind, passes in kinds
        for ranks, nodes, us, gb_s, ramp in rows
    )


def _small_gpu_ramp(large: float) -> Ramp:
    """A large matmul's fraction is reached at 1e11 operations, a third of it at 1e9 (estimated)."""
    return ((1e9, large / 3), (1e10, large * 0.75), (1e11, large))


def gpu_peaks(
    half: float, single: float, double: float, *, matmul: float, attention: float, float8: bool
) -> Mapping[str, Peak]:
    """Peaks from dense TFLOP/s of a data sheet; fp32 without TF32, torch's default. A device with
    ``float8`` has twice the peak of half precision in it (989 and 1979 for an H100, 2250 and 4500
    for a B200, 362 and 733 for an L40S); a matmul reaches the same fraction of it (estimated)."""
    halves = Peak(half, _small_gpu_ramp(matmul), _small_gpu_ramp(attention))
    eighths = replace(halves, tflops=2 * half)
    plain = _small_gpu_ramp(0.85)
    return {
        "bfloat16": halves,
        "float16": halves,
        "float32": Peak(single, plain, _small_gpu_ramp(0.5)),
        "float64": Peak(double, plain, _small_gpu_ramp(0.5)),
        **({"float8_e4m3fn": eighths, "float8_e5m2": eighths} if float8 else {}),
    }


def gpu_node(
    name: str,
    peaks: Mapping[str, Peak],
    memory_gb_s: float,
    memory_gb: float,
    *,
    nvlink: float = 1.0,
    network: float = 1.0,
    source: str = _SOURCE,
) -> Cluster:
    """Nodes of eight GPUs, linked by the given multiples of an H100's links.

    Estimated for all GPUs: the fraction of memory bandwidth that fused loops reach (0.85), 3 us per
    launch, and the speed that compute keeps beside transfers.
    """
    wires = _wires(_gpu_rows(nvlink, network), _MEMBER)
    machine = (name, 8, peaks, memory_gb_s, 0.85, 3.0, memory_gb, wires, source)
    return Cluster(*machine, compute_beside=_BESIDE, averages=True)


# Attention: torch's default on compute capability 9.0 and 10.0 is cuDNN's since 2.11, which brings
# a cuDNN above 9.15 (``check_prefer_cudnn_attention`` in ATen; huggingface/transformers pull
# request 48163), and FlashAttention 2 elsewhere. Measured on an H100 SXM with heads of 128, at 4k
# to 16k, by the authors of FlashAttention 3 (arXiv 2407.08608): forward cuDNN 595-609 and
# FlashAttention 2 368-370 TFLOP/s, backward 499-518 and 310-322; by others 631 and 329 forward
# (pytorch/pytorch issue 142132). A backward has 2.5 times the operations, so both together run at
# 526 and 331.


# DGX A100, of 80 or 40 GB. Peaks 312 (bf16), 19.5 (fp32), 19.5 (fp64) TFLOP/s, memory 2.0 or 1.6
# TB/s: data sheet. Fractions: 0.80 matmul, 0.60 attention (FlashAttention 2's published figures):
# estimated. NVLink: 0.70 of an H100's, from a bus bandwidth of 230-250 GB/s on 8 (nccl-tests,
# measured) against 345; network: half, a 200 Gb/s card per GPU: estimated.
_A100 = gpu_node(
    "a100",
    gpu_peaks(312.0, 19.5, 19.5, matmul=0.80, attention=0.60, float8=False),
    2039.0,
    80.0,
    nvlink=0.70,
    network=0.5,
)
_A100_40 = replace(_A100, name="a100-40gb", memory_gb_s=1555.0, memory_gb=40.0)

# DGX H100 (SXM). Peaks 989 (bf16), 67 (fp32), 67 (fp64) TFLOP/s, memory 3.35 TB/s, 80 GB: data
# sheet. Fractions: 0.65 matmul (an H200, with the same cores, was measured at 0.78-0.81 on a large
# one; an H100 that trains for long has less power to spare): estimated; 0.53 attention (cuDNN's
# 526 TFLOP/s, measured, see above). Links: measured, see above.
_H100_PEAKS = gpu_peaks(989.0, 67.0, 67.0, matmul=0.65, attention=0.53, float8=True)
_H100 = gpu_node("h100", _H100_PEAKS, 3350.0, 80.0)

# DGX H200: an H100 with 4.8 TB/s and 141 GB (data sheet). 0.79 matmul: measured, 769-798 TFLOP/s of
# 989 on a large one. The rest as for an H100: estimated.
_H200_PEAKS = gpu_peaks(989.0, 67.0, 67.0, matmul=0.79, attention=0.53, float8=True)
_H200 = gpu_node("h200", _H200_PEAKS, 4800.0, 141.0)

# DGX B200; nothing of it is measured here. Peaks 2250 (bf16), 75 (fp32), 37 (fp64) TFLOP/s, memory
# 8 TB/s, 180 GB: data sheet. Fractions: 0.70 matmul: estimated; 0.48 attention: estimated from 1605
# TFLOP/s forward of FlashAttention 4, 1.3 times cuDNN 9.13 (its authors,
# together.ai/blog/flashattention-4), and a backward as much slower as on an H100. NVLink twice an
# H100's, the same network (400 Gb/s per GPU): estimated.
_B200_PEAKS = gpu_peaks(2250.0, 75.0, 37.0, matmul=0.70, attention=0.48, float8=True)
_B200 = gpu_node("b200", _B200_PEAKS, 8000.0, 180.0, nvlink=2.0)

# A core of a server per rank, gloo over loopback. One core of an AMD EPYC 7003 (AVX2) in a busy
# virtual machine of two, so roughly. Measured with ``simplefsdp calibrate``: 75 GFLOP/s fp32 and
# 1.5 bf16 (it has no such instructions), attention at 0.25-0.5 of fp32, memory 16 GB/s of which
# loops with arithmetic reach 0.4, launch 4 us, two ranks 600 us and 1 GB/s. Estimated: fp64, half
# of fp32; 8 GB of memory; more ranks, which share the cores; nodes, 1 Gbit/s between them. The cost
# of a bucket's members, and what compute loses beside transfers, are unknown and taken to be zero.
_CPU_RAMPS: tuple[Ramp, Ramp] = (
    ((5e5, 0.15), (4e6, 0.7), (3e7, 1.0)),
    ((6e7, 0.25), (9e8, 0.33), (4e9, 0.5)),
)
_CPU_PEAKS = {
    "float32": Peak(0.075, *_CPU_RAMPS),
    "float64": Peak(0.0375, *_CPU_RAMPS),
    "bfloat16": Peak(0.0015),
}
_CPU_ROWS: tuple[_Row, ...] = (
    (2, 1, 600.0, 1.0, ()),
    (8, 1, 2000.0, 0.3, ()),
    (16, 2, 3000.0, 0.1, ()),
    (256, 32, 15000.0, 0.08, ()),
)
_CPU = Cluster("cpu-gloo", 8, _CPU_PEAKS, 16.0, 0.4, 4.0, 8.0, _wires(_CPU_ROWS), _SOURCE)

PRESETS: Mapping[str, Cluster] = {
    cluster.name: cluster for cluster in (_CPU, _A100, _A100_40, _H100, _H200, _B200)
}

# Presets by torch's name of the device. Other cards of a family (PCIe, NVL) have other links,
# clocks or memory.
DEVICES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
