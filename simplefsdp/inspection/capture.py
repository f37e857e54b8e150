"""``simplefsdp.inspect()``: a report of what is compiled while a program runs."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from inductor_passes.cluster import Cluster
from inductor_passes.cluster_file import as_cluster
from inductor_passes.presets import preset
from inductor_passes.rehearsal import Rehearsal, Settings, launches
from inductor_passes.roofline import cluster_of, device_of
from simplefsdp.inspection.document import document
from simplefsdp.inspection.modules import modules_of
from simplefsdp.inspection.plans import limits_of
from simplefsdp.inspection.report import GraphReport, PlanReport, report_graph
from simplefsdp.prediction import StepPrediction, predict_rehearsed
from simplefsdp.watch import Seen, watching

if TYPE_CHECKING:
    from simplefsdp.inspection.matching import Comparison


class RankComparison(NamedTuple):
    """Whether all ranks compiled the same plan.

    Attributes:
        same: they did.
        difference: the first difference; empty if there is none.
    """

    same: bool
    difference: str

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        return self.difference or "all ranks compiled the same plan"


class Report:
    """What was compiled inside ``with simplefsdp.inspect() as report``.

    Attributes:
        graphs: ``"forward"`` and ``"backward"``; later ones are numbered, ``"forward 2"``.
    """

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._names: list[tuple[str, str]] = []
        self._launches: dict[str, list[str]] = {}
        self.graphs: dict[str, GraphReport] = {}

    def add(self, seen: Seen) -> None:
        """Take in a graph; the backend calls this."""
        rehearsal = seen.rehearsal
        cluster = self._cluster or _cluster_for(rehearsal, seen.settings)
        n = 1 + sum(name.split()[0] == seen.part for name in self.graphs)
        name = seen.part if n == 1 else f"{seen.part} {n}"
        self._launches[name] = launches(rehearsal)
        prediction = predict_rehearsed(name, rehearsal, seen.settings, cluster, seen.pass_seconds)
        self._names.append((_plan_name(seen.settings), cluster.name))
        self.graphs[name] = report_graph(
            prediction, limits_of(prediction, seen.settings), self._modules(seen, rehearsal)
        )

    def _modules(self, seen: Seen, rehearsal: Rehearsal) -> Mapping[str, str]:
        graph = next(iter(rehearsal.reading.nodes.values()))[0].graph
        fqns = [fqn for _, op in rehearsal.reading.program.starts() if op.collective
                for fqn in op.collective.fqns]  # fmt: skip
        found = modules_of(graph, fqns)
        forward = self.graphs.get("forward")
        if seen.part == "backward" and forward is not None:
            # What backward gets from forward has the name that it has there.
            inputs = rehearsal.reading.program.inputs
            made = {name: forward.module_of[name] for name in inputs if name in forward.module_of}
            return made | found
        return found

    def plan(self) -> PlanReport:
        """The graphs as one plan.

        Raises:
            ValueError: nothing was compiled.
        """
        if not self.graphs:
            raise ValueError(_NOTHING)
        names = dict.fromkeys(name for name, _ in self._names)
        graphs = tuple(graph.prediction for graph in self.graphs.values())
        shards_nbytes = max(graph.memory.resident_nbytes for graph in graphs)
        step = StepPrediction(graphs, 0.0, shards_nbytes, 0)  # without an optimizer
        return PlanReport(" and ".join(names), step, self.graphs, None, 0.0, 0.0)

    def __str__(self) -> str:
        """Tables, on rank 0; nothing on others."""
        from rich.console import Console

        from simplefsdp.inspection.tables import WIDTH, print_plans

        if _rank() != 0:
            return ""
        if not self.graphs:
            return _NOTHING
        out = Console(file=io.StringIO(), width=WIDTH, highlight=False)
        print_plans(out, [self.plan()], self._heading())
        assert isinstance(out.file, io.StringIO)
        return out.file.getvalue().rstrip()

    def _heading(self) -> str:
        clusters = " and ".join(dict.fromkeys(cluster for _, cluster in self._names))
        return f"compiled on {_ranks()} ranks, as predicted for {clusters}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the keys are those of :mod:`simplefsdp.inspection.document`.

        Raises:
            ValueError: nothing was compiled.
        """
        plan = self.plan()
        return document([plan], subject="compiled", ranks=_ranks(), cluster=self._names[0][1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, on rank 0: a page (``.html``), JSON (``.json``) or a Perfetto trace
        (``.perfetto.json``).

        Raises:
            ValueError: another suffix, or nothing was compiled.
            OSError: the file cannot be written.
        """
        name = os.fspath(path)
        if not name.endswith((".html", ".json")):
            raise ValueError(f"{name}: expected a name that ends in .html, .perfetto.json or .json")
        plan = self.plan()
        if _rank() != 0:
            return
        Path(name).write_text(_written(name, plan, self))

    def measure(self, step_fn: Callable[[], object], steps: int = 5) -> Comparison:
        """Profile real steps, and lay what they sent beside what was predicted.

        Every rank must call this, as ``step_fn`` communicates.

        Args:
            step_fn: a step that runs the graphs that were captured, each once and in their order.
            steps: to measure, after one that is not counted.

        Raises:
            ValueError: fewer than one step, nothing was compiled, or nothing communicates.
        """
        from simplefsdp.inspection.matching import measure_steps

        return measure_steps(list(self.graphs.values()), step_fn, steps)

    def compare_ranks(self) -> RankComparison:
        """Whether all ranks compiled the same plan. Every rank must call this."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return RankComparison(True, "")
        mine = [(name, line) for name, lines in self._launches.items() for line in lines]
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, mine)
        return compare(theirs)


_NOTHING = (
    'nothing was compiled: only what torch.compile(..., backend="simplefsdp") compiles inside '
    "`with simplefsdp.inspect()` is seen; enter it before the first step, or call "
    "torch.compiler.reset() first"
)


def _written(name: str, plan: PlanReport, report: Report) -> str:
    if name.endswith(".perfetto.json"):
        from simplefsdp.inspection.perfetto import trace_events

        return json.dumps(trace_events([plan]))
    if name.endswith(".json"):
        return json.dumps(report.to_json(), indent=1) + "\n"
    from simplefsdp.inspection.page import page

    return page([plan], report._heading())


def compare(launched: Sequence[Sequence[tuple[str, str]]]) -> RankComparison:
    """Compare (graph, launch) of all ranks with those of rank 0."""
    first = launched[0]
    for rank, theirs in enumerate(launched[1:], 1):
        for i in range(max(len(first), len(theirs))):
            a = first[i] if i < len(first) else None
            b = theirs[i] if i < len(theirs) else None
            if a != b:
                return RankComparison(
                    False,
                    f"rank {rank} compiled another plan than rank 0, from launch {i} on: rank 0 "
                    f"has {_told(a)}, rank {rank} has {_told(b)}",
                )
    return RankComparison(True, "")


def _told(launch: tuple[str, str] | None) -> str:
    return f"{launch[1]} in {launch[0]}" if launch is not None else "no more"


@contextmanager
def capture(cluster: Cluster | str | os.PathLike[str] | None) -> Iterator[Report]:
    """See :func:`simplefsdp.watch.inspect`."""
    report = Report(None if cluster is None else as_cluster(cluster))
    with watching(report.add):
        yield report


def _cluster_for(rehearsal: Rehearsal, settings: Settings | None) -> Cluster:
    if settings is not None and settings.auto is not None:
        return settings.auto.cluster
    try:
        return cluster_of(device_of(rehearsal.reading))
    except ValueError:
        return preset("h100")


def _plan_name(settings: Settings | None) -> str:
    if settings is None:
        return "none"
    if settings.auto is not None:
        return "greedy" if settings.auto.planner == "greedy" else "auto"
    return "manual" if settings.merge else "none, reordered"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
