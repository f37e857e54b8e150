"""Exposed communication of a measured run, which no compute on any stream covers; and idle time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from simplefsdp.inspection.intervals import Intervals, difference, intersection, length, union
from simplefsdp.inspection.names import nbytes_text, time_text
from simplefsdp.inspection.profile import Profile, Transfer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GAP_US = 10.0
"""Shorter gaps are not reported, as they occur between any two kernels."""
_SHOWN = 5


@dataclass(frozen=True)
class Measured:
    """A transfer, and the parts of it that are exposed."""

    transfer: Transfer
    exposed: Intervals  # the times during the transfer in which nothing is computed

    @property
    def exposed_us(self) -> float:
        """Time during the transfer in which nothing is computed."""
        return length(self.exposed)

    @property
    def duration_us(self) -> float:
        """Duration of the transfer, including the time that NCCL's kernels wait for other ranks."""
        return self.transfer.end_us - self.transfer.begin_us

    @property
    def gb_s(self) -> float | None:
        """Rate, in 1e9 bytes of full tensors per second."""
        nbytes = self.transfer.nbytes
        return nbytes / self.duration_us / 1e3 if nbytes and self.duration_us else None


class Gap(NamedTuple):
    """A time in which nothing is computed and nothing sent."""

    begin_us: float  # in the trace's clock
    us: float
    before: str  # name of the compute that ends the gap; empty if a transfer ends it
    # Whether the host launched that compute only after the gap had begun; None if not known.
    launch_bound: bool | None


@dataclass(frozen=True)
class MeasuredReport:
    """The measured run of one rank."""

    name: str  # of the rank
    total_us: float  # from the first compute or transfer to the end of the last
    compute_us: float
    communication_us: float
    exposed_us: float  # time in which something is sent and nothing computed
    # In the order in which they began. If transfers overlap each other, the sum of their exposed
    # times is more than ``exposed_us``.
    transfers: tuple[Measured, ...]
    gaps: tuple[Gap, ...]  # longer than 10 us, the longest first

    @property
    def overlap(self) -> float:
        """Fraction of the communication that compute covers."""
        covered = self.communication_us - self.exposed_us
        return covered / self.communication_us if self.communication_us else 1.0

    @property
    def idle_us(self) -> float:
        """Time in which nothing is computed and nothing sent."""
        # Rounded to a nanosecond, as sums of spans differ in their last bits.
        return round(max(0.0, self.total_us - self.compute_us - self.exposed_us), 3)


def measure(profile: Profile) -> MeasuredReport:
    """Compute the report of a profile."""
    sent = union((t.begin_us, t.end_us) for t in profile.transfers)
    compute = union((kernel.begin_us, kernel.end_us) for kernel in profile.kernels)
    busy = union([*compute, *sent])
    exposed = difference(sent, compute)
    return MeasuredReport(
        profile.name,
        busy[-1][1] - busy[0][0] if busy else 0.0,
        length(compute),
        length(sent),
        length(exposed),
        tuple(
            Measured(t, intersection([(t.begin_us, t.end_us)], exposed)) for t in profile.transfers
        ),
        tuple(_gaps(profile, busy)),
    )


def _gaps(profile: Profile, busy: Sequence[tuple[float, float]]) -> list[Gap]:
    first_at = {kernel.begin_us: kernel for kernel in reversed(profile.kernels)}
    found = []
    for (_, begin), (end, _) in pairwise(busy):
        if end - begin >= _GAP_US:
            kernel = first_at.get(end)
            launched = kernel.launched_us if kernel else None
            late = launched > begin if launched is not None else None
            found.append(Gap(begin, end - begin, kernel.name if kernel else "", late))
    return sorted(found, key=lambda gap: -gap.us)


def measured_document(report: MeasuredReport) -> dict[str, Any]:
    """The report in plain JSON values; times in us, from the rank's first event on."""
    first = min((m.transfer.begin_us for m in report.transfers), default=0.0)
    return {
        "name": report.name,
        "total_us": report.total_us,
        "compute_us": report.compute_us,
        "communication_us": report.communication_us,
        "exposed_us": report.exposed_us,
        "overlap": report.overlap,
        "idle_us": report.idle_us,
        "collectives": [
            {
                "kind": m.transfer.kind,
                "name": m.transfer.name,
                "begin_us": m.transfer.begin_us - first,
                "duration_us": m.duration_us,
                "exposed_us": m.exposed_us,
                "bytes": m.transfer.nbytes,
                "gb_s": m.gb_s,
            }
            for m in report.transfers
        ],
        "gaps": [{**gap._asdict(), "begin_us": gap.begin_us - first} for gap in report.gaps],
    }


def print_measured(out: Console, reports: Sequence[MeasuredReport]) -> None:
    """Print all ranks side by side, then the collectives and gaps of the rank that exposes most."""
    from rich.markup import escape

    from simplefsdp.inspection.terminal import table_of

    numbers = ("total", "compute", "communication", "exposed", "overlap", "idle")
    table = table_of("rank", *numbers, words=("rank",))
    for r in reports:
        times = (r.total_us, r.compute_us, r.communication_us, r.exposed_us)
        table.add_row(
            escape(r.name), *map(time_text, times), f"{r.overlap:.1%}", time_text(r.idle_us)
        )
    out.print(table)
    worst = max(reports, key=lambda report: report.exposed_us)
    if len(reports) > 1:
        out.print(f"most is exposed on {worst.name}:", markup=False)
    out.print(_by_kind(worst))
    for m in sorted(worst.transfers, key=lambda m: -m.exposed_us)[:_SHOWN]:
        if m.exposed_us:
            t = m.transfer
            size = f"of {nbytes_text(t.nbytes)}, " if t.nbytes else ""
            us = f"{time_text(m.exposed_us)} of {time_text(m.duration_us)}"
            out.print(f"  exposed {us}: {t.kind} {size}{t.name}", markup=False)
    for line in _gap_lines(worst):
        out.print(line, soft_wrap=True, markup=False)


def _by_kind(report: MeasuredReport) -> Table:
    from simplefsdp.inspection.terminal import table_of

    numbers = ("number", "time", "exposed", "covered", "bytes", "median GB/s")
    table = table_of("collectives", *numbers, words=("collectives",))
    for kind in dict.fromkeys(m.transfer.kind for m in report.transfers):
        found = [m for m in report.transfers if m.transfer.kind == kind]
        us, exposed = sum(m.duration_us for m in found), sum(m.exposed_us for m in found)
        known = [m.transfer.nbytes for m in found if m.transfer.nbytes]
        rates = [m.gb_s for m in found if m.gb_s]
        table.add_row(
            kind,
            str(len(found)),
            time_text(us),
            time_text(exposed),
            f"{1 - exposed / us:.1%}" if us else "-",
            nbytes_text(sum(known)) if len(known) == len(found) else "-",
            f"{statistics.median(rates):.3g}" if rates else "-",
        )
    return table


def _gap_lines(report: MeasuredReport) -> list[str]:
    if not report.gaps:
        return ["no idle gaps of 10 us or more"]
    us = sum(gap.us for gap in report.gaps)
    late = [gap.us for gap in report.gaps if gap.launch_bound]
    bound = f", {time_text(sum(late))} of them launch-bound" if late else ""
    lines = [f"{len(report.gaps)} idle gaps of 10 us or more, {time_text(us)} in all{bound}:"]
    for gap in report.gaps[:_SHOWN]:
        why = "; the host launched it too late" if gap.launch_bound else ""
        lines.append(f"  {time_text(gap.us)} before {gap.before or 'a transfer'}{why}")
    return lines
