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

The passes are private parts of torch; what of them moved, says
``tests/_torch/test_torch_contract.py``.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import cost_of, fused_program
from inductor_passes.ir.buckets import assign_by_module
from inductor_passes.ir.program import Program
from inductor_passes.machine.cluster import Cluster, ClusterCost
from inductor_passes.machine.simulate import memory, simulate
from inductor_passes.rehearsal import no_garbage_collection
from simplefsdp import provenance
from simplefsdp.inspection.options import TorchPlan
from simplefsdp.provenance import carried_fqn as fqn_of
from simplefsdp.simulation.prediction import GraphPrediction, StepPrediction, predict_step
from simplefsdp.simulation.trace import TracedStep

_FX_PASSES = "torch._inductor.fx_passes."
_MANUAL = ("overlap_manual_scheduling", "manual_overlap_bucketing")
_AUTO = ("overlap_scheduling", "schedule_overlap_bucketing")
_SATURATION = 0.9
_TAKES = {
    _MANUAL: ("module_bucket_plans", "insert_overlap_deps", "module_stack_fn"),
    _AUTO: (
        "collective_bucketing",
        "insert_overlap_deps",
        "custom_runtime_estimation",
        "compute_estimator",
        "pre_bucketing_fsdp_collectives_bucket_cap_mb",
    ),
}


def require(name: TorchPlan) -> None:
    """See that there is the pass that a plan needs.

    Raises:
        ValueError: there is not; names what this torch lacks.
    """
    _pass(_MANUAL if name == "torch-manual" else _AUTO)


def predict_torch_step(
    name: TorchPlan, step: TracedStep, cluster: Cluster, parameters_nbytes: int
) -> StepPrediction:
    """Predict a traced step under a pass of torch's; arguments as for ``predict_step``.

    Raises:
        ValueError: this torch has not what the pass is called with, or the pass fails.
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
    """Predict a graph that a pass has changed, in the order that it is in.

    Args:
        gm: the graph now.
        cluster: what it is to run on.
        was: the prediction of the graph without passes.
        pass_seconds: CPU seconds that the pass took.
    """
    reading = fx.read(gm.graph, fqn_of)
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
    """Parameter FQNs by bucket of our manual plan, which for a Llama is torchtitan's for torch's
    manual pass, too: embedding, layers, final norm and head."""
    units: dict[str, list[str]] = {}
    for fqn, label in assign_by_module(list(fqns)).label_of.items():
        units.setdefault(label, []).append(fqn)
    return list(units.values())


@no_garbage_collection()
def torch_manual(gm: GraphModule, units: Sequence[Sequence[str]]) -> GraphModule:
    """A copy of ``gm`` after ``manual_overlap_bucketing``.

    Args:
        gm: a traced graph.
        units: FQNs of parameters, or of modules, that share a bucket.

    Raises:
        ValueError: this torch has not what the pass is called with, or the pass fails.
    """
    values = [list(unit) for unit in units], False, module_stack
    arguments = dict(zip(_TAKES[_MANUAL], values, strict=True))
    return _after(gm, _MANUAL, arguments, lambda node: 0.0)  # an estimate is asked for, not used


@no_garbage_collection()
def torch_auto(gm: GraphModule, program: Program, cost: ClusterCost) -> GraphModule:
    """A copy of ``gm`` after ``schedule_overlap_bucketing``, its settings the defaults.

    Args:
        gm: a traced graph.
        program: as it was read.
        cost: of its ops.

    Raises:
        ValueError: this torch has not what the pass is called with, or the pass fails.
    """

    def estimate_ms(node: Node, override_nbytes: int | None = None) -> float | None:
        if node.target in fx.KIND_OF:
            sent = fx.collective_of(node, fqn_of)
            if override_nbytes is not None:
                sent = replace(sent, nbytes=override_nbytes)
            return cost.collective_us(sent) / 1e3
        work = cost.work.get(node.name)
        return None if work is None else cost.cluster.compute_us(work) / 1e3

    values = True, False, estimate_ms, "analytical", _saturating_mib(program, cost)
    arguments = dict(zip(_TAKES[_AUTO], values, strict=True))
    return _after(gm, _AUTO, arguments, lambda node: estimate_ms(node) or 0.0)


def module_stack(node: Node) -> list[tuple[str, type[Any]]]:
    """The module of a gather's or reduce's parameter; torch's manual pass needs only those."""
    fqn = provenance.carried_fqn(node)
    return [] if fqn is None else [("", torch.nn.Module), (fqn, torch.nn.Module)]


def _after(
    gm: GraphModule,
    where: tuple[str, str],
    arguments: dict[str, Any],
    milliseconds: Callable[[Node], float],
) -> GraphModule:
    run = _pass(where)
    _silence()
    made = copy.deepcopy(gm)
    starts, sources = _starts(made.graph), _sources(made.graph)
    try:
        with _estimates(milliseconds):
            run(made, **arguments)
        made.graph.eliminate_dead_code()
    except Exception as error:  # whatever it is, the user can only choose another plan
        raise ValueError(
            f"{where[1]} of torch {torch.__version__} failed on this graph: "
            f"{type(error).__name__}: {error}; choose another plan"
        ) from error
    for start in _starts(made.graph) - starts:
        fx.mark(start, "", tuple(_carried(start, sources)))
    return made


def _pass(where: tuple[str, str]) -> Callable[..., GraphModule]:
    """A function of torch's that takes what it is to be called with.

    Raises:
        ValueError: there is none; names what is missing.
    """
    module, name = where
    try:
        function = getattr(importlib.import_module(_FX_PASSES + module), name)
    except (ImportError, AttributeError) as error:
        missing = f"{_FX_PASSES}{module}.{name}"
        raise ValueError(_lacks(missing)) from error
    unknown = [key for key in _TAKES[where] if key not in inspect.signature(function).parameters]
    if unknown:
        raise ValueError(_lacks(f"{', '.join(unknown)} of {name}"))
    return function  # type: ignore[no-any-return]


def _silence() -> None:
    """A module of the passes tells of every graph; it sets its own level when it is imported."""
    with suppress(ImportError):
        importlib.import_module(_FX_PASSES + "fsdp")
    logging.getLogger(_FX_PASSES + "fsdp").setLevel(logging.WARNING)


def _lacks(what: str) -> str:
    return (
        f"torch {torch.__version__} has no {what}, which this plan needs (torch 2.13 has it); "
        "choose another plan"
    )


def _estimates(milliseconds: Callable[[Node], float]) -> AbstractContextManager[object]:
    """Where the passes look up what the GPU at hand would take."""
    from torch._inductor.fx_passes import overlap_scheduling

    return patch.object(
        overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds, create=True
    )


def _starts(graph: Graph) -> set[Node]:
    """The collectives of data parallelism."""
    return {n for n in graph.nodes if n.target in fx.KIND_OF and provenance.carried_fqn(n)}


def _sources(graph: Graph) -> dict[Node, str]:
    """FQNs by what is gathered (from the shard on, as a pass may cast anew) or reduced."""
    found: dict[Node, str] = {}
    for start in _starts(graph):
        (node,) = start.all_input_nodes
        fqn = provenance.carried_fqn(start) or ""
        found[node] = fqn
        while fx.KIND_OF[start.target] == "gather" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
            found[node] = fqn
    return found


def _carried(start: Node, sources: dict[Node, str]) -> list[str]:
    """The parameters that a bucket carries; torch notes the first on it."""
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
