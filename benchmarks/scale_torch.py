"""PyTorch's own bucketing passes on a traced graph, priced as ours are.

Each runs on a copy of the same traced graph; what it makes is read back, and its ops and
collectives are counted by the same rules. Its copies into and out of flat buckets are ops of the
graph and are counted; ours send the members of a bucket as they are. Three things are replaced,
none of which changes what a pass decides from its figures:

- What they would measure on a GPU, or look up of it, is what our cost model says: collectives by
  the cluster's links, other ops by its roofline, fused as Inductor would fuse them.
- The size of the automatic pass's pre-buckets is that at which a gather reaches 90 % of its link's
  bandwidth, the pass's own rule, with our link instead of its table, within its own bounds.
- No order is pinned by control dependencies (``insert_overlap_deps``), which serve the lowering
  that follows: the order of the graph that a pass leaves is what is simulated.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

from torch.fx import GraphModule, Node
from torch_passes import module_stack

from inductor_passes import fx
from inductor_passes.cluster import ClusterCost
from inductor_passes.program import Program
from inductor_passes.rehearsal import no_garbage_collection
from simplefsdp.backend import fqn_of

_SATURATION = 0.9


@no_garbage_collection()
def torch_manual(gm: GraphModule, plan: Sequence[str | Sequence[str]]) -> GraphModule:
    """A copy of ``gm`` after ``manual_overlap_bucketing``.

    Args:
        gm: a traced graph.
        plan: module FQNs, a list for those that share a bucket.
    """
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    made = copy.deepcopy(gm)
    with _estimates(lambda node: 0.0):  # asked for, and not used
        manual_overlap_bucketing(
            made,
            module_bucket_plans=[p if isinstance(p, str) else list(p) for p in plan],
            insert_overlap_deps=False,
            module_stack_fn=module_stack,
        )
    made.graph.eliminate_dead_code()
    return made


@no_garbage_collection()
def torch_auto(gm: GraphModule, program: Program, cost: ClusterCost) -> GraphModule:
    """A copy of ``gm`` after ``schedule_overlap_bucketing``, its settings the defaults.

    Args:
        gm: a traced graph.
        program: as it was read.
        cost: of its ops.
    """
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    logging.getLogger("torch._inductor.fx_passes.fsdp").setLevel(logging.WARNING)

    def estimate_ms(node: Node, override_nbytes: int | None = None) -> float | None:
        if node.target in fx.KIND_OF:
            sent = fx.collective_of(node, fqn_of)
            if override_nbytes is not None:
                sent = replace(sent, nbytes=override_nbytes)
            return cost.collective_us(sent) / 1e3
        work = cost.work.get(node.name)
        return None if work is None else cost.cluster.compute_us(work) / 1e3

    made = copy.deepcopy(gm)
    with _estimates(lambda node: estimate_ms(node) or 0.0):
        schedule_overlap_bucketing(
            made,
            collective_bucketing=True,
            insert_overlap_deps=False,
            custom_runtime_estimation=estimate_ms,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives_bucket_cap_mb=_saturating_mib(program, cost),
        )
    made.graph.eliminate_dead_code()
    return made


def _estimates(milliseconds: Callable[[Node], float]) -> AbstractContextManager[object]:
    """Where the passes look up what the GPU at hand would take."""
    from torch._inductor.fx_passes import overlap_scheduling

    return patch.object(
        overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds, create=True
    )


def _saturating_mib(program: Program, cost: ClusterCost) -> float:
    """MiB from which a gather moves at 90 % of its link's bandwidth, within torch's bounds."""
    from torch._inductor import config

    options = config.aten_distributed_optimizations
    least = getattr(options, "pre_bucketing_fsdp_collectives_min_bucket_cap_mb", 10.0)
    most = getattr(options, "pre_bucketing_fsdp_collectives_max_bucket_cap_mb", 500.0)
    gathers = [op.collective for _, op in program.starts() if op.collective]
    gather = next((c for c in gathers if c.kind == "gather"), None)
    if gather is None:
        return least
    huge = replace(gather, nbytes=1 << 40)
    bandwidth = huge.nbytes / cost.collective_us(huge)  # bytes per us
    mib = least
    while mib < most:
        at = replace(gather, nbytes=int(mib * 2**20))
        if at.nbytes / cost.collective_us(at) >= _SATURATION * bandwidth:
            break
        mib *= 1.1
    return min(mib, most)
