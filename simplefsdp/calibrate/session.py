"""Runs the measurements in order, fits the figures of a cluster, and reports both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from inductor_passes.machine.cluster import Peak, Wire
from inductor_passes.machine.links import Ramp
from simplefsdp.calibrate import collectives, measure
from simplefsdp.calibrate.fit import (
    Sample,
    fit_link,
    fit_ramp,
    ramp_us,
    with_members,
    without_delays,
)
from simplefsdp.calibrate.measure import Sweep
from simplefsdp.launcher.ranks import Rank
from simplefsdp.words import plural

if TYPE_CHECKING:
    from rich.console import Console


class CalibrationReport:
    """Prints the report of a calibration; if not ``enabled``, as on ranks other than 0, it prints
    nothing and does not import rich."""

    def __init__(self, *, enabled: bool) -> None:
        self._console: Console | None = None
        if enabled:
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)

    def _print(self, what: Any, **how: Any) -> None:
        if self._console is not None:
            self._console.print(what, **how)

    def say(self, text: str) -> None:
        self._print(text, markup=False)

    def progress(self, what: str) -> None:
        """Say what is measured next."""
        self._print(f"measuring {what} ...", style="dim", markup=False)

    def wire(self, wire: Wire, measured: Sequence[Sample]) -> None:
        """Print the link of one kind and group size, with the error of the fit at each size."""
        link = wire.link
        where = f"{wire.ranks} ranks on {plural(wire.nodes, 'node')}"
        title = f"{wire.kind}, {where}: {link.latency_us:.4g} us + bytes / {link.gb_s:.4g} GB/s"
        if link.ramp:
            title += f", ramp from {min(reached for _, reached in link.ramp):.0%}"
        if link.member_us:
            title += f", {link.member_us:.3g} us per further member of a bucket"
            title += " (measured: that or more)" if link.member_us == link.latency_us else ""
        predicted = [link.us(s.size, wire.ranks) for s in measured]
        self._fit(title, "KiB", 1024, measured, predicted)

    def peak(
        self,
        dtype: str,
        peak: Peak,
        launch_us: float,
        matmuls: Sequence[Sample],
        attention: Sequence[Sample],
    ) -> None:
        """Print the peaks of matmuls and attention in one dtype, with the errors of the fits."""
        for what, ramp, samples in (
            ("matmul", peak.matmul, matmuls),
            ("attention", peak.attention, attention),
        ):
            best = max((reached for _, reached in ramp), default=1.0) * peak.tflops
            predicted = [launch_us + ramp_us(peak.tflops * 1e6, ramp, s.size) for s in samples]
            title = f"{dtype} {what}: up to {best:.4g} TFLOP/s"
            self._fit(title, "MFLOP", 1e6, samples, predicted)

    def _fit(
        self,
        title: str,
        unit: str,
        scale: float,
        measured: Sequence[Sample],
        predicted: Sequence[float],
    ) -> None:
        if self._console is None:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold")
        for column in (unit, "measured us", "fit us", "error"):
            table.add_column(column, justify="right")
        for sample, fit in zip(measured, predicted, strict=True):
            error = f"{fit / sample.us - 1:+.1%}"
            table.add_row(f"{sample.size / scale:,.4g}", f"{sample.us:,.1f}", f"{fit:,.1f}", error)
        self._console.print(table)


def measure_wires(
    sweep: Sweep, rank: Rank, local_size: int, report: CalibrationReport
) -> tuple[Wire, ...]:
    """Measure the links of every kind and group size. Each rank gets those that it measured; rank 0
    takes part in all groups."""
    wires = []
    for ranks, nodes in measure.groups_of(rank.world_size, local_size):
        report.progress(f"collectives among {ranks} ranks")
        found = collectives.time_collectives(ranks, sweep, rank.device)
        for kind, samples in found.items():
            flat = [s for s in samples if s.members == 1]
            wire = Wire(kind, ranks, nodes, with_members(fit_link(flat, ranks), samples))
            wires.append(wire)
            report.wire(wire, flat)
    return tuple(wires)


def measure_beside(sweep: Sweep, rank: Rank, report: CalibrationReport) -> float:
    """Fraction of its speed that compute keeps beside transfers among all ranks; 1 if it cannot be
    measured."""
    if rank.world_size == 1:
        return 1.0
    report.progress("compute beside transfers")
    kept = collectives.compute_beside(sweep, rank.device)
    if kept is None:
        report.say("transfers are too short to tell what compute loses beside them: nothing, then")
        return 1.0
    report.say(f"beside a transfer, compute has {kept:.0%} of its speed")
    return kept


def measure_compute(sweep: Sweep, rank: Rank, report: CalibrationReport) -> dict[str, Any]:
    """Measure the compute fields of a cluster, while all ranks compute at once, as in a step."""
    dist.barrier()
    report.progress("memory and launches")
    launch_us = measure.launch_us(rank.device)
    memory_gb_s, with_arithmetic = measure.memory_gb_s(sweep, rank.device)
    report.say(
        f"memory {memory_gb_s:.4g} GB/s, {with_arithmetic:.4g} in a loop with arithmetic; "
        f"a kernel's launch {launch_us:.3g} us"
    )
    peaks = {}
    dtypes = [torch.float32, torch.bfloat16]
    dtypes += [torch.float16, torch.float64] if rank.device.type == "cuda" else []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        dist.barrier()
        report.progress(f"matmuls and attention in {name}")
        matmuls = measure.time_matmuls(dtype, sweep, rank.device)
        attention = measure.time_attention(dtype, sweep, rank.device)
        peaks[name] = _peak(matmuls, attention, launch_us)
        report.peak(name, peaks[name], launch_us, matmuls, attention)
    return {
        "peaks": peaks,
        "memory_gb_s": memory_gb_s,
        "memory_fraction": with_arithmetic / memory_gb_s,
        "launch_us": launch_us,
        "memory_gb": _memory_gb(rank),
    }


def _peak(matmuls: list[Sample], attention: list[Sample], launch_us: float) -> Peak:
    """The highest rate of operations, and the fractions of it that sizes reach; the time of
    launches is subtracted."""
    (fastest, matmul), (fastest_attention, attended) = (
        fit_ramp([(s.size, s.size / max(s.us - launch_us, s.us / 2)) for s in samples], falls=True)
        for samples in map(without_delays, (matmuls, attention))
    )
    best = max(fastest, fastest_attention)
    return Peak(
        best / 1e6, _scaled(matmul, fastest / best), _scaled(attended, fastest_attention / best)
    )


def _scaled(ramp: Ramp, factor: float) -> Ramp:
    return tuple((size, reached * factor) for size, reached in ramp)


def _memory_gb(rank: Rank) -> float:
    """Memory of the device, in 1e9 bytes; on CPU, this rank's share of the machine's memory."""
    if rank.device.type == "cuda":
        return torch.cuda.get_device_properties(rank.device).total_memory / 1e9
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return total / rank.local_size
