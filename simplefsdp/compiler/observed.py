"""A graph before it is lowered: planned, compared with the other ranks', logged and shown.

Only planning and comparing can fail a compilation. What the ranks agreed on can be saved; a later
process that has the code (``warm_start.py``) has its ranks agree on the same again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters.in_place import write_inputs_early
from inductor_passes.adapters.lookups import look_up_once
from inductor_passes.adapters.matmuls import add_matmuls_in_place
from inductor_passes.adapters.scalars import reduce_at_once
from inductor_passes.adapters.unrounded import write_sums_unrounded
from inductor_passes.ir.text import to_text
from inductor_passes.passes import REMEDY, PassError, rehearse
from inductor_passes.rehearsal import Rehearsal, Settings, launches
from inductor_passes.size_range import SizeRange
from inductor_passes.transform.portable import PortableBucket
from simplefsdp import _torch, rank_guard
from simplefsdp.compiler import plans
from simplefsdp.compiler.breaks import notify
from simplefsdp.compiler.census import describe, describe_passes
from simplefsdp.compiler.observers import CompiledGraph, Part
from simplefsdp.compiler.plans import Asked, Choice, Chosen, Compilation
from simplefsdp.compiler.post_forward import gather_once
from simplefsdp.compiler.size_limits import describe_range, exceeded
from simplefsdp.compiler.written import gathered_again
from simplefsdp.provenance import carried_fqn, reduced_fqn
from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.rank_logging import level, say

log = logging.getLogger("simplefsdp")


class Observed(NamedTuple):
    """What the ranks agreed on for a graph."""

    planned: tuple[PortableBucket, ...] = ()  # its buckets, which the pass writes
    launches: tuple[str, ...] = ()  # what it will communicate, line by line
    again: frozenset[str] = frozenset()  # FQNs of what it gathers, if it is a backward graph
    asked: Asked | None = None  # what one rank planned for all; None if none did
    number: int = 0  # of that plan, or 0
    said: str = ""  # the line of the log; "" if nobody wanted it
    stands: bool = False  # a later process may reuse it: beside ``said`` there was nothing to log


def observe(
    gm: GraphModule, is_backward: bool, compilation: Compilation
) -> tuple[Observed, fx.Reading | None]:
    """Choose the buckets of a graph, compare its launches across ranks, log it, tell observers.

    Called whether or not Inductor's cache has the code, with the graph that the passes will get.
    Where no passes are wanted, a graph that cannot be read leads to a warning only. Returns what
    the ranks agreed on, and the graph as it was read, if it could be.

    Raises:
        RankMismatchError: the ranks are about to communicate differently.
        PassError: no rank can plan the graph; raised when all ranks have compared that.
        ValueError: likewise, and the user can mend it: no schedule fits the memory budget, say.
    """
    part = compilation.part(is_backward)
    again = gathered_again(gm.graph) if part == "backward" else frozenset()
    begin = time.perf_counter()
    gather_once(gm.graph)
    if part == "step":
        write_inputs_early(gm.graph, lambda value: True)
        fx.keep_written(gm.graph, lambda value: reduced_fqn(value) is None)
    elif part == "backward":  # sums of gradients that are deferred
        write_inputs_early(gm.graph, lambda value: reduced_fqn(value) is not None)
    if part != "forward":
        add_matmuls_in_place(gm.graph)
    write_sums_unrounded(gm.graph)
    look_up_once(gm.graph, carried_fqn)
    reduce_at_once(gm.graph, carried_fqn)
    found, choice = _planned(gm, part, compilation)
    seconds = time.perf_counter() - begin
    lines = launches(found) if isinstance(found, Rehearsal) else [_cannot(found)]
    try:
        _agree(f"the {part} graph to compile", part, lines, choice.number, compilation)
    except RankMismatchError as error:
        raise error from (found if isinstance(found, Exception) else None)
    ranges, said = _tell(gm, part, found, compilation)
    settings = compilation.settings
    if isinstance(found, Exception):
        if settings is None:
            log.warning("%s graph: compiled as it is: it cannot be read: %s", part, found)
            return Observed(launches=tuple(lines), again=again), None
        if plans.is_users(found):
            raise ValueError(f"{part} graph: {found}") from found
        raise PassError(f"{part} graph: {found}; {REMEDY}") from found
    notify(CompiledGraph(part, found, settings, seconds, compilation.number, ranges=ranges))
    stands = not ranges and exceeded(found, settings) is None
    observed = Observed(
        found.planned, tuple(lines), again, choice.asked, choice.number, said, stands
    )
    return observed, found.reading


def agree_again(observed: Observed, is_backward: bool, compilation: Compilation) -> None:
    """Repeat what :func:`observe` and :func:`meet_compiled` do among the ranks, for a graph whose
    code all ranks have. ``observed`` is what ranks agreed on when it was compiled."""
    part, number = compilation.part(is_backward), 0
    if observed.asked is not None:
        decide = functools.partial(plans.text_of_plan, observed.planned)
        number = plans.decision_for_all(observed.asked, compilation, decide).number
    _agree(f"the {part} graph to compile", part, observed.launches, number, compilation)
    if observed.said:
        say("%s", observed.said)
    meet_compiled(observed._replace(number=number), compilation, is_backward)


def meet_compiled(observed: Observed, compilation: Compilation, is_backward: bool) -> None:
    """Wait until all ranks have the code of a graph, before any of them runs it.

    A rank with a cold cache compiles for minutes; the others would wait for it in a collective,
    which the process group's timeout ends with an error that says nothing of compiling. A rank that
    alone compiles a graph which communicates the same as one before waits for nobody.
    """
    part = compilation.part(is_backward)
    compilation.again.update(observed.again)
    lines = [part, f"gradients {compilation.grad}", *observed.launches]
    _agree(f"running the {part} graph", part, lines, observed.number, compilation, late=_COMPILING)


_COMPILING = (
    "They still compile it, or failed to; see their logs. Keep TORCHINDUCTOR_CACHE_DIR from run to "
    "run, or raise options['rank_guard_timeout_s']"
)


def _agree(
    what: str,
    part: Part,
    lines: Sequence[str],
    number: int,
    compilation: Compilation,
    late: str = "",
) -> None:
    """Compare ``lines`` across ranks, and with them ``number``, that of the plan (0 for none): so
    ranks compare anew for each plan that is made."""
    lines = [*lines, *([f"plan {number}"] if number else [])]
    if compilation.alone and not rank_guard.was_agreed(lines, compilation.ranks):
        compilation.wait_no_longer(part)
    rank_guard.agree(
        what, lines, compilation.ranks, compilation.timeout_s, late=compilation.late or late
    )


def _planned(
    gm: GraphModule, part: Part, compilation: Compilation
) -> tuple[Rehearsal | Exception, Choice]:
    """What the passes will make of a graph, and the choice of its buckets. An error is returned,
    not raised: the other ranks wait to hear of it."""
    choice = Choice(())

    def choose(reading: fx.Reading, settings: Settings) -> Chosen:
        nonlocal choice
        choice = plans.plan_for_all(reading, settings, part, compilation)
        if isinstance(choice.chosen, Exception):
            raise choice.chosen
        return choice.chosen

    try:
        return rehearse(gm, compilation.settings, carried_fqn, choose), choice
    except (RankMismatchError, _torch.BackwardLaterError):
        raise
    except Exception as error:
        return error, choice


def _cannot(error: Exception) -> str:
    return f"cannot be planned: {error}"


def _tell(
    gm: GraphModule, part: Part, found: Rehearsal | Exception, compilation: Compilation
) -> tuple[tuple[SizeRange, ...], str]:
    """Log what a graph communicates, what the passes make of it, and for which open sizes its plan
    holds. Return these ranges of sizes, and the log line, or "" if logging is off."""
    settings, timed = compilation.settings, log.isEnabledFor(level())
    ranges: tuple[SizeRange, ...] = ()
    if isinstance(found, Rehearsal):
        _harmless(part, functools.partial(_trace, part, found))
        look = functools.partial(compilation.limits.ranges, part, found, settings)
        ranges = _harmless(part, functools.partial(look, timed=timed)) or ()
    if not timed:  # a prediction takes as long as the passes themselves
        return ranges, ""
    line = _harmless(part, lambda: describe(gm.graph, part)) or f"{part}:"
    if isinstance(found, Rehearsal):
        line += _harmless(part, lambda: describe_passes(found, settings)) or ""
        line += "".join(f"; {describe_range(one)}" for one in ranges)
    else:
        line += f"; {_cannot(found)}"
    say("%s", line)
    return ranges, line


def _trace(part: str, found: Rehearsal) -> None:
    before, after = found.reading.program, found.after
    _torch.trace_artifact(f"simplefsdp_{part}_before", lambda: to_text(before))
    _torch.trace_artifact(f"simplefsdp_{part}", lambda: to_text(after))


def _harmless(part: str, describe_it: Callable[[], Any]) -> Any:
    """The result of a function that serves the log only; if it fails, a warning and None."""
    try:
        return describe_it()
    except Exception as error:
        log.warning("%s graph: the log cannot describe all of it: %r", part, error)
        return None
