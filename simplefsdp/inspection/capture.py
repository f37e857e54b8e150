"""``simplefsdp.inspect()``: a report on the graphs that are compiled while a program runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_cluster
from inductor_passes.rehearsal import Rehearsal, Settings, assumed_cluster, launches
from simplefsdp.compiler.observers import CompiledGraph, observing
from simplefsdp.inspection.document import document
from simplefsdp.inspection.modules import modules_of
from simplefsdp.inspection.plans import limits_of
from simplefsdp.inspection.report import GraphReport, PlanReport, report_graph
from simplefsdp.simulation.prediction import StepPrediction, predict_rehearsed

if TYPE_CHECKING:
    from simplefsdp.inspection.matching import Comparison


class RankComparison(NamedTuple):
    """Whether all ranks compiled the same plan."""

    same: bool
    difference: str  # the first one; empty if there is none

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        return self.difference or "all ranks compiled the same plan"


class Report:
    """The graphs that were compiled inside ``with simplefsdp.inspect() as report``.

    A compilation comprises the graphs that one call of the model runs: a forward graph and, in
    training, its backward; several of both if there are graph breaks. It is reported as a step.
    Evaluation, another batch size or another part of the model is a compilation of its own, with
    another number.

    Attributes:
        graphs: reports on the graphs of all compilations, by name: ``"forward"`` and
            ``"backward"`` for the first Dynamo graph, ``"forward 2"`` and so on for later ones.
    """

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._numbers: dict[int, int] = {}  # numbers of Dynamo graphs, from 1 on
        # By call, its graphs: whether each is a backward, its turn among these, and its name.
        self._compilations: dict[object, list[tuple[bool, int, str]]] = {}
        self._plan_names: dict[str, str] = {}
        self._launches: dict[str, list[str]] = {}
        self.graphs: dict[str, GraphReport] = {}

    def add(self, seen: CompiledGraph) -> None:
        """Add a compiled graph; the backend calls this."""
        rehearsal = seen.rehearsal
        cluster = self._cluster or assumed_cluster(rehearsal.reading, seen.settings)[0]
        n = self._numbers.setdefault(seen.compilation, 1 + len(self._numbers))
        forward, name = (part if n == 1 else f"{part} {n}" for part in ("forward", seen.part))
        self._launches[name] = launches(rehearsal)
        prediction = predict_rehearsed(name, rehearsal, seen.settings, cluster, seen.pass_seconds)
        made = self.graphs[forward].module_of if forward in self.graphs else {}
        limits, modules = limits_of(prediction, seen.settings), _modules(rehearsal, made)
        self.graphs[name] = report_graph(prediction, limits, modules, seen.ranges)
        self._plan_names[name] = _plan_name(seen.settings)
        # Backward runs the graphs of a call in reverse order.
        turn = (False, n, name) if seen.part == "forward" else (True, -n, name)
        self._compilations.setdefault(seen.call or (seen.compilation,), []).append(turn)

    def plan(self, compilation: int | None = None) -> PlanReport:
        """The graphs of one compilation as a step, without an optimizer.

        Args:
            compilation: its number, from 1 on. None: the first one with a backward graph, or the
                first if there is none.

        Raises:
            ValueError: nothing was compiled, or there is no such compilation.
        """
        if not self.graphs:
            raise ValueError(_NOTHING)
        n = self._step() if compilation is None else compilation
        known = len(self._compilations)
        if not 1 <= n <= known:
            raise ValueError(f"there is no compilation {n}: {known} of them, from 1 on")
        turns = sorted([*self._compilations.values()][n - 1])
        graphs = {name: self.graphs[name] for *_, name in turns}
        predictions = tuple(graph.prediction for graph in graphs.values())
        resident = [prediction.memory.resident_nbytes for prediction in predictions]
        forwards = resident[: sum(not backward for backward, *_ in turns)]
        step = StepPrediction(predictions, 0.0, max(sum(forwards), *resident), 0)
        name = " and ".join(dict.fromkeys(self._plan_names[name] for name in graphs))
        name += f", {len(forwards)} graphs (graph breaks)" if len(forwards) > 1 else ""
        name += f", compilation {n}" if n != self._step() else ""
        return PlanReport(name, step, graphs, None)

    def plans(self) -> list[PlanReport]:
        """All compilations, each as a step, beginning with the one that :meth:`plan` gives.

        Raises:
            ValueError: nothing was compiled.
        """
        others = set(range(1, len(self._compilations) + 1)) - {self._step()}
        return [self.plan(), *map(self.plan, sorted(others))]

    def _step(self) -> int:
        """Number of the first compilation with a backward graph; 1 if there is none."""
        numbered = enumerate(self._compilations.values(), 1)
        trains = (n for n, turns in numbered if any(backward for backward, *_ in turns))
        return next(trains, 1)

    def __str__(self) -> str:
        """The report as tables, on rank 0; an empty text on other ranks."""
        from simplefsdp.inspection.tables import print_plans
        from simplefsdp.inspection.terminal import printed

        if _rank() != 0:
            return ""
        if not self.graphs:
            return _NOTHING
        return printed(lambda out: print_plans(out, self.plans(), self._heading()))

    def _heading(self) -> str:
        clusters = " and ".join(dict.fromkeys(self._clusters()))
        return f"compiled on {_ranks()} ranks, as predicted for {clusters}"

    def _clusters(self) -> list[str]:
        return [graph.prediction.cost.cluster.name for graph in self.graphs.values()]

    def to_json(self) -> dict[str, Any]:
        """The plans of :meth:`plans` in plain JSON values; the keys are those of
        :mod:`simplefsdp.inspection.document`.

        Raises:
            ValueError: nothing was compiled.
        """
        plans, (cluster, *_) = self.plans(), self._clusters()
        return document(plans, subject="compiled", ranks=_ranks(), cluster=cluster)

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
        plans = self.plans()
        if _rank() != 0:
            return
        if name.endswith(".perfetto.json"):
            from simplefsdp.inspection.perfetto import trace_events

            text = json.dumps(trace_events(plans))
        elif name.endswith(".json"):
            text = json.dumps(self.to_json(), indent=1) + "\n"
        else:
            from simplefsdp.inspection.page import page

            text = page(plans, self._heading())
        Path(name).write_text(text)

    def measure(self, step_fn: Callable[[], object], steps: int = 5) -> Comparison:
        """Profile real steps, and compare their transfers with the predicted buckets.

        Every rank must call this, as ``step_fn`` communicates.

        Args:
            step_fn: runs a step with the graphs of :meth:`plan`, each once and in order.
            steps: number of steps to measure, after one that is not counted.

        Raises:
            ValueError: fewer than one step, nothing was compiled, or nothing communicates.
        """
        from simplefsdp.inspection.matching import measure_steps

        return measure_steps(list(self.plan().graphs.values()), step_fn, steps)

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


def _modules(rehearsal: Rehearsal, forward: Mapping[str, str]) -> Mapping[str, str]:
    """Modules by op name. ``forward`` has those of the forward graph if this is its backward."""
    graph = next(iter(rehearsal.reading.nodes.values()))[0].graph
    fqns = [fqn for c in rehearsal.reading.program.sent.values() for fqn in c.fqns]
    return modules_of(graph, fqns, forward)


def compare(launched: Sequence[Sequence[tuple[str, str]]]) -> RankComparison:
    """Compare the (graph, launch) pairs of each rank with those of rank 0."""
    for rank, theirs in enumerate(launched[1:], 1):
        for i, (a, b) in enumerate(zip_longest(launched[0], theirs)):
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
def inspect(cluster: Cluster | str | os.PathLike[str] | None = None) -> Iterator[Report]:
    """Report on all graphs that the ``"simplefsdp"`` backend compiles inside, also if their code
    comes from a cache.

    ::

        with simplefsdp.inspect() as report:
            train_step(batch)
        print(report)  # rank 0 speaks
        report.save("report.html")

    Args:
        cluster: the cluster for which times are predicted, as in ``options["cluster"]``. None: the
            cluster of an automatic plan, else the preset for the device (an H100 if there is none).

    Raises:
        TypeError, ValueError: there is no such cluster.
    """
    report = Report(None if cluster is None else as_cluster(cluster))
    with observing(report.add):
        yield report


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
