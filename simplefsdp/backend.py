"""The ``"simplefsdp"`` backend of ``torch.compile``: options -> passes, and early errors."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node

import inductor_passes
from inductor_passes._torch import no_fusion_past_launches
from inductor_passes.buckets import assign_by_module
from inductor_passes.cluster import Cluster
from inductor_passes.cluster_file import as_cluster
from inductor_passes.order import OverlapPolicy
from inductor_passes.passes import ImposeOrder, PassError, bucket_and_reorder, rehearse
from inductor_passes.planned import PlannedBucket
from inductor_passes.program import ProgramError
from inductor_passes.rehearsal import Auto, Plans, Rehearsal, Settings, launches, predict
from inductor_passes.roofline import cluster_of
from inductor_passes.text import to_text
from simplefsdp import _torch, breaks, provenance, rank_guard
from simplefsdp.breaks import show
from simplefsdp.census import describe, take_census
from simplefsdp.dedupe import dedupe_gathers, reduce_in_second_group
from simplefsdp.errors import told_plainly
from simplefsdp.gather import GatherSpec
from simplefsdp.local_inputs import compile_with_local_inputs
from simplefsdp.options import Options, parse_options
from simplefsdp.recompute import tag_for_recompute
from simplefsdp.reshard import decide_resharding
from simplefsdp.watch import Seen
from simplefsdp.wrap import known_fqns

log = logging.getLogger("simplefsdp")

# Automatic plans of this process, of graphs with gradients and of those without: what is freed
# in an evaluation is kept in a training step, which may communicate the same.
_plans: dict[bool, Plans] = {True: {}, False: {}}
_compilations = itertools.count()


@told_plainly
def simplefsdp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph of a wrapped model; torch calls this, users name the backend.

    Args:
        gm: the graph.
        example_inputs: its (fake) inputs.
        options: see :class:`simplefsdp.options.Options`.

    Raises:
        TypeError, ValueError: an unknown option, a parameter that
            :func:`simplefsdp.simple_fsdp` did not shard, or one that is written to.
        RankMismatchError: the ranks are about to communicate differently.
        PassError: a pass failed, and ``on_error`` is ``"raise"``.
    """
    choice = parse_options(options)
    _refuse_unwrapped(gm)
    breaks.enter(gm)
    specs = dedupe_gathers(gm)
    settings = pass_settings(choice, [spec.fqn for spec in specs], _device(gm))
    asked, specs = specs, decide_resharding(gm, example_inputs, settings)
    kept = [s.fqn for s in specs if not s.reshard_after_forward and s not in asked]
    if kept:
        _say("kept from forward to backward: %s", ", ".join(kept))
    if settings is not None and settings.assignment.uncovered:
        _say("in no bucket of options['buckets']: %s", ", ".join(settings.assignment.uncovered))
    ranks = _ranks(gm) if choice.rank_guard else ()
    _agree_on_model(gm, choice, specs, settings, ranks)
    if choice.separate_reduce_group:
        reduce_in_second_group(gm)

    def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _compile(gm, inputs, choice, settings, ranks)

    return compile_with_local_inputs(gm, example_inputs, compile_graph)


def _sharded_inputs(gm: GraphModule) -> list[DTensor]:
    values = (n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder")
    return [value for value in values if isinstance(value, DTensor)]


def _ranks(gm: GraphModule) -> tuple[int, ...]:
    """The ranks that compile this graph together."""
    return rank_guard.ranks_of([param.device_mesh for param in _sharded_inputs(gm)])


def _agree_on_model(
    gm: GraphModule,
    options: Options,
    specs: Sequence[GatherSpec],
    settings: Settings | None,
    ranks: Sequence[int],
) -> None:
    """Compare across ranks what is communicated, before autograd: a difference is told by name."""
    params = _sharded_inputs(gm)
    grad = "with" if torch.is_grad_enabled() else "without"
    lines = [f"torch {torch.__version__}", f"sources {_sources()[:16]}", f"{grad} gradients"]
    # Not the cluster, which may be a path, but what it stands for.
    lines += _fields("options", replace(options, cluster=None))
    if settings is not None and settings.auto is not None:
        lines += _fields("cluster", settings.auto.cluster)
    # Names of groups differ between ranks, and so do rows, of a tensor-parallel parameter.
    lines += [
        str(
            spec._replace(
                rows=0,
                shard_group="",
                reduce_group="",
                copy_groups=tuple(("", ranks) for _, ranks in spec.copy_groups),
            )
        )
        for spec in specs
    ]
    lines += sorted(f"{tuple(p.shape)} {p.dtype} {p.placements} {p.requires_grad}" for p in params)
    timeout_s = options.rank_guard_timeout_s
    rank_guard.agree("the graph to compile", lines, ranks, timeout_s)


def _fields(name: str, value: Options | Cluster) -> list[str]:
    """A line for each field, so that the first difference is one field's."""
    return [f"{name}[{f.name!r}]: {getattr(value, f.name)!r}" for f in fields(value)]


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: Settings | None,
    ranks: Sequence[int],
) -> Callable[..., Any]:
    # The buckets of the graph that is being compiled, forward or backward: chosen when it is
    # observed, and agreed on with the other ranks, then written by the pass.
    current: list[tuple[PlannedBucket, ...] | None] = [None]
    base = _uuid(settings)
    timeout_s = options.rank_guard_timeout_s
    compilation = next(_compilations)
    plans = _plans[torch.is_grad_enabled()]

    def uuid() -> str:
        return hashlib.sha256(f"{base}{current[0]}".encode()).hexdigest()

    def observe(graph: GraphModule, is_backward: bool) -> None:
        current[0] = _observe(
            graph,
            is_backward,
            settings=settings,
            plans=plans,
            ranks=ranks,
            timeout_s=timeout_s,
            compilation=compilation,
        )

    def graph_pass(graph: Graph) -> None:
        if settings is not None and current[0] is not None:
            bucket_and_reorder(graph, settings, fqn_of, current[0])

    scheduler_pass, as_planned = None, False
    if settings is not None and settings.reorder:
        as_planned = settings.auto is not None
        scheduler_pass = ImposeOrder(settings.policy, settings.on_error, as_planned, base)
    if options.executor == "aot_eager":
        return _torch.compile_with_aot_eager(
            gm,
            example_inputs,
            observe=observe,
            joint_pass=tag_for_recompute,
            graph_pass=graph_pass if settings is not None else None,
        )
    return _torch.compile_with_inductor(
        gm,
        example_inputs,
        observe=observe,
        joint_pass=tag_for_recompute,
        graph_pass=graph_pass if settings is not None else None,
        scheduler_pass=scheduler_pass,
        lowering=no_fusion_past_launches if as_planned else nullcontext,
        uuid=uuid,
    )


def _observe(
    gm: GraphModule,
    is_backward: bool,
    *,
    settings: Settings | None,
    plans: Plans,
    ranks: Sequence[int],
    timeout_s: float,
    compilation: int,
) -> tuple[PlannedBucket, ...] | None:
    """Choose the buckets of a graph; log, and compare with the other ranks, what it will launch.

    Called whether or not a cache has the code, with the graph that the passes will get. None if
    the graph is to stay as it is: it cannot be planned, and that leads to a fallback.

    Raises:
        PassError: it cannot be planned, and that is an error; when all ranks have compared it.
        ValueError: likewise, and the user can mend it: no schedule fits the memory budget, say.
    """
    line = describe(take_census(gm.graph), is_backward=is_backward)
    part = "backward" if is_backward else "forward"
    planned = failure = None
    begin = time.perf_counter()
    try:
        rehearsal = rehearse(gm, settings, fqn_of, plans)
        planned = rehearsal.planned
        show(Seen(part, rehearsal, settings, time.perf_counter() - begin, compilation))
        _torch.trace_artifact(f"simplefsdp_{part}", lambda: to_text(rehearsal.after))
        lines = launches(rehearsal)
        line += describe_passes(rehearsal, settings)
        _warn_of_memory(part, rehearsal, settings)
    except Exception as error:  # of whatever kind: the others wait to hear of it
        failure = error
        lines = [f"cannot be planned: {error}"]
        line += f"; {lines[0]}"
    _say("%s", line)
    rank_guard.agree(f"the {part} graph to compile", lines, ranks, timeout_s)
    if failure is not None and (settings is None or settings.on_error == "raise"):
        theirs = isinstance(failure, ValueError) and not isinstance(failure, ProgramError)
        kind = ValueError if theirs else PassError
        raise kind(f"{part} graph: {failure}") from failure
    if failure is not None:
        log.warning("%s graph: compiled without the passes: %s", part, failure)
    return planned


def _device(gm: GraphModule) -> torch.device:
    return next((param.device for param in _sharded_inputs(gm)), torch.device("cpu"))


def pass_settings(options: Options, fqns: Sequence[str], device: torch.device) -> Settings | None:
    """What the passes are to do for a model on ``device``; None if nothing.

    Args:
        options: the user's.
        fqns: of the parameters that are gathered, in the order of the forward's first reads.
        device: of the model.

    Raises:
        ValueError: ``options.buckets`` names a module that does not exist, or one twice.
    """
    merges = options.bucketing != "none"
    if not merges and not options.reorders:
        return None
    return Settings(
        assign_by_module(fqns, options.buckets, known=known_fqns),
        auto=_auto(options, device) if options.bucketing == "auto" else None,
        merge=merges,
        reorder=options.reorders,
        layout=options.layout,
        policy=OverlapPolicy(options.max_inflight_gathers, options.max_pending_reduces),
        on_error=options.on_error,
    )


def _auto(options: Options, device: torch.device) -> Auto:
    cluster = cluster_of(device) if options.cluster is None else as_cluster(options.cluster)
    _check_nodes(cluster)
    budget_gb = options.memory_budget_gb
    return Auto(cluster, None if budget_gb is None else int(budget_gb * 1e9), options.planner)


def _check_nodes(cluster: Cluster) -> None:
    """Refuse a cluster whose nodes are not those of this run, if it is known to have several."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if here.isdigit() and ranks > int(here) != cluster.ranks_per_node:
        raise ValueError(
            f"options['cluster']: {cluster.name!r} has {cluster.ranks_per_node} ranks on a node, "
            f"but of the {ranks} ranks of this run {here} are on this one (LOCAL_WORLD_SIZE); "
            "measure the machine with `simplefsdp calibrate` under the same launcher"
        )


fqn_of = provenance.carried_fqn


def _uuid(settings: Settings | None) -> str:
    """The passes' identity for Inductor's cache: their sources, all of them, and settings."""
    return hashlib.sha256(f"{_sources()}{settings!r}".encode()).hexdigest()


@functools.cache
def _sources() -> str:
    packages = [Path(__file__).parent, Path(inductor_passes.__file__).parent]
    return _torch.hash_of_files(sorted(str(f) for path in packages for f in path.glob("*.py")))


def _say(message: str, *args: object) -> None:
    log.log(_level(), message, *args)


def _level() -> int:
    """Rank 0 speaks for all."""
    return logging.INFO if not dist.is_initialized() or dist.get_rank() == 0 else logging.DEBUG


def describe_passes(rehearsal: Rehearsal, settings: Settings | None) -> str:
    """What the passes will make of a graph, for the log line; nothing if there are none."""
    if settings is None:
        return ""
    found = predict(rehearsal, settings.auto.cluster if settings.auto else None)
    verb = "->" if settings.merge else "moved as"
    parts = [
        f"{n} {kind}s {verb} {found.buckets[kind]} buckets"
        for kind, n in found.collectives.items()
        if n
    ]
    if (plan := rehearsal.plan) is not None:
        of_budget = f" of {plan.budget_nbytes / 1e9:.3g}" if plan.budget_nbytes else ""
        parts.append(
            f"planned {'' if of_budget else 'as before, '}{plan.step_us / 1e3:.3g} ms (lower bound "
            f"{plan.lower_bound_us / 1e3:.3g}), {plan.peak_nbytes / 1e9:.3g}{of_budget} GB beside "
            "shards of parameters"
        )
    exposed = f"{found.exposed_before_us / 1e3:.3g} -> {found.exposed_after_us / 1e3:.3g} ms"
    return "; ".join(["", *parts, f"predicted exposed {exposed} on {found.device}"])


def _warn_of_memory(part: str, rehearsal: Rehearsal, settings: Settings | None) -> None:
    """Say so if a plan that was made for another batch takes more than the user allows.

    It cannot be made anew: the other ranks may go on with it.
    """
    allowed = settings.auto.budget_nbytes if settings is not None and settings.auto else None
    plan = rehearsal.plan
    if plan is not None and allowed is not None and plan.peak_nbytes > allowed:
        log.warning(
            "%s graph: planned for another batch, and for this one %.4g GB of activations, full "
            "parameters and gradients are predicted, where memory_budget_gb=%.4g; compile the "
            "largest batch first",
            part,
            plan.peak_nbytes / 1e9,
            allowed / 1e9,
        )


def _refuse_unwrapped(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op == "placeholder" and _is_plain_parameter(node):
            user = next((u for u in node.users if _torch.module_path(u)), None)
            module = f" of module {_torch.module_path(user)}" if user is not None else ""
            module += _torch.line_of(user)
            raise ValueError(
                f"parameter {_torch.input_name(node) or node.name}{module} is not "
                "sharded: call simplefsdp.simple_fsdp(model, mesh) before "
                'torch.compile(model, backend="simplefsdp"), and register no parameters after it'
            )


def _is_plain_parameter(placeholder: Node) -> bool:
    value = placeholder.meta.get("example_value")
    return isinstance(value, nn.Parameter) and not isinstance(value, DTensor)
