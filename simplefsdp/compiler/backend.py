"""The ``"simplefsdp"`` backend of ``torch.compile``: options -> passes, and early errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from inductor_passes.adapters.packs import has_kernel
from inductor_passes.ir.buckets import assign_by_module, repeated_modules
from inductor_passes.machine.cluster import Cluster
from inductor_passes.rehearsal import Auto, Settings
from simplefsdp import _torch
from simplefsdp.compiler import breaks
from simplefsdp.compiler.cache_key import sources
from simplefsdp.compiler.compilation import Extension, begin_preparing, compile_with_passes
from simplefsdp.compiler.dedupe import dedupe_gathers, gathers_of, reduce_in_second_group
from simplefsdp.compiler.executor import executor_of
from simplefsdp.compiler.local_inputs import compile_with_local_inputs
from simplefsdp.compiler.machine import cluster_for
from simplefsdp.compiler.names import named_as_before
from simplefsdp.compiler.options import Options, parse_options
from simplefsdp.compiler.reshard import decide_resharding
from simplefsdp.compiler.sent import noting_gathers
from simplefsdp.compiler.written import refusing_writes
from simplefsdp.errors import told_plainly
from simplefsdp.frontend import assigned, living, uninitialised
from simplefsdp.frontend.accumulation import noting_backwards
from simplefsdp.frontend.after_wrap import stands_for_shard
from simplefsdp.frontend.gather_spec import GatherSpec
from simplefsdp.frontend.kept import refreshing
from simplefsdp.frontend.living import known_fqns, models_of
from simplefsdp.rank_guard import agree, forget_decisions, ranks_of
from simplefsdp.rank_logging import say
from simplefsdp.stalls import watching

RECOMPILES = 64  # of one function; torch's default, 8, is less than training and generation need


@told_plainly
def simplefsdp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
    adjust: Callable[[Settings], Settings] | None = None,
    extension: Extension | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph of a wrapped model; torch calls this, users name the backend.

    Args:
        gm: the graph.
        example_inputs: its inputs; parameters are the model's own.
        options: see :class:`simplefsdp.compiler.options.Options`.
        mode: refused, as a key of ``options`` is, too: only the backend Inductor has modes.
        adjust: for benchmarks and tests: changes those settings of the passes that users cannot
            choose; it must make the same change on all ranks.
        extension: makes a whole training step of the graph.

    Raises:
        TypeError, ValueError: an unknown option, a parameter that
            :func:`simplefsdp.simple_fsdp` did not shard, one that is written to, or one that
            ``to_empty`` left without values.
        RankMismatchError: the ranks are about to communicate differently.
        PassError: a pass failed.
    """
    _torch.reset_with_dynamo(simplefsdp)
    choice = parse_options(options if mode is None else {**(options or {}), "mode": mode})
    _refuse_unwrapped(gm, example_inputs)
    breaks.enter(gm)
    dedupe_gathers(gm, example_inputs)
    gathered = _gathered_inputs(gm)
    _refuse_checkpoint_by_hooks([example_inputs[place] for place in gathered])
    missing = _without_values(gathered, example_inputs)
    specs, gathered = named_as_before(gm, choice), _gathered_inputs(gm)
    params, again = [v for v in example_inputs if isinstance(v, DTensor)], set[str]()
    device, shapes = _device_of(params), _shapes(gathered, example_inputs)
    chosen = replace(choice, executor=executor_of(choice, shapes, device))
    settings = pass_settings(chosen, [spec.fqn for spec in specs], device)
    if settings is not None:
        settings = settings if adjust is None else adjust(settings)
        _say_uncovered(settings)
    _refuse_cudagraphs(choice, device)
    _torch.refuse_settings(chosen.executor)
    begin_preparing(chosen.executor, device.type)
    timeout_s = choice.rank_guard_timeout_s
    ranks = _ranks_to_meet(params, timeout_s)
    lines = [
        *_communicated(gm, params, choice, specs, settings, adjusted=adjust is not None),
        _named(missing),
        # Only the first difference is reported: a line before this one says why executors differ.
        f"compiled by {chosen.executor}",
        *(() if extension is None else extension.agreed),
    ]
    together = agree("the graph to compile", lines, ranks, timeout_s)
    uninitialised.refuse(missing)
    decide_resharding(gm, example_inputs, settings, ranks, timeout_s)
    if choice.separate_reduce_group:
        reduce_in_second_group(gm)

    compile_graph = functools.partial(
        compile_with_passes,
        options=chosen,
        settings=settings,
        ranks=ranks,
        together=together,
        again=again,
    )
    until, sums, kept_full = _told_of_now(gm)
    noting = noting_gathers(gm)
    if extension is None:
        compiled = compile_with_local_inputs(gm, example_inputs, compile_graph)
        compiled = refusing_writes(noting_backwards(compiled, until, sums), gathered, again)
    else:
        whole, inputs, called = extension.extend(gm, example_inputs)
        compiled = called(compile_graph(whole, inputs, whole_step=True))
    if len(ranks) > 1:
        compiled = watching(noting(compiled), ranks, device.type)
    compiled = refreshing(compiled, kept_full, timeout_s)
    return _refusing_lost_values(compiled, gathered, ranks, timeout_s)


def _ranks_to_meet(params: Sequence[DTensor], timeout_s: float) -> tuple[int, ...]:
    """The ranks that compare what they are about to do; none if they are told not to."""
    ranks = ranks_of([param.device_mesh for param in params])
    if len(ranks) > 1 and not timeout_s:
        say("rank_guard_timeout_s is 0: the ranks do not compare what they are about to do")
        return ()
    return ranks


def _refusing_lost_values(
    compiled: Callable[..., Any],
    gathered: Mapping[int, str],
    ranks: Sequence[int],
    timeout_s: float,
) -> Callable[..., Any]:
    """``compiled`` with a check before each call: it raises if ``to_empty`` has meanwhile taken the
    values of a gathered parameter, or if something was assigned to its ``.data``."""
    checked = uninitialised.last_emptied()

    def call(*args: Any) -> Any:
        nonlocal checked
        if checked is not (emptied := uninitialised.last_emptied()):
            if any(uninitialised.was_emptied(args[place]) for place in gathered):
                missing = _without_values(gathered, args)
                what = "the parameters to compute with"
                agree(what, [_named(missing)], ranks, timeout_s, remember=False)
                uninitialised.refuse(missing)
            checked = emptied
        assigned.refuse_assigned((fqn, args[place]) for place, fqn in gathered.items())
        return compiled(*args)

    return call


def _say_uncovered(settings: Settings) -> None:
    if uncovered := settings.assignment.uncovered:
        say("in no bucket of options['buckets']: %s", ", ".join(uncovered))


def _reset() -> None:
    """Forget plans, and decisions on what is kept from forward to backward.
    ``torch.compiler.reset()`` and ``torch._dynamo.reset()`` call this, see
    :func:`simplefsdp.rank_guard.forget_decisions`."""
    forget_decisions()
    breaks.reset()
    _torch.reset_repeated_calls()
    _torch.forget_given_up()


simplefsdp.reset = _reset  # type: ignore[attr-defined]
_torch.trace_repeated_calls_once(simplefsdp)
_torch.watch_recompiling(RECOMPILES)


def _communicated(
    gm: GraphModule,
    params: Sequence[DTensor],
    options: Options,
    specs: Sequence[GatherSpec],
    settings: Settings | None,
    *,
    adjusted: bool,
) -> list[str]:
    """The lines that the ranks compare before AOTAutograd runs; an error quotes the first different
    one, so each line names what it is about."""
    device = _device_of(params)
    grad = "with" if torch.is_grad_enabled() else "without"
    lines = [f"torch {torch.__version__}", f"sources {sources()[:16]}", f"{grad} gradients"]
    lines += [f"Triton for what is sent {'is' if has_kernel(device) else 'is not'} there"]
    # ``options.cluster`` may be a path, which may differ: the cluster that it names is compared.
    lines += _fields("options", replace(options, cluster=None))
    if settings is not None and settings.auto is not None:
        lines += _fields("cluster", settings.auto.cluster)
    if settings is not None and adjusted:
        lines += _fields("settings", replace(settings, auto=None))
    # Not compared, as they differ between ranks: group names, rows of tensor-parallel parameters.
    for spec in specs:
        copies = tuple(("", ranks) for _, ranks in spec.copy_groups)
        told = spec._replace(
            rows=0,
            shard_group="",
            reduce_group="",
            copy_groups=copies,
            post_forward_group="",
            post_forward_rank=0,
        )
        lines.append(f"reads {spec.fqn}: {told}")
    lines.append("reads no other parameter")
    lines += [
        f"{node.args[1]}: {sorted(node.kwargs)} gradient until {node.kwargs.get('until', 'all')}"
        for node in gathers_of(gm)
        if node.kwargs
    ]
    return lines + sorted(
        f"{tuple(p.shape)} {p.dtype} {p.placements} {p.requires_grad}" for p in params
    )


def _device_of(params: Sequence[DTensor]) -> torch.device:
    return params[0].device if params else torch.device("cpu")


def _named(missing: Sequence[str]) -> str:
    return f"parameters without values: {', '.join(missing) or 'none'}"


def _fields(name: str, value: Options | Cluster | Settings) -> list[str]:
    """A line for each field, so that the first difference is one field's."""
    return [f"{name}[{f.name!r}]: {getattr(value, f.name)!r}" for f in fields(value)]


def pass_settings(options: Options, fqns: Sequence[str], device: torch.device) -> Settings | None:
    """The settings of the passes for a model on ``device``; None if the passes have nothing to do.
    ``fqns`` are the parameters that the graph gathers, in the order in which forward first reads
    them."""
    merges = options.bucketing != "none"
    if not merges and not options.reorders:
        return None
    return Settings(
        assign_by_module(fqns, options.buckets, known=known_fqns(fqns)),
        auto=_auto(options, device) if options.bucketing == "auto" else None,
        merge=merges,
        reorder=options.reorders,
        units=repeated_modules(fqns) if options.executor == "regions" else (),
    )


def _auto(options: Options, device: torch.device) -> Auto:
    budget_gb = options.memory_budget_gb
    budget_nbytes = None if budget_gb is None else int(budget_gb * 1e9)
    return Auto(cluster_for(options.cluster, device), budget_nbytes)


def _refuse_cudagraphs(options: Options, device: torch.device) -> None:
    if options.cudagraphs and device.type != "cuda":
        raise ValueError(
            f"options['cudagraphs']: expected parameters on cuda, got {device}; leave it out"
        )


def _refuse_unwrapped(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    ignored = living.ignored()
    is_wrapped = any(isinstance(value, DTensor) for value in example_inputs)
    for node, value in zip(placeholders, example_inputs, strict=True):
        # Plain parameters that are no error: inside ``unsharded`` the plain model is compiled; and
        # a wrapped model may use a frozen module that is not registered in it, such as a loss's
        # teacher.
        frozen = is_wrapped and not getattr(value, "requires_grad", True)
        known = stands_for_shard(value) or id(value) in ignored or frozen
        seen = node.meta.get("example_value")
        is_plain = isinstance(seen, nn.Parameter) and not isinstance(seen, DTensor)
        if is_plain and not known:
            user = next((u for u in node.users if _torch.module_path(u)), None)
            module = f" of module {_torch.module_path(user)}" if user is not None else ""
            module += _torch.line_of(user)
            raise ValueError(
                f"parameter {_torch.input_name(node) or node.name}{module} is not "
                "sharded: call simplefsdp.simple_fsdp(model, mesh) before "
                'torch.compile(model, backend="simplefsdp"), and register no parameters after it'
            )


def _refuse_checkpoint_by_hooks(params: Sequence[Any]) -> None:
    """Raise for models that ``torch.distributed._composable.checkpoint`` checkpoints: its hooks
    compare what a compiled forward saved with what an eager forward saves."""
    for model in models_of(params):
        for path, module in model.named_modules():
            if _torch.is_checkpointed_by_hooks(module):
                raise ValueError(
                    f"{path or 'the model'}: is checkpointed by torch.distributed._composable."
                    "checkpoint, whose hooks cannot be compiled; call torch.utils.checkpoint."
                    "checkpoint(..., use_reentrant=False) in forward instead, or apply "
                    "checkpoint_wrapper, or do not compile"
                )


def _gathered_inputs(gm: GraphModule) -> dict[int, str]:
    """FQNs of the parameters that are gathered, by their places among the inputs of ``gm``."""
    fqns = {node.args[0]: str(node.args[1]) for node in gathers_of(gm)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {place: fqns[node] for place, node in enumerate(placeholders) if node in fqns}


def _shapes(gathered: Mapping[int, str], inputs: Sequence[Any]) -> dict[str, torch.Size]:
    return {fqn: inputs[place].shape for place, fqn in gathered.items()}


_Pairs = list[tuple[int, int]]


def _told_of_now(gm: GraphModule) -> tuple[dict[int, str], _Pairs, _Pairs]:
    """What the keyword arguments of the gathers say, by places among the inputs of ``gm``: how far
    the gradient of a parameter is reduced, for some; which inputs are sums of a parameter's
    deferred gradients, and which are kept full ones, each with the parameter."""
    place_of = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    until: dict[int, str] = {}
    sums: _Pairs = []
    kept: _Pairs = []
    for node in gathers_of(gm):
        place = place_of.get(node.args[0])  # type: ignore[arg-type]
        if place is None:
            continue  # functional_call has put what was computed in the place of a parameter
        if "until" in node.kwargs:
            until[place] = str(node.kwargs["until"])
        for name, value in node.kwargs.items():
            if value in place_of:  # type: ignore[comparison-overlap]
                (kept if name == "kept" else sums).append((place, place_of[value]))  # type: ignore[index]
    return until, sums, kept


def _without_values(gathered: Mapping[int, str], inputs: Sequence[Any]) -> list[str]:
    return uninitialised.without_values(
        (fqn, inputs[place], _torch.local_tensor(inputs[place])) for place, fqn in gathered.items()
    )
