"""One rank's plan for all: the automatic planner's buckets, made once and sent to everybody.

What a planner chooses depends on times and sizes of compute, which differ between ranks: their
batches may, and under context parallelism a rank attends to more than another. So the ranks only
agree on what is communicated. The lowest of them plans, and the others use its plan.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from inductor_passes.adapters import fx
from inductor_passes.ir.program import Bucket, ProgramError
from inductor_passes.planner.plan import Plan
from inductor_passes.rehearsal import Settings, as_planned, choose, communicated
from inductor_passes.transform.portable import PortableBucket, from_json, in_names, to_json
from simplefsdp.compiler.plan_files import recalled
from simplefsdp.rank_guard import decided, decisions

Chosen = Plan | tuple[Bucket, ...]
_numbers = itertools.count(1)


class Decision(NamedTuple):
    """What the planning rank told all.

    Attributes:
        planned: buckets, or why there are none.
        number: the same on all ranks, and for no other plan.
    """

    planned: tuple[PortableBucket, ...] | Exception
    number: int


class Asked(NamedTuple):
    """What one rank plans for all.

    Attributes:
        part: ``"forward"`` or ``"backward"``, for messages.
        grad: whether it is of a training step. What is freed in an evaluation is kept in a training
            step, which may communicate the same.
        settings: what to do, as text.
        lines: what is communicated, the same on all ranks.
        sized: the same with sizes, which may differ.
    """

    part: str
    grad: bool
    settings: str
    lines: tuple[str, ...]
    sized: tuple[str, ...]


class Choice(NamedTuple):
    """The buckets of a graph.

    Attributes:
        chosen: them; or why there are none.
        number: of the decision; 0 if no rank planned for others.
        asked: what was decided; None likewise.
    """

    chosen: Chosen | Exception
    number: int = 0
    asked: Asked | None = None


def is_users(error: Exception) -> bool:
    """Whether the user can mend what a planner complains of: no schedule fits the budget, say."""
    return isinstance(error, ValueError) and not isinstance(error, ProgramError)


def plan_for_all(
    reading: fx.Reading,
    settings: Settings,
    *,
    part: str,
    grad: bool,
    ranks: Sequence[int],
    timeout_s: float,
) -> Choice:
    """The buckets of a graph, the same on all ranks in portable names.

    A plan that was made before for a graph that communicates the same stands: one rank may compile
    again for another batch size, and the others, who do not, go on with theirs. A failure does
    not stand: the user may try again.

    Args:
        reading: the graph.
        settings: what to do.
        part: ``"forward"`` or ``"backward"``, for messages.
        grad: whether it is of a training step. What is freed in an evaluation is kept in a training
            step, which may communicate the same.
        ranks: that the graph is compiled on together; this one plans for itself if it is alone.
        timeout_s: how long to wait for the others.

    Raises:
        RankMismatchError: the ranks are about to communicate differently, or one did not come.
    """
    auto = settings.auto
    if auto is None:  # follows from what is communicated, and so is the same anyway
        return Choice(_attempt(partial(choose, reading, settings)))
    asked = Asked(
        part,
        grad,
        repr(settings),
        tuple(communicated(reading.program)),
        tuple(communicated(reading.program, sizes=True)),
    )
    mine: Chosen | Exception | None = None

    def decide() -> str:
        nonlocal mine
        mine = _attempt(partial(choose, reading, settings, recalled))
        if isinstance(mine, Exception):
            return _error_text(mine)
        buckets = mine.buckets if isinstance(mine, Plan) else mine
        return text_of_plan(in_names(reading.program, buckets))

    decision = decision_for_all(asked, ranks, decide, timeout_s)
    if mine is not None:
        return Choice(mine, decision.number, asked)
    if isinstance(decision.planned, Exception):
        return Choice(decision.planned, decision.number, asked)
    used = _attempt(partial(as_planned, reading, auto, decision.planned))
    return Choice(used, decision.number, asked)


def decision_for_all(
    asked: Asked, ranks: Sequence[int], decide: Callable[[], str], timeout_s: float
) -> Decision:
    """What the lowest of ``ranks`` decides now, or what was decided before."""
    decision = decision_before(asked, ranks)
    if decision is None:
        of_settings = hashlib.sha256(asked.settings.encode()).hexdigest()[:16]
        subject = [f"grad {asked.grad}, settings {of_settings}", *asked.lines]
        what = f"the plan of the {asked.part} graph"
        decision = _from_text(decided(what, subject, ranks, decide, timeout_s))
        if not isinstance(decision.planned, Exception):
            decisions()[_key(asked, ranks)] = decision
    return decision


def decision_before(asked: Asked, ranks: Sequence[int]) -> Decision | None:
    """What was decided in this process, if it was."""
    return decisions().get(_key(asked, ranks))


def _key(asked: Asked, ranks: Sequence[int]) -> object:
    return "plan", tuple(ranks), asked._replace(lines=())


def _attempt(function: Callable[[], Chosen]) -> Chosen | Exception:
    try:
        return function()
    except Exception as error:  # of whatever kind: the others wait to hear of it
        return error


def text_of_plan(planned: Sequence[PortableBucket]) -> str:
    """A plan, under a new number, as the planning rank tells it."""
    return json.dumps({"number": next(_numbers), "buckets": to_json(planned)})


def _error_text(error: Exception) -> str:
    number = next(_numbers)
    return json.dumps({"number": number, "error": str(error), "users": is_users(error)})


def _from_text(text: str) -> Decision:
    told = json.loads(text)
    if "error" not in told:
        return Decision(from_json(told["buckets"]), told["number"])
    kind = ValueError if told["users"] else ProgramError
    return Decision(kind(told["error"]), told["number"])
