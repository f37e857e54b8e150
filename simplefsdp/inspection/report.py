"""The report on a plan: the buckets and the memory of each graph, and the step as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inductor_passes.ir.program import COLLECTIVE_KINDS, Program
from inductor_passes.machine.cluster import ClusterCost
from inductor_passes.size_range import SizeRange
from simplefsdp.inspection.explain import Exposure, Limits, explain
from simplefsdp.inspection.lanes import Lane, arrivals, lanes_of
from simplefsdp.inspection.memory import MemoryReport, memory_report
from simplefsdp.inspection.names import block_of, shorten_fqns
from simplefsdp.simulation.prediction import GraphPrediction, StepPrediction

BY_CONFIG = "6 per parameter and token, and attention without its mask (PaLM, appendix B)"
BY_TRACE = "three times those of the forward's matmuls, as traced"


@dataclass(frozen=True)
class BucketReport:
    """A collective as it is launched; see :class:`inductor_passes.ir.program.Collective`."""

    name: str  # name of its start op
    label: str  # the planner's name for it
    kind: str
    nbytes: int
    dtype: str
    group: str
    ranks: int
    fqns: tuple[str, ...]
    window: int
    members: int  # how many collectives were merged
    exposure: Exposure  # when it runs, what is exposed, and why
    launched_at: str  # the first compute op after its start, with its module
    needed_at: str  # the first compute op after its wait, with its module
    hidden_by: tuple[str, ...]  # blocks that compute during its transfer, the longest first
    hidden_us: float  # time of compute during its transfer

    @property
    def parameters(self) -> str:
        """Its parameters in a few words, or its name if it carries none."""
        return shorten_fqns(self.fqns) or self.name


@dataclass(frozen=True)
class GraphReport:
    """A forward or backward graph."""

    prediction: GraphPrediction  # the prediction that it explains
    collectives: Mapping[str, int]  # number of collectives before the passes, by kind
    buckets: tuple[BucketReport, ...]  # in the order in which they are launched
    memory: MemoryReport  # over time, and at the peak
    module_of: Mapping[str, str] = field(repr=False)  # by op name, where the module is known
    ranges: tuple[SizeRange, ...] = ()  # for which values of each open size its plan holds

    @property
    def name(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return self.prediction.name

    def exposed_by_reason(self) -> dict[str, float]:
        """Exposed time of the graph by cause, in us; the sum is all that is exposed."""
        found: Counter[str] = Counter()
        for bucket in self.buckets:
            found.update({str(cause): us for cause, us in bucket.exposure.shares.items()})
        return dict(found.most_common())


@dataclass(frozen=True)
class PlanReport:
    """The report on a step under one plan."""

    name: str  # of the plan, as for ``--bucketing``
    step: StepPrediction
    graphs: Mapping[str, GraphReport]  # by name
    tokens: float | None  # tokens of a rank per step; None if the input is no tokens
    flops: float = 0.0  # operations that the model needs per step on a rank
    flops_are: str = ""  # how they are counted: ``BY_CONFIG``, ``BY_TRACE``, or empty if not at all
    peak_tflops: float = 0.0  # of the device, in the dtype of most traced operations

    @property
    def tokens_per_second_per_rank(self) -> float | None:
        return self.step.tokens_per_second(self.tokens) if self.tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the operations that the model needs, divided by those that the
        device could do in the time of the step; None for a model without matmuls."""
        could = self.step.step_us * self.peak_tflops * 1e6
        return self.flops / could if could else None


def report_graph(
    prediction: GraphPrediction,
    limits: Limits,
    module_of: Mapping[str, str],
    ranges: tuple[SizeRange, ...] = (),
) -> GraphReport:
    program, timeline = prediction.after, prediction.timeline
    compute = lanes_of(timeline)["compute"]
    exposures = explain(program, timeline, limits)
    before = Counter[str](op.sends for _, op in prediction.before.starts())
    return GraphReport(
        prediction,
        {kind: before[kind] for kind in COLLECTIVE_KINDS},
        tuple(
            _bucket(program, i, exposures[op.name], compute, module_of)
            for i, op in program.starts()
        ),
        memory_report(program, prediction.memory, arrivals(program, timeline), module_of),
        module_of,
        ranges,
    )


def _bucket(
    program: Program, i: int, exposure: Exposure, compute: Lane, module_of: Mapping[str, str]
) -> BucketReport:
    op = program.ops[i]
    c = program.sent[op.name]

    def compute_after(i: int) -> str:
        behind = (program.ops[j] for j in range(i + 1, len(program.ops)))
        name = next((op.name for op in behind if op.kind == "compute"), "")
        module = module_of.get(name)
        return f"{module} ({name})" if module else name or "the end"

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
        compute_after(i),
        compute_after(min(program.waits_of[i])),
        tuple(_hiding(compute, exposure, module_of)),
        compute.busy_us(exposure.begin_us, exposure.end_us),
    )


def _hiding(compute: Lane, exposure: Exposure, module_of: Mapping[str, str]) -> list[str]:
    """Blocks that compute during a transfer, the longest first."""
    found: Counter[str] = Counter()
    for span in compute.overlapping(exposure.begin_us, exposure.end_us):
        block = block_of(module_of.get(span.op, "")) or span.op
        begin, end = max(span.begin_us, exposure.begin_us), min(span.end_us, exposure.end_us)
        found[block] += end - begin  # type: ignore[assignment]
    notable = 0.01 * sum(found.values())
    return [block for block, us in found.most_common() if us > notable]


def traced_flops(cost: ClusterCost) -> tuple[float, float]:
    """Operations of a training step, which are taken to be three times those of the forward's
    matmuls; and the device's peak TFLOP/s in the dtype of most of them. A causal mask halves the
    operations of attention."""
    by_dtype: Counter[str] = Counter()
    for work in cost.work.values():
        if work.flops:
            by_dtype[work.dtype] += work.flops  # type: ignore[assignment]
    if not by_dtype:
        return 0.0, 0.0
    dtype = by_dtype.most_common(1)[0][0]
    return 3.0 * sum(by_dtype.values()), cost.cluster.peak(dtype).tflops
