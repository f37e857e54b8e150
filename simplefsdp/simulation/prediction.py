"""Predicts the time and memory of a training step on a cluster, after our passes.

Nothing is measured and nothing runs. A traced step (:mod:`simplefsdp.simulation.trace`) is bucketed
and ordered as the compiler would do it, and simulated with the cluster's known speeds.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch.fx import Graph

from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.ir.program import Program
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cluster import Cluster, ClusterCost, Work
from inductor_passes.machine.simulate import Memory, Timeline, live_by_use, memory, simulate
from inductor_passes.passes import rehearse
from inductor_passes.rehearsal import Rehearsal, Settings, arranged
from inductor_passes.transform.portable import in_program
from simplefsdp.provenance import carried_fqn, gathered_fqn
from simplefsdp.simulation.trace import TracedStep

_ADAMW_NBYTES = 4 * 7
"""Memory traffic of fused AdamW per fp32 parameter: parameter, gradient and two moments are read,
all but the gradient written."""


@dataclass(frozen=True)
class GraphPrediction:
    """The prediction of one graph."""

    name: str  # "forward" or "backward"
    before: Program  # as traced, without the buffers that Inductor fuses away
    after: Program  # with its collectives in buckets and reordered
    cost: ClusterCost
    timeline: Timeline  # of ``after``
    memory: Memory  # of ``after``; its resident bytes are the parameter shards that it gathers
    lower_bound_us: float  # a time that no choice of buckets and launches for ``before`` can beat
    pass_seconds: float  # CPU seconds that reading, planning and ordering took here
    budget_nbytes: int | None = None  # of an automatic plan, in bytes of ``rank_invariant``

    @property
    def exposed_us(self) -> float:
        """Time during which the compute lane waits for collectives."""
        return self.timeline.stalled_us

    @property
    def beside_shards_nbytes(self) -> int:
        """Peak of the live bytes, parameter shards not counted."""
        return self.memory.peak_nbytes - self.memory.resident_nbytes


@dataclass(frozen=True)
class StepPrediction:
    """The prediction of a training step: its graphs and the optimizer, one after the other."""

    graphs: tuple[GraphPrediction, ...]  # forward and backward, or whichever graphs were compiled
    optimizer_us: float  # of AdamW, fused, on the shards; 0 if it is left out
    parameters_nbytes: int  # of this rank's shards
    optimizer_nbytes: int  # AdamW's two moments; 0 if it is left out

    @property
    def step_us(self) -> float:
        return sum(graph.timeline.total_us for graph in self.graphs) + self.optimizer_us

    @property
    def exposed_us(self) -> float:
        return sum(graph.exposed_us for graph in self.graphs)

    @property
    def lower_bound_us(self) -> float:
        """A time that no plans for the graphs can beat."""
        return sum(graph.lower_bound_us for graph in self.graphs) + self.optimizer_us

    @property
    def peak_graph(self) -> GraphPrediction:
        """The graph with the highest memory peak."""
        return max(self.graphs, key=lambda graph: graph.beside_shards_nbytes)

    @property
    def peak_nbytes(self) -> int:
        return sum(self.peak_by_use().values())

    def peak_by_use(self) -> dict[str, int]:
        """Bytes on this rank at the peak, by what they are for."""
        at_rest = {"parameter shards": self.parameters_nbytes}
        if self.optimizer_nbytes:
            at_rest["optimizer state"] = self.optimizer_nbytes
        return at_rest | live_by_use(self.peak_graph.after)

    def tokens_per_second(self, tokens: float) -> float:
        """Tokens per second of a rank that gets ``tokens`` per step."""
        return tokens / (self.step_us / 1e6)


def predict_step(
    step: TracedStep, settings: Settings | None, cluster: Cluster, parameters_nbytes: int
) -> StepPrediction:
    """Predict a traced step; call this in the process group that it was traced in.
    ``parameters_nbytes`` are the bytes of a rank's fp32 shards; ``settings`` are those of our
    passes, None for no passes.

    Raises:
        ProgramError, ValueError: as for :func:`inductor_passes.passes.rehearse`.
    """
    shards = shards_of(step.forward.graph)
    graphs = []
    for name, gm in (("forward", step.forward), ("backward", step.backward)):
        begin = time.process_time()
        rehearsal = rehearse(gm, settings, carried_fqn)
        seconds = time.process_time() - begin
        graphs.append(predict_rehearsed(name, rehearsal, settings, cluster, seconds, shards))
    us = optimizer_us(cluster, parameters_nbytes)
    return StepPrediction(tuple(graphs), us, parameters_nbytes, 2 * parameters_nbytes)


def optimizer_us(cluster: Cluster, parameters_nbytes: float) -> float:
    """Time of fused AdamW on fp32 shards of ``parameters_nbytes`` bytes."""
    return cluster.compute_us(Work(nbytes=parameters_nbytes // 4 * _ADAMW_NBYTES))


def shards_of(forward: Graph) -> set[str]:
    """Names of the forward's inputs that are parameters: those that are gathered, and those that
    are marked as such but only read, because every rank has the whole parameter.

    The backward graph has them under the same names.
    """
    chains = (node for node in forward.nodes if gathered_fqn(node) is not None)
    return {n.name for node in chains for n in node.all_input_nodes if n.op == "placeholder"}


def predict_rehearsed(
    name: str,
    rehearsal: Rehearsal,
    settings: Settings | None,
    cluster: Cluster,
    pass_seconds: float,
    shards: Collection[str] = (),
) -> GraphPrediction:
    """Predict a graph that was planned already. ``shards`` are the names of inputs that are
    parameters, whether or not this graph gathers them."""
    before = fused_program(rehearsal.reading)
    before = replace(before, resident=before.resident | set(before.inputs).intersection(shards))
    cost = cost_of(rehearsal.reading, cluster)
    after = arranged(before, in_program(before, rehearsal.planned), settings)
    budget_nbytes = rehearsal.plan.budget_nbytes if rehearsal.plan is not None else None
    return predict_program(name, before, after, cost, pass_seconds, budget_nbytes or None)


def predict_program(
    name: str,
    before: Program,
    after: Program,
    cost: ClusterCost,
    pass_seconds: float,
    budget_nbytes: int | None = None,
) -> GraphPrediction:
    """Predict a program ``after`` that any passes have made of ``before``."""
    return GraphPrediction(
        name,
        before,
        after,
        cost,
        simulate(after, cost),
        memory(after),
        # A bound for any layout of buckets, since torch's passes, with which ours are compared,
        # send flat buckets.
        lower_bound_us(before, cost.with_flat_buckets()),
        pass_seconds,
        budget_nbytes,
    )
