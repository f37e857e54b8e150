"""The report as JSON. The keys are stable: new ones may come, none goes or changes its meaning.

Times are in microseconds (``_us``), except ``pass_seconds``; sizes are in bytes.

- top: ``version`` (1), ``simplefsdp``, ``subject``, ``ranks``, ``cluster``, ``plans``: a list, the
  inspected plan first, then those that it is compared with.
- plan: ``name, step_us, step_lower_bound_us, exposed_us, optimizer_us, peak_bytes, peak_by_kind,
  tokens_per_second_per_rank`` and ``mfu`` (null where there are no tokens, or no matmuls),
  ``model_flops`` (operations that ``mfu`` counts, per step and rank) and ``model_flops_are`` (how
  they are counted, in words: from the configuration, :func:`simplefsdp.models.flops_per_token`, as
  in the trainer and the benchmarks; for ``--target``, three times those of the traced forward), and
  ``graphs``, a list: forward, backward.
- graph: ``name, nodes, collectives`` (number before the passes), ``collectives_by_kind, buckets``
  (a list), ``bytes`` (sent in all), ``compute_us`` (if nothing were in transfer), ``slowed_us`` (by
  which transfers slow compute down), ``wire_us, exposed_us, exposed_by_reason, total_us,
  lower_bound_us, peak_bytes`` (parameter shards included), ``peak_op, peak_by_kind,
  peak_by_module, memory`` (a list of ``[us, bytes]``), ``pass_seconds, ranges`` (for which sizes
  the plan holds, in words: one entry per open size).
- bucket: ``name, label, kind, parameters`` (all FQNs), ``collectives`` (merged in it), ``bytes,
  dtype, group, ranks, window, launch_us, launched_at, begin_us, end_us, duration_us, needed_us,
  needed_at, hidden_us, hidden_by, exposed_us, reason`` (one of ``first use, memory budget, prefetch
  limit, dependency, wire-bound``; null if nothing is exposed), ``exposed_by_reason, why``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simplefsdp.compiler.size_limits import describe_range
from simplefsdp.inspection.report import BucketReport, GraphReport, PlanReport
from simplefsdp.version import __version__


def document(
    plans: Sequence[PlanReport], *, subject: str, ranks: int, cluster: str
) -> dict[str, Any]:
    """The whole report, in plain JSON values."""
    return {
        "version": 1,
        "simplefsdp": __version__,
        "subject": subject,
        "ranks": ranks,
        "cluster": cluster,
        "plans": [plan_document(plan) for plan in plans],
    }


def plan_document(plan: PlanReport) -> dict[str, Any]:
    step = plan.step
    return {
        "name": plan.name,
        "step_us": step.step_us,
        "step_lower_bound_us": step.lower_bound_us,
        "exposed_us": step.exposed_us,
        "optimizer_us": step.optimizer_us,
        "peak_bytes": step.peak_nbytes,
        "peak_by_kind": step.peak_by_use(),
        "tokens_per_second_per_rank": plan.tokens_per_second_per_rank,
        "mfu": plan.mfu,
        "model_flops": plan.flops,
        "model_flops_are": plan.flops_are,
        "graphs": [graph_document(graph) for graph in plan.graphs.values()],
    }


def graph_document(graph: GraphReport) -> dict[str, Any]:
    prediction, memory = graph.prediction, graph.memory
    timeline = prediction.timeline
    return {
        "name": graph.name,
        "nodes": len(prediction.before.ops),
        "collectives": sum(graph.collectives.values()),
        "collectives_by_kind": dict(graph.collectives),
        "buckets": [bucket_document(bucket) for bucket in graph.buckets],
        "bytes": sum(bucket.nbytes for bucket in graph.buckets),
        "compute_us": timeline.compute_us,
        "slowed_us": timeline.slowed_us,
        "wire_us": timeline.wire_us,
        "exposed_us": prediction.exposed_us,
        "exposed_by_reason": graph.exposed_by_reason(),
        "total_us": timeline.total_us,
        "lower_bound_us": prediction.lower_bound_us,
        "peak_bytes": prediction.memory.peak_nbytes,
        "peak_op": memory.peak_op,
        "peak_by_kind": dict(memory.by_kind),
        "peak_by_module": dict(memory.by_module),
        "memory": [list(point) for point in memory.curve],
        "pass_seconds": prediction.pass_seconds,
        "ranges": [describe_range(found) for found in graph.ranges],
    }


def bucket_document(bucket: BucketReport) -> dict[str, Any]:
    exposure = bucket.exposure
    return {
        "name": bucket.name,
        "label": bucket.label,
        "kind": bucket.kind,
        "parameters": list(bucket.fqns),
        "collectives": bucket.members,
        "bytes": bucket.nbytes,
        "dtype": bucket.dtype,
        "group": bucket.group,
        "ranks": bucket.ranks,
        "window": bucket.window,
        "launch_us": exposure.launch_us,
        "launched_at": bucket.launched_at,
        "begin_us": exposure.begin_us,
        "end_us": exposure.end_us,
        "duration_us": exposure.duration_us,
        "needed_us": exposure.needed_us,
        "needed_at": bucket.needed_at,
        "hidden_us": bucket.hidden_us,
        "hidden_by": list(bucket.hidden_by),
        "exposed_us": exposure.exposed_us,
        "reason": exposure.reason or None,
        "exposed_by_reason": dict(exposure.shares),
        "why": exposure.why,
    }
