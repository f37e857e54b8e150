"""A graph before it is lowered: planned, compared with the other ranks', logged and shown.

Of these only the first two can fail a compilation. What the ranks agreed on can be kept, and gone
through again by a later process that has the code (``warm_start.py``).
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
from inductor_passes.adapters.matmuls import add_matmuls_in_place
from inductor_passes.adapters.unrounded import write_sums_unrounded
from inductor_passes.ir.text import to_text
from inductor_passes.passes import REMEDY, PassError, rehearse
from inductor_passes.rehearsal import Rehearsal, Settings, launches
from inductor_passes.size_range import SizeRange
from inductor_passes.transform.portable import PortableBucket
from simplefsdp import _torch, rank_guard
from simplefsdp.compiler.breaks import notify
from simplefsdp.compiler.census import describe, describe_passes, take_census
from simplefsdp.compiler.observers import CompiledGraph, Part
from simplefsdp.compiler.plans import (
    Asked,
    Choice,
    Chosen,
    decision_for_all,
    is_users,
    plan_for_all,
    text_of_plan,
)
from simplefsdp.compiler.size_limits import SizeLimits, describe_range, exceeds
from simplefsdp.provenance import carried_fqn, reduced_fqn
from simplefsdp.rank_guard import RankMismatchError
from simplefsdp.rank_logging import level, say

log = logging.getLogger("simplefsdp")


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


class Observed(NamedTuple):
    """What the ranks agreed on of a graph.

    Attributes:
        planned: its buckets, which the pass writes.
        launches: what it will communicate, line by line.
        asked: what one rank planned for all; None if none did.
        number: of that plan, or 0.
        said: the line of the log; "" if nobody wanted it.
        stands: a later process may go by it: nothing else was to be said.
    """

    planned: tuple[PortableBucket, ...] = ()
    launches: tuple[str, ...] = ()
    asked: Asked | None = None
    number: int = 0
    said: str = ""
    stands: bool = False


def observe(
    gm: GraphModule, is_backward: bool, compilation: Compilation
) -> tuple[Observed, fx.Reading | None]:
    """Choose the buckets of a graph, compare its launches across ranks, log it and show it.

    Called whether or not Inductor's cache has the code, with the graph that the passes will get.
    Where no passes are wanted, a graph that cannot be read leads to a warning only.

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
    found, choice = _planned(gm, part, compilation)
    seconds = time.perf_counter() - begin
    lines = launches(found) if isinstance(found, Rehearsal) else [_cannot(found)]
    try:
        _agree_on_launches(part, lines, choice.number, compilation)
    except RankMismatchError as error:
        raise error from (found if isinstance(found, Exception) else None)
    ranges, said = _tell(gm, part, found, compilation)
    settings, same = compilation.settings, compilation.number
    if isinstance(found, Exception):
        if settings is None:
            log.warning("%s graph: compiled as it is: it cannot be read: %s", part, found)
            return Observed(launches=tuple(lines)), None
        if is_users(found):
            raise ValueError(f"{part} graph: {found}") from found
        raise PassError(f"{part} graph: {found}; {REMEDY}") from found
    notify(CompiledGraph(part, found, settings, seconds, same, ranges=ranges))
    stands = not ranges and not exceeds(found, settings)
    of_plan = (choice.asked, choice.number, said, stands)
    return Observed(found.planned, tuple(lines), *of_plan), found.reading


def agree_again(observed: Observed, is_backward: bool, compilation: Compilation) -> None:
    """What :func:`observe` and :func:`meet_compiled` do among the ranks, for a graph that all of
    them have the code of, and agreed on before as they do now.

    Raises:
        RankMismatchError: a rank did not come in time.
    """
    part, number = compilation.part(is_backward), 0
    if observed.asked is not None:
        decide = functools.partial(text_of_plan, observed.planned)
        ranks, timeout_s = compilation.ranks, compilation.timeout_s
        number = decision_for_all(observed.asked, ranks, decide, timeout_s).number
    _agree_on_launches(part, observed.launches, number, compilation)
    if observed.said:
        say("%s", observed.said)
    meet_compiled(observed._replace(number=number), compilation, is_backward)


def meet_compiled(observed: Observed, compilation: Compilation, is_backward: bool) -> None:
    """Wait until all ranks have the code of a graph, before any of them runs it.

    A rank with a cold cache compiles for minutes; the others would wait for it in a collective,
    which the process group's timeout ends with an error that says nothing of compiling. A rank
    that compiles alone, what communicates the same as before, meets nobody.

    Raises:
        RankMismatchError: a rank has not compiled it in time.
    """
    part = compilation.part(is_backward)
    what = f"running the {part} graph"
    subject = [part, f"gradients {compilation.grad}"]
    subject += _with_number(observed.launches, observed.number)
    rank_guard.agree(what, subject, compilation.ranks, compilation.timeout_s, late=_COMPILING)


_COMPILING = (
    "They still compile it, or failed to; see their logs. Keep TORCHINDUCTOR_CACHE_DIR from run to "
    "run, or raise options['rank_guard_timeout_s']"
)


def _planned(
    gm: GraphModule, part: str, compilation: Compilation
) -> tuple[Rehearsal | Exception, Choice]:
    """What the passes will make of a graph, or why they cannot: the others wait to hear of it.

    And how it was planned.
    """
    choice = Choice(())

    def choose(reading: fx.Reading, settings: Settings) -> Chosen:
        nonlocal choice
        choice = plan_for_all(
            reading,
            settings,
            part=part,
            grad=compilation.grad,
            ranks=compilation.ranks,
            timeout_s=compilation.timeout_s,
        )
        if isinstance(choice.chosen, Exception):
            raise choice.chosen
        return choice.chosen

    try:
        return rehearse(gm, compilation.settings, carried_fqn, choose), choice
    except RankMismatchError:
        raise
    except Exception as error:
        return error, choice


def _agree_on_launches(
    part: str, lines: Sequence[str], number: int, compilation: Compilation
) -> None:
    """Compare what a graph will launch, or why it cannot be planned; anew for each plan made."""
    lines, ranks = _with_number(lines, number), compilation.ranks
    rank_guard.agree(f"the {part} graph to compile", lines, ranks, compilation.timeout_s)


def _with_number(lines: Sequence[str], number: int) -> list[str]:
    return [*lines, *([f"plan {number}"] if number else [])]


def _cannot(error: Exception) -> str:
    return f"cannot be planned: {error}"


def _tell(
    gm: GraphModule, part: Part, found: Rehearsal | Exception, compilation: Compilation
) -> tuple[tuple[SizeRange, ...], str]:
    """Log what a graph communicates, what the passes make of it, and within which sizes.

    Returns:
        The sizes, and the line of the log; "" if nobody wants it.
    """
    settings, timed = compilation.settings, log.isEnabledFor(level())
    ranges: tuple[SizeRange, ...] = ()

    def communicates() -> str:
        return describe(take_census(gm.graph), part)

    if isinstance(found, Rehearsal):
        _harmless(part, functools.partial(_trace, part, found))
        look = functools.partial(compilation.limits.ranges, part, found, settings)
        ranges = _harmless(part, functools.partial(look, timed=timed)) or ()
    if not timed:  # a prediction takes as long as the passes themselves
        return ranges, ""
    line = _harmless(part, communicates) or f"{part}:"
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
    """What a function for the log gives; if it fails, that is logged, and no more."""
    try:
        return describe_it()
    except Exception as error:
        log.warning("%s graph: the log cannot describe all of it: %r", part, error)
        return None
