"""Part g: which kernels a step runs, on which stream, and how long: where the time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
from ledger import Part, part
from measured import on_wire
from rows import Row
from transfers import link
from variants import BUILDERS, Variant, Workload
from workloads import disconnect, rows, use_calibration

VARIANTS = ("floor", "fsdp2_compiled", "manual", "manual_regions", "auto", "auto_regions")
_WARM_UP, _STEPS = 3, 3
_TOLD = 60  # kernels of a stream, those that take the longest


def kernels(run: Part, row: Row) -> dict[str, Any]:
    """Of each variant what a step launches, milliseconds of each launch's stream."""
    link.blocks = 1
    try:
        built = {}
        with run.turns.shared():
            load, _ = on_wire(row, run.device)
            for name in VARIANTS:
                built[name] = variant = BUILDERS[name](load)
                for _ in range(_WARM_UP):
                    _step(variant, load)
                    variant.optimizer.step()
        with run.turns.alone():
            return {"variants": {name: _profiled(variant, load) for name, variant in built.items()}}
    finally:
        disconnect()


def _step(variant: Variant, load: Workload) -> float:
    """Forward and backward; seconds until they are launched."""
    variant.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    variant.step(load.tokens, load.targets).backward()
    return time.perf_counter() - begin


def _profiled(variant: Variant, load: Workload) -> dict[str, Any]:
    """Means of a few steps; the profiler's own time is in those of the host and of the step."""
    step_ms, host_ms = [], []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_STEPS):
            begin = time.perf_counter()
            host_ms.append(1e3 * _step(variant, load))
            torch.cuda.synchronize()
            step_ms.append(1e3 * (time.perf_counter() - begin))
    link.take()
    streams: defaultdict[str, defaultdict[str, list[float]]]
    streams = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    results = profile.profiler.kineto_results
    for event in results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            seen = streams[str(event.device_resource_id())][event.name()[:110]]
            seen[0] += 1 / _STEPS
            seen[1] += event.duration_ns() / 1e3 / _STEPS
    return {
        "step_ms": step_ms,
        "host_ms": host_ms,
        "streams": {stream: _told(by_name) for stream, by_name in streams.items()},
    }


def _told(by_name: dict[str, list[float]]) -> dict[str, Any]:
    longest = sorted(by_name.items(), key=lambda entry: -entry[1][1])[:_TOLD]
    return {
        "ms": sum(us for _, us in by_name.values()) / 1e3,
        "launches": sum(n for n, _ in by_name.values()),
        "kernels": [[name, round(n, 1), round(us, 1)] for name, (n, us) in longest],
    }


def told(variants: dict[str, Any]) -> str:
    """Milliseconds on the stream of compute, the one with the most launches."""
    compute = {
        name: max(found["streams"].values(), key=lambda s: s["launches"])
        for name, found in variants.items()
    }
    return ", ".join(f"{name} {stream['ms']:.1f}" for name, stream in compute.items())


def measure(run: Part) -> None:
    """The part."""
    use_calibration(run)
    if not run.needs_cuda("kernels", "kernels by stream"):
        for name, row in run.each(rows(run)):
            run.cell(name, lambda r=row: kernels(run, r))
    found = {name: cell["variants"] for name, cell in run.cells.items() if "variants" in cell}
    each = [f"{name}: {told(variants)}" for name, variants in found.items()]
    run.finish("ms of compute's kernels, " + ("; ".join(each) or "none"))


if __name__ == "__main__":
    measure(part(__doc__))
