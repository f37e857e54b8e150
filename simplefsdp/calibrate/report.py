"""What the user sees of a calibration: what is being measured, and how well the fit fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_passes.ir.program import CollectiveKind
from inductor_passes.machine.cluster import Peak
from inductor_passes.machine.links import Link
from simplefsdp.calibrate.fit import Sample, ramp_us
from simplefsdp.words import plural

if TYPE_CHECKING:
    from rich.console import Console


class CalibrationReport:
    """The terminal of a calibration; on ranks other than 0 it says nothing, and needs no rich."""

    def __init__(self, *, enabled: bool) -> None:
        self._console: Console | None = None
        if enabled:
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)

    def _print(self, what: Any, **how: Any) -> None:
        if self._console is not None:
            self._console.print(what, **how)

    def say(self, text: str) -> None:
        """A line."""
        self._print(text, markup=False)

    def progress(self, what: str) -> None:
        """What is being measured from now on."""
        self._print(f"measuring {what} ...", style="dim", markup=False)

    def links(
        self,
        ranks: int,
        nodes: int,
        measured: Mapping[CollectiveKind, Sequence[Sample]],
        fitted: Mapping[CollectiveKind, Link],
    ) -> None:
        """The links of one group, with the error of the fit at each size."""
        for kind, link in fitted.items():
            where = f"{ranks} ranks on {plural(nodes, 'node')}"
            ramp = f", ramp from {min(f for _, f in link.ramp):.0%}" if link.ramp else ""
            each = f", {link.member_us:.3g} us per further member of a bucket"
            if link.member_us == link.latency_us:
                each += " (measured: that or more)"
            title = (
                f"{kind}, {where}: {link.latency_us:.4g} us + bytes / {link.gb_s:.4g} GB/s{ramp}"
                f"{each if link.member_us else ''}"
            )
            predicted = [link.us(s.size, ranks) for s in measured[kind]]
            self._fit(title, "KiB", 1024, measured[kind], predicted)

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
        if self._console is None:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold")
        for column in (unit, "measured us", "fit us", "error"):
            table.add_column(column, justify="right")
        for sample, fit in zip(measured, predicted, strict=True):
            error = f"{fit / sample.us - 1:+.1%}"
            table.add_row(f"{sample.size / scale:,.4g}", f"{sample.us:,.1f}", f"{fit:,.1f}", error)
        self._print(table)
