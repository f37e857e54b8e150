"""PyTorch's own bucketing passes on a traced graph, predicted by the same cost model as ours.

Each pass runs on a copy of the same traced graph. The graph that it makes is read back, and its ops
and collectives are counted by the same rules as ours. torch copies the members of a bucket into and
out of a flat buffer; these copies are ops of the graph, and are counted. Our buckets send their
members as they are. Three inputs of the passes are replaced, none of which changes how they decide:

- Instead of measuring times on a GPU, or looking them up, the passes get those of our cost model:
  collectives by the cluster's links, other ops by its roofline, fused as Inductor would fuse them.
- The automatic pass's own rule for the size of its pre-buckets is 90 % of a gather's bandwidth. It
  gets our link's bandwidth instead of its table's, within the pass's own bounds.
- The order is not pinned by control dependencies (``insert_overlap_deps``), which only serve the
  lowering that follows: what is simulated is the order of the graph that a pass leaves.

The passes are private parts of torch; ``tests/_torch/test_torch_contract.py`` fails, and says which
part, when one has moved.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.garbage import no_garbage_collection
from inductor_passes.ir.buckets import assign_by_module
from inductor_passes.ir.program import Program
from inductor_passes.machine.cluster import Cluster, ClusterCost
from inductor_passes.machine.simulate import memory, simulate
from simplefsdp.inspection.options import PlanName, TorchPlan
from simplefsdp.provenance import carried_fqn
from simplefsdp.simulation.prediction import GraphPrediction, StepPrediction, predict_step
from simplefsdp.simulation.trace import TracedStep

_FX_PASSES = "torch._inductor.fx_passes."
_SATURATION = 0.9


class _Pass(NamedTuple):
    """A pass of torch's, and the names of the arguments with which it is called."""

    module: str
    name: str
    takes: tuple[str, ...]


_MANUAL = _Pass(
    "overlap_manual_scheduling",
    "manual_overlap_bucketing",
    ("module_bucket_plans", "insert_overlap_deps", "module_stack_fn"),
)
_AUTO = _Pass(
    "overlap_scheduling",
    "schedule_overlap_bucketing",
    (
        "collective_bucketing",
        "insert_overlap_deps",
        "custom_runtime_estimation",
        "compute_estimator",
        "pre_bucketing_fsdp_collectives_bucket_cap_mb",
    ),
)


def require(plans: Collection[PlanName]) -> None:
    """Check that this torch has the passes that ``plans`` need.

    Raises:
        ValueError: it lacks one; the message says which.
    """
    for name, which in (("torch-manual", _MANUAL), ("torch-auto", _AUTO)):
        if name in plans:
            _function(which)


def predict_torch_step(
    name: TorchPlan, step: TracedStep, cluster: Cluster, parameters_nbytes: int
) -> StepPrediction:
    """Predict a traced step under a pass of torch's; arguments as for ``predict_step``.

    Raises:
        ValueError: this torch lacks the pass or one of its arguments, or the pass fails.
    """
    base = predict_step(step, None, cluster, parameters_nbytes)
    units = units_of(step.fqns)
    found = []
    for gm, was in zip((step.forward, step.backward), base.graphs, strict=True):
        begin = time.process_time()
        if name == "torch-manual":
            made = torch_manual(gm, units)
        else:
            made = torch_auto(gm, was.before, was.cost)
        found.append(predict_as_it_is(made, cluster, was, time.process_time() - begin))
    return replace(base, graphs=tuple(found))


def predict_as_it_is(
    gm: GraphModule, cluster: Cluster, was: GraphPrediction, pass_seconds: float
) -> GraphPrediction:
    """Predict a graph that a pass has changed, in the order in which its nodes are. The pass took
    ``pass_seconds``; ``was`` is the prediction of the graph without passes."""
    reading = fx.read(gm.graph, carried_fqn)
    after, cost = fused_program(reading), cost_of(reading, cluster)
    shards = was.before.resident.intersection(after.inputs)
    after = replace(after, resident=after.resident | shards)
    return replace(
        was,
        after=after,
        cost=cost,
        timeline=simulate(after, cost),
        memory=memory(after),
        pass_seconds=pass_seconds,
    )


def units_of(fqns: Sequence[str]) -> list[list[str]]:
    """Parameter FQNs by bucket of our manual plan. For a Llama these are the buckets that
    torchtitan gives torch's manual pass: embedding, layers, final norm and head."""
    units: dict[str, list[str]] = {}
    for fqn, label in assign_by_module(list(fqns)).label_of.items():
        units.setdefault(label, []).append(fqn)
    return list(units.values())


@no_garbage_collection()
def torch_manual(gm: GraphModule, units: Sequence[Sequence[str]]) -> GraphModule:
    """A copy of a traced graph after ``manual_overlap_bucketing``; ``units`` are FQNs of parameters
    or of modules that share a bucket."""
    values = [list(unit) for unit in units], False, module_stack
    return _after(gm, _MANUAL, values, lambda node: 0.0)  # the pass asks for times, but uses none


@no_garbage_collection()
def torch_auto(gm: GraphModule, program: Program, cost: ClusterCost) -> GraphModule:
    """A copy of a traced graph after ``schedule_overlap_bucketing`` with its default settings;
    ``program`` is the graph, as it was read."""

    def estimate_ms(node: Node, override_nbytes: int | None = None) -> float | None:
        if node.target in fx.KIND_OF:
            sent = fx.collective_of(node, carried_fqn)
            if override_nbytes is not None:
                sent = replace(sent, nbytes=override_nbytes)
            return cost.collective_us(sent) / 1e3
        work = cost.work.get(node.name)
        return None if work is None else cost.cluster.compute_us(work) / 1e3

    values = True, False, estimate_ms, "analytical", _saturating_mib(program, cost)
    return _after(gm, _AUTO, values, lambda node: estimate_ms(node) or 0.0)


def module_stack(node: Node) -> list[tuple[str, type[Any]]]:
    """The module stack of a gather or reduce, which ends with its parameter's FQN; empty for other
    nodes, whose stacks torch's manual pass does not need."""
    fqn = carried_fqn(node)
    return [] if fqn is None else [("", torch.nn.Module), (fqn, torch.nn.Module)]


def _after(
    gm: GraphModule, which: _Pass, values: Sequence[Any], milliseconds: Callable[[Node], float]
) -> GraphModule:
    """A copy of ``gm`` after a pass. ``values`` are the values of its arguments; ``milliseconds``
    gives the times of ops, which the pass would otherwise look up for the GPU at hand."""
    run = _function(which)
    from torch._inductor.fx_passes import overlap_scheduling

    estimates = patch.object(
        overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds, create=True
    )
    # This module sets its own log level when it is imported, and then logs about every graph.
    importlib.import_module(_FX_PASSES + "fsdp")
    logging.getLogger(_FX_PASSES + "fsdp").setLevel(logging.WARNING)
    made = copy.deepcopy(gm)
    starts, sources = _starts(made.graph), _sources(made.graph)
    try:
        with estimates:
            run(made, **dict(zip(which.takes, values, strict=True)))
        made.graph.eliminate_dead_code()
    except Exception as error:  # for any error, all that the user can do is choose another plan
        raise ValueError(
            f"{which.name} of torch {torch.__version__} failed on this graph: "
            f"{type(error).__name__}: {error}; choose another plan"
        ) from error
    for start in _starts(made.graph) - starts:
        fx.mark(start, "", tuple(_carried(start, sources)))
    return made


def _function(which: _Pass) -> Callable[..., GraphModule]:
    """Import the function of a pass, and check its arguments."""
    try:
        function = getattr(importlib.import_module(_FX_PASSES + which.module), which.name)
    except (ImportError, AttributeError) as error:
        raise ValueError(_lacks(f"{_FX_PASSES}{which.module}.{which.name}")) from error
    unknown = [key for key in which.takes if key not in inspect.signature(function).parameters]
    if unknown:
        raise ValueError(_lacks(f"{', '.join(unknown)} of {which.name}"))
    return function


def _lacks(what: str) -> str:
    return (
        f"torch {torch.__version__} has no {what}, which this plan needs (torch 2.13 has it); "
        "choose another plan"
    )


def _starts(graph: Graph) -> set[Node]:
    """The launches of data-parallel collectives: those that carry a parameter."""
    return {n for n in graph.nodes if n.target in fx.KIND_OF and carried_fqn(n)}


def _sources(graph: Graph) -> dict[Node, str]:
    """FQNs by the node that is gathered or reduced; for gathers also by the nodes from the shard to
    it, because a pass may replace the casts between them."""
    found: dict[Node, str] = {}
    for start in _starts(graph):
        (node,) = start.all_input_nodes
        fqn = carried_fqn(start) or ""
        found[node] = fqn
        while fx.KIND_OF[start.target] == "gather" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
            found[node] = fqn
    return found


def _carried(start: Node, sources: dict[Node, str]) -> list[str]:
    """The FQNs of all parameters that a bucket carries, of which torch's pass notes the first."""
    found: dict[str, None] = {}
    stack, seen = [*reversed(start.all_input_nodes)], set[Node]()
    while stack:
        node = stack.pop()
        if node in sources:
            found[sources[node]] = None
        elif node not in seen:
            seen.add(node)
            stack += reversed(node.all_input_nodes)
    return list(found)


def _saturating_mib(program: Program, cost: ClusterCost) -> float:
    """The size in MiB at which a gather reaches 90 % of its link's bandwidth, within the bounds
    that torch has for it."""
    from torch._inductor import config

    options = config.aten_distributed_optimizations
    least = getattr(options, "pre_bucketing_fsdp_collectives_min_bucket_cap_mb", 10.0)
    most = getattr(options, "pre_bucketing_fsdp_collectives_max_bucket_cap_mb", 500.0)
    gather = next((c for c in program.sent.values() if c.kind == "gather"), None)
    if gather is None:
        return least

    def bandwidth(nbytes: int) -> float:
        return nbytes / cost.collective_us(replace(gather, nbytes=nbytes))

    mib = least
    while mib < most and bandwidth(int(mib * 2**20)) < _SATURATION * bandwidth(1 << 40):
        mib *= 1.1
    return min(mib, most)
