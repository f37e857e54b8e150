"""One Dynamo graph through AOTAutograd and the passes to code, the same on all ranks.

Each graph, forward, backward or both, goes through four steps before it is lowered: it is planned;
the ranks agree on what it will launch; it is described in the log; observers are called with it. Of
these only the first two can fail a compilation.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters._torch_lowering import fusions_as_planned
from inductor_passes.adapters.in_place import write_inputs_early
from inductor_passes.adapters.matmuls import add_matmuls_in_place
from inductor_passes.adapters.unrounded import write_sums_unrounded
from inductor_passes.executor import regional
from inductor_passes.ir.text import to_text
from inductor_passes.passes import REMEDY, ImposeOrder, PassError, bucket_and_reorder, rehearse
from inductor_passes.rehearsal import Rehearsal, Settings, launches
from inductor_passes.size_range import SizeRange
from inductor_passes.transform.portable import PortableBucket
from simplefsdp import _torch, rank_guard
from simplefsdp.compiler.breaks import notify
from simplefsdp.compiler.cache_key import identity
from simplefsdp.compiler.census import describe, describe_passes, take_census
from simplefsdp.compiler.lengthen import few_layers_traced
from simplefsdp.compiler.observers import CompiledGraph, Part
from simplefsdp.compiler.options import Options
from simplefsdp.compiler.plans import Chosen, is_users, plan_for_all
from simplefsdp.compiler.recompute import tag_for_recompute
from simplefsdp.compiler.size_limits import SizeLimits, describe_range
from simplefsdp.provenance import carried_fqn, reduced_fqn
from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.rank_logging import level, say

log = logging.getLogger("simplefsdp")
_numbers = itertools.count()


class Compilation(NamedTuple):
    """What a forward graph and its backward have in common.

    Attributes:
        settings: of the passes; None for none.
        ranks: that compile together; none if they do not compare.
        timeout_s: how long to wait for the others.
        grad: whether gradients are wanted.
        number: the same for no others.
        limits: of the sizes that were left open.
        whole_step: whether the forward graph computes its gradients itself, and uses them.
    """

    settings: Settings | None
    ranks: tuple[int, ...]
    timeout_s: float
    grad: bool
    number: int
    limits: SizeLimits
    whole_step: bool = False

    def part(self, is_backward: bool) -> Part:
        """What a graph of this compilation is."""
        if self.whole_step:
            return "step"
        return "backward" if is_backward else "forward"


def begin_preparing(executor: str, device_type: str) -> None:
    """Begin what Inductor does once per machine, where it will be needed, and do not wait."""
    if executor != "aot_eager" and device_type == "cpu":
        _torch.prepare_cpp()


def compile_with_passes(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    settings: Settings | None,
    ranks: Sequence[int],
    *,
    whole_step: bool = False,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: the graph; owned by the callee.
        example_inputs: its (fake) inputs.
        options: the user's.
        settings: of the passes; None for none.
        ranks: that compile it together; none if they do not compare.
        whole_step: whether ``gm`` computes its gradients itself, from its last input on.

    Raises:
        RankMismatchError, PassError, ValueError: see :func:`observe`.
    """
    # Of the graph that is being compiled, forward or backward: made when it is observed.
    current = [Observed((), ())]
    base = identity(settings)
    compilation = Compilation(
        settings,
        tuple(ranks),
        options.rank_guard_timeout_s,
        torch.is_grad_enabled(),
        next(_numbers),
        SizeLimits(gm),
        whole_step,
    )

    def uuid() -> str:
        return hashlib.sha256(f"{base}{current[0].planned}".encode()).hexdigest()

    def note(graph: GraphModule, is_backward: bool) -> None:
        current[0], _ = observe(graph, is_backward, compilation)

    def graph_pass(graph: Graph) -> None:
        _write_plan(graph, settings, current[0])

    meet = functools.partial(meet_compiled, current, compilation)
    passes = None if settings is None else graph_pass
    codes = regional.Codes()

    def by_regions(graph: GraphModule, is_backward: bool) -> Callable[..., Any] | None:
        current[0], reading = observe(graph, is_backward, compilation)
        if regional.has_symbols(graph):
            part = compilation.part(is_backward)
            say("%s graph: sizes are symbols, so it is compiled whole, not by regions", part)
            return None
        _write_plan(graph.graph, settings, current[0], reading)
        return regional.compile_by_regions(graph, codes, is_backward=is_backward)

    def compiled(graph: GraphModule, cut: _torch.Cut | _torch.AsOne | None) -> Callable[..., Any]:
        if options.executor == "aot_eager":
            return _torch.compile_with_aot_eager(
                graph,
                example_inputs,
                observe=note,
                compiled=meet,
                joint_pass=tag_for_recompute,
                graph_pass=passes,
                cut=cut,
            )
        return _torch.compile_with_inductor(
            graph,
            example_inputs,
            _torch.Passes(
                joint=tag_for_recompute,
                graph=passes,
                scheduler=_scheduler_pass(settings, base),
                uuid=uuid,
            ),
            observe=by_regions if options.executor == "regions" else note,
            compiled=meet,
            lowering=_lowering(settings),
            cudagraphs=options.cudagraphs,
            cut=cut,
        )

    code = compiled(gm, _torch.AS_ONE) if whole_step else few_layers_traced(gm, compiled)
    return compilation.limits.watching(code)


def _write_plan(
    graph: Graph, settings: Settings | None, observed: Observed, read: fx.Reading | None = None
) -> None:
    if settings is not None:
        bucket_and_reorder(graph, settings, carried_fqn, observed.planned, read)


def _as_planned(settings: Settings | None) -> bool:
    """Whether compute, too, keeps the order that the plan was made for."""
    return settings is not None and settings.reorder and settings.auto is not None


def _lowering(settings: Settings | None) -> Callable[[], AbstractContextManager[None]]:
    return fusions_as_planned if _as_planned(settings) else nullcontext


def _scheduler_pass(settings: Settings | None, identity: str) -> ImposeOrder | None:
    if settings is None or not settings.reorder:
        return None
    return ImposeOrder(settings.policy, _as_planned(settings), identity)


class Observed(NamedTuple):
    """What the ranks agreed on of a graph.

    Attributes:
        planned: its buckets, which the pass writes.
        launches: what it will communicate, line by line.
    """

    planned: tuple[PortableBucket, ...]
    launches: tuple[str, ...]


def observe(
    gm: GraphModule, is_backward: bool, compilation: Compilation
) -> tuple[Observed, fx.Reading | None]:
    """Choose the buckets of a graph, compare its launches across ranks, log it and show it.

    Called whether or not a cache has the code, with the graph that the passes will get. Where no
    passes are wanted, a graph that cannot be read leads to a warning only.

    Returns:
        What the ranks agreed on, and how the graph was read, if it could be.

    Raises:
        RankMismatchError: the ranks are about to communicate differently.
        PassError: it cannot be planned, on any rank; when all ranks have compared it.
        ValueError: likewise, and the user can mend it: no schedule fits the memory budget, say.
    """
    part = compilation.part(is_backward)
    begin = time.perf_counter()
    if part == "step":
        write_inputs_early(gm.graph, lambda value: True)
        fx.keep_written(gm.graph, lambda value: reduced_fqn(value) is None)
    elif part == "backward":  # sums of gradients that are deferred
        write_inputs_early(gm.graph, lambda value: reduced_fqn(value) is not None)
    if part != "forward":
        add_matmuls_in_place(gm.graph)
    write_sums_unrounded(gm.graph)
    found, number = _planned(gm, part, compilation)
    seconds = time.perf_counter() - begin
    lines = _agree_on_launches(part, found, number, compilation)
    ranges = _tell(gm, part, found, compilation)
    if isinstance(found, Exception):
        if compilation.settings is None:
            log.warning("%s graph: compiled as it is: it cannot be read: %s", part, found)
            return Observed((), lines), None
        if is_users(found):
            raise ValueError(f"{part} graph: {found}") from found
        raise PassError(f"{part} graph: {found}; {REMEDY}") from found
    settings, same = compilation.settings, compilation.number
    notify(CompiledGraph(part, found, settings, seconds, same, ranges=ranges))
    return Observed(found.planned, lines), found.reading


def meet_compiled(current: Sequence[Observed], compilation: Compilation, is_backward: bool) -> None:
    """Wait until all ranks have the code of a graph, before any of them runs it.

    A rank with a cold cache compiles for minutes; the others would wait for it in a collective,
    which the process group's timeout ends with an error that says nothing of compiling. A rank
    that compiles alone, what communicates the same as before, meets nobody.

    Raises:
        RankMismatchError: a rank has not compiled it in time.
    """
    part = compilation.part(is_backward)
    what = f"running the {part} graph"
    subject = [part, f"gradients {compilation.grad}", *current[0].launches]
    rank_guard.agree(what, subject, compilation.ranks, compilation.timeout_s, late=_COMPILING)


_COMPILING = (
    "They still compile it, or failed to; see their logs. Keep TORCHINDUCTOR_CACHE_DIR from run to "
    "run, or raise options['rank_guard_timeout_s']"
)


def _planned(
    gm: GraphModule, part: str, compilation: Compilation
) -> tuple[Rehearsal | Exception, int]:
    """What the passes will make of a graph, or why they cannot: the others wait to hear of it.

    And the number of the plan.
    """
    number = 0

    def choose(reading: fx.Reading, settings: Settings) -> Chosen:
        nonlocal number
        choice = plan_for_all(
            reading,
            settings,
            part=part,
            grad=compilation.grad,
            ranks=compilation.ranks,
            timeout_s=compilation.timeout_s,
        )
        number = choice.number
        if isinstance(choice.chosen, Exception):
            raise choice.chosen
        return choice.chosen

    try:
        return rehearse(gm, compilation.settings, carried_fqn, choose), number
    except RankMismatchError:
        raise
    except Exception as error:
        return error, number


def _agree_on_launches(
    part: str, found: Rehearsal | Exception, number: int, compilation: Compilation
) -> tuple[str, ...]:
    """Compare what a graph will launch, or why it cannot be planned; anew for each plan made."""
    failure = found if isinstance(found, Exception) else None
    lines = launches(found) if isinstance(found, Rehearsal) else [_cannot(found)]
    lines += [f"plan {number}"] if number else []
    try:
        ranks, timeout_s = compilation.ranks, compilation.timeout_s
        rank_guard.agree(f"the {part} graph to compile", lines, ranks, timeout_s)
    except RankMismatchError as error:
        raise error from failure
    return tuple(lines)


def _cannot(error: Exception) -> str:
    return f"cannot be planned: {error}"


def _tell(
    gm: GraphModule, part: Part, found: Rehearsal | Exception, compilation: Compilation
) -> tuple[SizeRange, ...]:
    """Log what a graph communicates, what the passes make of it, and within which sizes."""
    settings, timed = compilation.settings, log.isEnabledFor(level())
    ranges: tuple[SizeRange, ...] = ()

    def communicates() -> str:
        return describe(take_census(gm.graph), part)

    if isinstance(found, Rehearsal):
        _harmless(part, functools.partial(_trace, part, found))
        look = functools.partial(compilation.limits.ranges, part, found, settings)
        ranges = _harmless(part, functools.partial(look, timed=timed)) or ()
    if not timed:  # a prediction takes as long as the passes themselves
        return ranges
    line = _harmless(part, communicates) or f"{part}:"
    if isinstance(found, Rehearsal):
        line += _harmless(part, lambda: describe_passes(found, settings)) or ""
        line += "".join(f"; {describe_range(one)}" for one in ranges)
    else:
        line += f"; {_cannot(found)}"
    say("%s", line)
    return ranges


def _trace(part: str, found: Rehearsal) -> None:
    before, after = found.reading.program, found.after
    _torch.trace_artifact(f"simplefsdp_{part}_before", lambda: to_text(before))
    _torch.trace_artifact(f"simplefsdp_{part}", lambda: to_text(after))


def _harmless(part: str, describe_it: Callable[[], Any]) -> Any:
    """What a function for the log gives; if it fails, that is logged, and no more."""
    try:
        return describe_it()
    except Exception as error:
        log.warning("%s graph: the log cannot describe all of it: %r", part, error)
        return None
