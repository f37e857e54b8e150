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


class Choice(NamedTuple):
    """The buckets of a graph.

    Attributes:
        chosen: them; or why there are none.
        number: the same on all ranks, and for no other plan; 0 if no rank planned for others.
    """

    chosen: Chosen | Exception
    number: int


class _Decision(NamedTuple):
    """What the planning rank told all: buckets, or why there are none."""

    planned: tuple[PortableBucket, ...] | Exception
    number: int


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
        return Choice(_attempt(partial(choose, reading, settings)), 0)
    known = decisions()
    ours = tuple(communicated(reading.program, sizes=True))
    key = ("plan", tuple(ranks), part, grad, repr(settings), ours)
    mine: Chosen | Exception | None = None
    decision: _Decision | None = known.get(key)
    if decision is None:

        def decide() -> str:
            nonlocal mine
            mine = _attempt(partial(choose, reading, settings, recalled))
            return _to_text(reading, mine)

        of_settings = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
        subject = [f"grad {grad}, settings {of_settings}", *communicated(reading.program)]
        text = decided(f"the plan of the {part} graph", subject, ranks, decide, timeout_s)
        decision = _from_text(text)
        if not isinstance(decision.planned, Exception):
            known[key] = decision
    if mine is not None:
        return Choice(mine, decision.number)
    if isinstance(decision.planned, Exception):
        return Choice(decision.planned, decision.number)
    used = _attempt(partial(as_planned, reading, auto, decision.planned))
    return Choice(used, decision.number)


def _attempt(function: Callable[[], Chosen]) -> Chosen | Exception:
    try:
        return function()
    except Exception as error:  # of whatever kind: the others wait to hear of it
        return error


def _to_text(reading: fx.Reading, chosen: Chosen | Exception) -> str:
    number = next(_numbers)
    if isinstance(chosen, Exception):
        return json.dumps({"number": number, "error": str(chosen), "users": is_users(chosen)})
    buckets = chosen.buckets if isinstance(chosen, Plan) else chosen
    return json.dumps({"number": number, "buckets": to_json(in_names(reading.program, buckets))})


def _from_text(text: str) -> _Decision:
    told = json.loads(text)
    if "error" not in told:
        return _Decision(from_json(told["buckets"]), told["number"])
    kind = ValueError if told["users"] else ProgramError
    return _Decision(kind(told["error"]), told["number"])
