"""What the user sees of a calibration: what is being measured, and how well the fit fits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from inductor_passes.machine.cluster import Peak, Wire
from simplefsdp.calibrate.fit import Sample, ramp_us
from simplefsdp.words import plural


class CalibrationReport:
    """The terminal of a calibration; on ranks other than 0 it says nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True, quiet=not enabled)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def progress(self, what: str) -> None:
        """What is being measured from now on."""
        self._console.print(f"measuring {what} ...", style="dim", markup=False)

    def wire(self, wire: Wire, measured: Sequence[Sample]) -> None:
        """The link of one kind and group, with the error of the fit at each size."""
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
        """The matmuls and attention of one dtype, likewise."""
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
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in (unit, "measured us", "fit us", "error"):
            table.add_column(column, justify="right")
        for sample, fit in zip(measured, predicted, strict=True):
            error = f"{fit / sample.us - 1:+.1%}"
            table.add_row(f"{sample.size / scale:,.4g}", f"{sample.us:,.1f}", f"{fit:,.1f}", error)
        self._console.print(table)
