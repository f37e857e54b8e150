"""The report of a plan: per graph its buckets and memory, and the step as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.ir.program import Op, Program
from inductor_passes.machine.cluster import ClusterCost
from inductor_passes.machine.simulate import Span
from inductor_passes.size_range import SizeRange
from simplefsdp.inspection.explain import Exposure, Limits, explain
from simplefsdp.inspection.lanes import Lane, arrivals, lanes_of
from simplefsdp.inspection.memory import MemoryReport, memory_report
from simplefsdp.inspection.names import block_of, shorten_fqns
from simplefsdp.simulation.prediction import GraphPrediction, StepPrediction

BY_CONFIG = "6 per parameter and token, and attention without its mask (PaLM, appendix B)"
BY_TRACE = "three times those of the forward's matmuls, as traced"
KINDS = ("gather", "reduce", "all_reduce", "other")


@dataclass(frozen=True)
class BucketReport:
    """A collective as it is launched.

    Attributes:
        name: of its start op.
        label: what the planner calls it.
        kind, nbytes, dtype, group, ranks, fqns, window: see
            :class:`inductor_passes.ir.program.Collective`.
        members: how many collectives were merged.
        exposure: when it runs, what is exposed, and why.
        launched_at: the first compute after its start, with its module.
        needed_at: the first compute after its wait, likewise.
        hidden_by: modules that compute meanwhile, the longest first.
        hidden_us: how long they do.
    """

    name: str
    label: str
    kind: str
    nbytes: int
    dtype: str
    group: str
    ranks: int
    fqns: tuple[str, ...]
    window: int
    members: int
    exposure: Exposure
    launched_at: str
    needed_at: str
    hidden_by: tuple[str, ...]
    hidden_us: float

    @property
    def parameters(self) -> str:
        """The parameters in a few words."""
        return shorten_fqns(self.fqns)


@dataclass(frozen=True)
class GraphReport:
    """A forward or backward graph.

    Attributes:
        prediction: what it is about.
        collectives: number before, by kind.
        buckets: in the order in which they are launched.
        memory: over time, and at the peak.
        module_of: module by op name, as far as it is known.
        ranges: where its plan holds, of each size that was left open.
    """

    prediction: GraphPrediction
    collectives: Mapping[str, int]
    buckets: tuple[BucketReport, ...]
    memory: MemoryReport
    module_of: Mapping[str, str] = field(repr=False)
    ranges: tuple[SizeRange, ...] = ()

    @property
    def name(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return self.prediction.name

    @property
    def bucket_counts(self) -> dict[str, int]:
        """Number of buckets by kind."""
        found = Counter(bucket.kind for bucket in self.buckets)
        return {kind: found.get(kind, 0) for kind in KINDS}

    def exposed_by_reason(self) -> dict[str, float]:
        """Exposed time of the graph by cause, us; adds up to all of it."""
        found: Counter[str] = Counter()
        for bucket in self.buckets:
            found.update({str(cause): us for cause, us in bucket.exposure.shares.items()})
        return dict(found.most_common())


@dataclass(frozen=True)
class PlanReport:
    """A step under one choice of passes.

    Attributes:
        name: of the choice, as ``--bucketing`` has it.
        step: what is predicted.
        graphs: by name.
        tokens: that a rank gets per step; None if the input is no tokens.
        flops: that the model needs per step on a rank.
        flops_are: ``BY_CONFIG``, ``BY_TRACE``, or empty if nobody counted.
        peak_tflops: of the device, in the dtype that most of the traced ones are in.
    """

    name: str
    step: StepPrediction
    graphs: Mapping[str, GraphReport]
    tokens: float | None
    flops: float = 0.0
    flops_are: str = ""
    peak_tflops: float = 0.0

    @property
    def tokens_per_second_per_rank(self) -> float | None:
        """Tokens that a rank gets through."""
        return self.step.tokens_per_second(self.tokens) if self.tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation; None for a model without matmuls."""
        return self.step.mfu(self.flops, self.peak_tflops) if self.peak_tflops else None


def report_plan(
    name: str,
    step: StepPrediction,
    limits: Mapping[str, Limits],
    module_of: Mapping[str, Mapping[str, str]],
    tokens: float | None = None,
    flops: float | None = None,
) -> PlanReport:
    """Report on a predicted step; ``limits`` and ``module_of`` are by graph.

    ``flops`` are those of :func:`simplefsdp.models.flops_per_token`; None for a model of which
    nobody knows the configuration: they are counted in the traced forward.
    """
    graphs = {
        graph.name: report_graph(
            graph, limits.get(graph.name, Limits()), module_of.get(graph.name, {})
        )
        for graph in step.graphs
    }
    traced, peak = traced_flops(step.graphs[0].cost)
    if flops is None:
        return PlanReport(name, step, graphs, tokens, traced, BY_TRACE, peak)
    return PlanReport(name, step, graphs, tokens, flops, BY_CONFIG, peak)


def report_graph(
    prediction: GraphPrediction,
    limits: Limits,
    module_of: Mapping[str, str],
    ranges: tuple[SizeRange, ...] = (),
) -> GraphReport:
    """Report on a graph."""
    program, timeline = prediction.after, prediction.timeline
    compute = lanes_of(timeline)["compute"]
    exposures = explain(program, timeline, limits)
    places = _Places(program, module_of)
    buckets = [_bucket(op, i, exposures[op.name], compute, places) for i, op in program.starts()]
    starts = prediction.before.starts()
    before = Counter[str](op.sends for _, op in starts)
    return GraphReport(
        prediction,
        {kind: before[kind] for kind in KINDS},
        tuple(buckets),
        memory_report(program, prediction.memory, arrivals(program, timeline), module_of),
        module_of,
        ranges,
    )


def _bucket(op: Op, i: int, exposure: Exposure, compute: Lane, places: _Places) -> BucketReport:
    c = op.collective
    assert c is not None
    hiding = compute.overlapping(exposure.begin_us, exposure.end_us)
    modules = places.modules_by_time(hiding, exposure)
    return BucketReport(
        op.name,
        c.bucket,
        c.kind,
        c.nbytes,
        c.dtype,
        c.group,
        c.ranks,
        c.fqns,
        c.window,
        len(op.reads),
        exposure,
        places.compute_after(i),
        places.compute_after(min(places.program.waits_of[i])),
        tuple(modules),
        compute.busy_us(exposure.begin_us, exposure.end_us),
    )


class _Places:
    """Where ops are, in words."""

    def __init__(self, program: Program, module_of: Mapping[str, str]) -> None:
        self.program, self.module_of = program, module_of
        self._next: list[str] = []
        following = ""
        for op in reversed(program.ops):
            self._next.append(following)
            following = op.name if op.kind == "compute" else following
        self._next.reverse()

    def compute_after(self, i: int) -> str:
        """The first compute after op ``i``."""
        name = self._next[i]
        module = self.module_of.get(name)
        return f"{module} ({name})" if module else name or "the end"

    def modules_by_time(self, spans: Sequence[Span], exposure: Exposure) -> dict[str, float]:
        """Blocks that compute during the transfer, and how long, the longest first."""
        found: Counter[str] = Counter()
        for span in spans:
            block = block_of(self.module_of.get(span.op, "")) or span.op
            begin, end = max(span.begin_us, exposure.begin_us), min(span.end_us, exposure.end_us)
            found[block] += end - begin  # type: ignore[assignment]
        notable = 0.01 * sum(found.values())
        return {block: us for block, us in found.most_common() if us > notable}


def traced_flops(cost: ClusterCost) -> tuple[float, float]:
    """Operations of a training step, three times those of its forward's matmuls, and the device's
    peak in the dtype of most of them. A causal mask halves those of attention."""
    by_dtype: Counter[str] = Counter()
    for work in cost.work.values():
        if work.flops:
            by_dtype[work.dtype] += work.flops  # type: ignore[assignment]
    if not by_dtype:
        return 0.0, 0.0
    dtype = by_dtype.most_common(1)[0][0]
    return 3.0 * sum(by_dtype.values()), cost.cluster.peak(dtype).tflops
