"""What each variant would take in a cell: the same step, cluster, cost model and simulator."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fsdp2_model import Recording
from torch.fx import GraphModule

from inductor_passes.adapters.roofline import nodes_of
from inductor_passes.ir.program import Program
from inductor_passes.machine.cluster import Cluster, ClusterCost
from inductor_passes.machine.simulate import simulate
from simplefsdp.inspection.plans import settings_of
from simplefsdp.inspection.torch_passes import (
    predict_as_it_is,
    torch_auto,
    torch_manual,
    units_of,
)
from simplefsdp.simulation.prediction import StepPrediction, predict_step
from simplefsdp.simulation.trace import TracedStep

VARIANTS = ("none", "manual", "greedy", "auto", "torch_manual", "torch_auto", "fsdp2")


@dataclass(frozen=True)
class Outcome:
    """What a variant takes per step, on one rank.

    Attributes:
        step_us: forward, backward and optimizer.
        exposed_us: of it, that the compute lane stands still.
        peak_by_use: bytes at the peak, by what they are for.
        collectives: launches of gathers, reduces and all-reduces, by kind.
        plan_s: CPU seconds that the passes took here.
    """

    step_us: float
    exposed_us: float
    peak_by_use: dict[str, int]
    collectives: dict[str, int]
    plan_s: float

    @property
    def peak_nbytes(self) -> int:
        """Most bytes on a rank."""
        return sum(self.peak_by_use.values())


@dataclass
class Traced:
    """A cell's step, and what is known of it before a cluster is named.

    Attributes:
        step: the traced graphs.
        parameters_nbytes: of the fp32 shards of a rank.
        record: makes the model of FSDP2, when it is first asked for.
    """

    step: TracedStep
    parameters_nbytes: int
    record: Callable[[], Recording]

    @functools.cached_property
    def recording(self) -> Recording:
        """The step of FSDP2."""
        return self.record()

    @functools.cached_property
    def by_torch_manual(self) -> tuple[tuple[GraphModule, GraphModule], float]:
        """Forward and backward after torch's manual pass, and the seconds it took."""
        begin = time.process_time()
        units = units_of(self.step.fqns)
        made = torch_manual(self.step.forward, units), torch_manual(self.step.backward, units)
        return made, time.process_time() - begin


def outcomes(
    traced: Traced, cluster: Cluster, variants: tuple[str, ...]
) -> Iterator[tuple[str, Outcome | str]]:
    """Each variant and its outcome, or in words why it has none; ``bound`` first, in any case.

    The bound is an outcome without exposed time and memory.
    """
    base = predict_step(traced.step, None, cluster, traced.parameters_nbytes)
    yield "bound", Outcome(base.lower_bound_us, 0.0, {}, {}, 0.0)
    for name in variants:
        outcome = _attempt(name, traced, cluster, base)
        yield name, outcome
        if name == "auto" and isinstance(outcome, Outcome) and _wants_room(outcome, cluster, base):
            yield "auto_room", _attempt("auto_room", traced, cluster, base)


def _wants_room(auto: Outcome, cluster: Cluster, base: StepPrediction) -> bool:
    """Whether manual's memory, auto's budget, is more than there is, or binds."""
    too_much = auto.peak_nbytes > cluster.memory_gb * 1e9
    return too_much or auto.step_us > 1.03 * base.lower_bound_us


def _attempt(name: str, traced: Traced, cluster: Cluster, base: StepPrediction) -> Outcome | str:
    try:
        return _price(name, traced, cluster, base)
    except Exception as error:  # theirs or ours: the table says so, and the others go on
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _price(name: str, traced: Traced, cluster: Cluster, base: StepPrediction) -> Outcome:
    if name == "none":
        return base_outcome(base)
    if name == "fsdp2":
        return _fsdp2(traced, cluster, base)
    if name == "torch_manual":
        graphs, seconds = traced.by_torch_manual
        return _of_graphs(graphs, cluster, base, seconds)
    if name == "torch_auto":
        begin = time.process_time()
        forward, backward = (
            torch_auto(gm, found.before, found.cost)
            for gm, found in zip(traced.step[:2], base.graphs, strict=True)
        )
        return _of_graphs((forward, backward), cluster, base, time.process_time() - begin)
    roomy = name == "auto_room"
    budget = _room(traced, cluster) if roomy else None
    settings = settings_of("auto" if roomy else name, traced.step.fqns, cluster, budget)
    return base_outcome(predict_step(traced.step, settings, cluster, traced.parameters_nbytes))


def _room(traced: Traced, cluster: Cluster) -> int:
    """Bytes of all of a device beside the shards of parameters and of AdamW's two moments.

    Raises:
        ValueError: there are none.
    """
    room = int(cluster.memory_gb * 1e9) - 3 * traced.parameters_nbytes
    if room <= 0:
        raise ValueError(f"shards and optimizer state alone take {-room / 1e9:.0f} GB too much")
    return room


def base_outcome(found: StepPrediction) -> Outcome:
    """The outcome that a prediction is."""
    counts = _counts([graph.after for graph in found.graphs])
    seconds = sum(graph.pass_seconds for graph in found.graphs)
    return Outcome(found.step_us, found.exposed_us, found.peak_by_use(), counts, seconds)


def _of_graphs(
    graphs: tuple[GraphModule, GraphModule], cluster: Cluster, base: StepPrediction, seconds: float
) -> Outcome:
    """What torch's passes made of the graphs; each in the order it is in."""
    found = tuple(
        predict_as_it_is(gm, cluster, was, 0.0) for gm, was in zip(graphs, base.graphs, strict=True)
    )
    return replace(base_outcome(replace(base, graphs=found)), plan_s=seconds)


def _fsdp2(traced: Traced, cluster: Cluster, base: StepPrediction) -> Outcome:
    recording = traced.recording
    program = recording.executed
    cost = ClusterCost(cluster, nodes_of(program, cluster.ranks_per_node), recording.work)
    timeline = simulate(program, cost)
    at_rest = {
        "parameter shards": base.parameters_nbytes,
        "optimizer state": base.optimizer_nbytes,
    }
    return Outcome(
        timeline.total_us + base.optimizer_us,
        timeline.stalled_us,
        at_rest | recording.live_by_use(),
        _counts([program]),
        0.0,
    )


def _counts(programs: list[Program]) -> dict[str, int]:
    counts = dict.fromkeys(("gather", "reduce", "all_reduce"), 0)
    for program in programs:
        for _, op in program.starts():
            if op.sends in counts:
                counts[op.sends] += 1
    return counts
