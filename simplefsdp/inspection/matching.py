"""Matches predicted buckets with measured transfers, for ``report.measure(step_fn)``."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from simplefsdp.inspection.align import align
from simplefsdp.inspection.intervals import length, union
from simplefsdp.inspection.measured import Measured, MeasuredReport, measure
from simplefsdp.inspection.names import time_text
from simplefsdp.inspection.profile import STEP, read_profiles
from simplefsdp.inspection.report import BucketReport, GraphReport
from simplefsdp.words import plural

if TYPE_CHECKING:
    from rich.console import Console


class Launch(NamedTuple):
    """All transfers of one launch: several if gloo reduces tensor by tensor."""

    kind: str
    begin_us: float
    end_us: float
    exposed_us: float  # time that overlapping transfers expose is counted once
    nbytes: int | None


@dataclass(frozen=True)
class Row:
    """A bucket, predicted and measured."""

    graph: str  # name of the graph
    bucket: BucketReport  # the prediction
    launches: tuple[Launch, ...]  # the measurements, one for each step in which it was found

    @property
    def duration_us(self) -> float | None:
        """Median of the measured durations."""
        return _median(launch.end_us - launch.begin_us for launch in self.launches)

    @property
    def exposed_us(self) -> float | None:
        """Median of the measured exposed times."""
        return _median(launch.exposed_us for launch in self.launches)

    @property
    def overlap(self) -> float | None:
        """Fraction of the measured time that compute covers."""
        us, exposed = self.duration_us, self.exposed_us
        return 1 - exposed / us if us and exposed is not None else None

    @property
    def gb_s(self) -> float | None:
        """Achieved rate, in 1e9 bytes of full tensors per second."""
        us = self.duration_us
        return self.bucket.nbytes / us / 1e3 if us else None


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured, bucket by bucket."""

    rows: tuple[Row, ...]  # buckets of all graphs, in launch order
    steps: int  # number of measured steps
    unmatched: int  # measured launches that belong to no bucket, such as a gradient norm's
    measured: MeasuredReport  # the whole measured run

    @property
    def match_rate(self) -> float:
        """Fraction of the buckets of all steps that were found in the profile."""
        wanted = len(self.rows) * self.steps
        return sum(len(row.launches) for row in self.rows) / wanted if wanted else 1.0

    @property
    def predicted_exposed_us(self) -> float:
        return sum(row.bucket.exposure.exposed_us for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; times are medians over steps."""
        return {
            "steps": self.steps,
            "match_rate": self.match_rate,
            "unmatched": self.unmatched,
            "buckets": [
                {
                    "graph": row.graph,
                    "kind": row.bucket.kind,
                    "parameters": list(row.bucket.fqns),
                    "bytes": row.bucket.nbytes,
                    "predicted_us": row.bucket.exposure.duration_us,
                    "predicted_exposed_us": row.bucket.exposure.exposed_us,
                    "measured_us": row.duration_us,
                    "measured_exposed_us": row.exposed_us,
                    "overlap": row.overlap,
                    "gb_s": row.gb_s,
                    "matched": len(row.launches),
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        from simplefsdp.inspection.terminal import printed

        return printed(self._print)

    def _print(self, out: Console) -> None:
        from simplefsdp.inspection.terminal import table_of

        numbers = ("predicted", "measured", "exposed: predicted", "measured", "covered", "GB/s")
        words = ("graph", "kind", "parameters")
        table = table_of(*words, *numbers, words=words)
        for row in self.rows:
            exposure = row.bucket.exposure
            us, exposed, overlap, rate = row.duration_us, row.exposed_us, row.overlap, row.gb_s
            table.add_row(
                row.graph,
                row.bucket.kind,
                row.bucket.parameters,
                time_text(exposure.duration_us),
                time_text(us) if us is not None else "-",
                time_text(exposure.exposed_us),
                time_text(exposed) if exposed is not None else "-",
                f"{overlap:.0%}" if overlap is not None else "-",
                f"{rate:.3g}" if rate is not None else "-",
            )
        out.print(table)
        found, wanted = sum(len(row.launches) for row in self.rows), len(self.rows) * self.steps
        out.print(
            f"{plural(self.steps, 'step')}: {found} of {wanted} buckets found in the profile "
            f"({self.match_rate:.0%}), launches that are no bucket's: {self.unmatched}; medians "
            f"over steps; exposed per step: {time_text(self.predicted_exposed_us)} predicted, "
            f"{time_text(self.measured.exposed_us / self.steps)} measured"
        )


def measure_steps(
    graphs: Sequence[GraphReport], step_fn: Callable[[], object], steps: int
) -> Comparison:
    """Profile ``steps`` calls of ``step_fn``, after one that is not counted, and match their
    transfers with the buckets of ``graphs``."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not any(graph.buckets for graph in graphs):
        raise ValueError(
            "measure: the compiled graphs have no buckets, so there is nothing to compare with a "
            "run; use two ranks or more"
        )
    step_fn()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for n in range(steps):
            with torch.profiler.record_function(f"{STEP}#{n}"):
                step_fn()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # so that the step's kernels end inside its event
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        profiles = read_profiles(path)
    # There are several profiles if this rank uses several devices; take the one that communicates.
    profile = max(profiles, key=lambda profile: len(profile.transfers))
    return match(graphs, measure(profile), profile.steps)


def match(
    graphs: Sequence[GraphReport],
    measured: MeasuredReport,
    steps: Sequence[tuple[float, float]],
) -> Comparison:
    """Find the launch of each bucket in each measured step. ``graphs`` run one after the other in a
    step; ``steps`` has the begin and end of each step.

    Launches of one kind come in the predicted order, and have the size of their bucket if the trace
    has sizes. If launches are missing, the times between the others tell which ones; each missing
    launch costs one match. Launches that are left over belong to no bucket.
    """
    launches = launches_of(measured.transfers)
    wanted = _wanted(graphs)
    found: list[list[Launch]] = [[] for _ in wanted]
    for begin, end in steps:
        run = [launch for launch in launches if begin <= launch.begin_us < end]
        for i, launch in _matched(wanted, run):
            found[i].append(launch)
    rows = [Row(p.graph, p.bucket, tuple(x)) for p, x in zip(wanted, found, strict=True)]
    return Comparison(tuple(rows), len(steps), len(launches) - sum(map(len, found)), measured)


def launches_of(transfers: Sequence[Measured]) -> list[Launch]:
    """Transfers grouped by launch, in the order of the launches."""
    found = []
    numbered = sorted(transfers, key=lambda m: (m.transfer.launch, m.transfer.begin_us))
    for _, group in groupby(numbered, key=lambda m: m.transfer.launch):
        members = list(group)
        sent = [m.transfer for m in members]
        sizes = [t.nbytes for t in sent if t.nbytes is not None]
        found.append(
            Launch(
                sent[0].kind,
                min(t.begin_us for t in sent),
                max(t.end_us for t in sent),
                length(union(span for m in members for span in m.exposed)),
                sum(sizes) if len(sizes) == len(sent) else None,
            )
        )
    return found


class _Place(NamedTuple):
    """A bucket, and when its transfer is predicted to begin, counted from the begin of the step."""

    graph: str
    bucket: BucketReport
    begin_us: float


def _wanted(graphs: Sequence[GraphReport]) -> list[_Place]:
    found: list[_Place] = []
    us = 0.0
    for graph in graphs:
        found += [_Place(graph.name, b, us + b.exposure.begin_us) for b in graph.buckets]
        us += graph.prediction.timeline.total_us
    return found


def _matched(wanted: Sequence[_Place], run: Sequence[Launch]) -> Iterator[tuple[int, Launch]]:
    """Pairs of an index in ``wanted`` and its launch. Kinds are matched one by one, because each
    kind may run on a lane of its own."""
    kinds = dict.fromkeys(place.bucket.kind for place in wanted)
    run = [launch for launch in run if launch.kind in kinds]
    predicted_us = _from_the_first([place.begin_us for place in wanted])
    measured_us = _from_the_first([launch.begin_us for launch in run])
    # Scale the measured times so that the run takes as long as predicted, first launch to last.
    pace = max(predicted_us, default=0.0) / (max(measured_us, default=0.0) or 1.0)
    for kind in kinds:
        places = [i for i, place in enumerate(wanted) if place.bucket.kind == kind]
        launches = [j for j, launch in enumerate(run) if launch.kind == kind]
        pairs = align(
            [predicted_us[i] for i in places],
            [measured_us[j] * pace for j in launches],
            lambda i, j, p=places, x=launches: _fits(wanted[p[i]].bucket, run[x[j]]),  # type: ignore[misc]
        )
        yield from ((places[i], run[launches[j]]) for i, j in pairs)


def _from_the_first(times: Sequence[float]) -> list[float]:
    first = min(times, default=0.0)
    return [us - first for us in times]


def _fits(bucket: BucketReport, launch: Launch) -> bool:
    # A launch may be larger than its bucket, since padded shards are sent with their padding.
    return launch.nbytes is None or bucket.nbytes <= launch.nbytes <= 1.1 * bucket.nbytes + 4096


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
