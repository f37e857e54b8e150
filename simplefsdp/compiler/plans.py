"""One rank's plan for all: the automatic planner's buckets, made once and sent to everybody.

A planner's choice depends on times and sizes of compute, which may differ between ranks: so may
their batches, and under context parallelism one rank attends to more tokens than another. Thus the
ranks agree only on what is communicated. The lowest rank plans, and the others use its plan.

Plans are kept on disk, beside Inductor's caches: what was planned before is not planned again. A
plan is the same whenever it is made of the same program, costs and budget by the same code, so
these are its key. Only the rank that plans reads or writes there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from inductor_passes.adapters import fx
from inductor_passes.ir.json_file import MIB, parse_json
from inductor_passes.ir.program import Bucket, ProgramError
from inductor_passes.planner.plan import Plan
from inductor_passes.rehearsal import Settings, as_planned, choose, communicated
from inductor_passes.transform.portable import PortableBucket, from_json, in_names, to_json
from simplefsdp import _torch
from simplefsdp.compiler.cache_key import identity, sources
from simplefsdp.compiler.observers import Part
from simplefsdp.compiler.options import Options
from simplefsdp.compiler.size_limits import SizeLimits
from simplefsdp.rank_guard import LATE, decided, decisions

FOLDER = "simplefsdp_plans"
_MOST_NBYTES = 64 * MIB

log = logging.getLogger("simplefsdp")

_OTHERWISE = (
    "This rank compiles again what those have compiled, and then communicates otherwise: for "
    "inputs that need gradients, say, or a parameter that was frozen. TORCH_LOGS=recompiles says "
    f"what differs between its calls; let it be the same on all ranks. Else: {LATE}"
)

Chosen = Plan | tuple[Bucket, ...]
_numbers = itertools.count(1)


class Compilation(NamedTuple):
    """What a forward graph and its backward have in common."""

    options: Options  # the user's, with the executor that was chosen for it
    settings: Settings | None  # of the passes; None for none
    ranks: tuple[int, ...]  # that compile together; none if they do not compare
    grad: bool  # whether gradients are wanted
    number: int  # which no other compilation has
    limits: SizeLimits  # of the sizes that were left open
    again: set[str]  # FQNs of what backward gathers, once that is known
    # Whether the forward graph computes its gradients itself (its last input is the gradient of
    # the loss), and uses them.
    whole_step: bool = False
    alone: bool = False  # the other ranks have this compiled, or something like it

    @property
    def timeout_s(self) -> float:
        """How long to wait for the other ranks."""
        return self.options.rank_guard_timeout_s

    @property
    def identity(self) -> str:
        """The passes' identity for caches."""
        return identity(self.settings)

    @property
    def late(self) -> str:
        """Why other ranks may not come, if this one compiles alone what they have compiled."""
        return _OTHERWISE if self.alone else ""

    def wait_no_longer(self, part: Part) -> None:
        """Called before this rank would wait for others to agree on a graph. Raises
        ``BackwardLaterError`` if this rank alone compiles a backward graph, together with its
        forward: the others wait in their forward. When backward runs they come, and the graph is
        compiled."""
        if self.alone and part == "backward" and _torch.may_be_compiled_later():
            _torch.expect_backward_later()
            raise _torch.BackwardLaterError

    def part(self, is_backward: bool) -> Part:
        """What a graph of this compilation is."""
        if self.whole_step:
            return "step"
        return "backward" if is_backward else "forward"


class Decision(NamedTuple):
    """What the planning rank told all."""

    planned: tuple[PortableBucket, ...] | Exception  # buckets, or why there are none
    number: int  # the same on all ranks, and for no other plan


class Asked(NamedTuple):
    """What one rank plans for all."""

    part: Part  # of a step
    # Whether gradients are wanted. An evaluation may communicate the same as a training step, but
    # frees what a training step keeps.
    grad: bool
    settings: str  # of the passes, as text
    lines: tuple[str, ...]  # what is communicated, the same on all ranks
    sized: tuple[str, ...]  # the same with sizes, which may differ


class Choice(NamedTuple):
    """The buckets of a graph."""

    chosen: Chosen | Exception  # or why there are none
    number: int = 0  # of the decision; 0 if no rank planned for others
    asked: Asked | None = None  # what the decision is about; None if no rank planned for others


def is_users(error: Exception) -> bool:
    """Whether the user can mend what a planner complains of: no schedule fits the budget, say."""
    return isinstance(error, ValueError) and not isinstance(error, ProgramError)


def plan_for_all(
    reading: fx.Reading, settings: Settings, part: Part, compilation: Compilation
) -> Choice:
    """The buckets of a graph, the same on all ranks in portable names.

    An earlier plan for a graph that communicates the same is used again: one rank alone may compile
    again for another batch size, while the others go on with the plan that they have. A failure is
    not remembered: the user may try again.
    """
    auto = settings.auto
    if auto is None:  # follows from what is communicated, and so is the same anyway
        return Choice(_attempt(partial(choose, reading, settings)))
    asked = Asked(
        part,
        compilation.grad,
        repr(settings),
        tuple(communicated(reading.program)),
        tuple(communicated(reading.program, sizes=True)),
    )
    mine: Chosen | Exception | None = None

    def decide() -> str:
        nonlocal mine
        try:  # whatever fails: the others wait to hear of it
            mine = choose(reading, settings, recalled)
            buckets = mine.buckets if isinstance(mine, Plan) else mine
            return text_of_plan(in_names(reading.program, buckets))
        except Exception as error:
            mine = error
            told = {"error": str(error), "users": is_users(error)}
            return json.dumps({"number": next(_numbers), **told})

    planned, number = decision_for_all(asked, compilation, decide)
    if mine is not None:
        return Choice(mine, number, asked)
    if isinstance(planned, Exception):
        return Choice(planned, number, asked)
    return Choice(_attempt(partial(as_planned, reading, auto, planned)), number, asked)


def decision_for_all(asked: Asked, compilation: Compilation, decide: Callable[[], str]) -> Decision:
    """What the lowest of the ranks decides now, or what was decided before."""
    ranks = compilation.ranks
    decision = decision_before(asked, ranks)
    if decision is None:
        compilation.wait_no_longer(asked.part)
        of_settings = hashlib.sha256(asked.settings.encode()).hexdigest()[:16]
        subject = [f"grad {asked.grad}, settings {of_settings}", *asked.lines]
        what, timeout_s = f"the plan of the {asked.part} graph", compilation.timeout_s
        decision = _from_text(decided(what, subject, ranks, decide, timeout_s, compilation.late))
        if not isinstance(decision.planned, Exception):
            decisions()[_key(asked, ranks)] = decision
    return decision


def decision_before(asked: Asked, ranks: Sequence[int]) -> Decision | None:
    """The decision that this process knows already; None if there is none."""
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


def _from_text(text: str) -> Decision:
    told = json.loads(text)
    if "error" not in told:
        return Decision(from_json(told["buckets"]), told["number"])
    kind = ValueError if told["users"] else ProgramError
    return Decision(kind(told["error"]), told["number"])


def recalled(made_of: str, make: Callable[[], Plan]) -> Plan:
    """The plan that ``make`` makes. It is read from disk if an earlier process made it with the
    same sources of the same ``made_of``, a text of program, costs and budget; else made now and
    saved."""
    name = f"{hashlib.sha256(f'{sources()}{made_of}'.encode()).hexdigest()}.json"
    content = _torch.read_kept(FOLDER, name)
    try:
        if content is not None and len(content) <= _MOST_NBYTES:
            return _plan_of(parse_json(content))
    except (ValueError, TypeError, KeyError) as error:
        log.debug("the plan in %s cannot be read, and is made anew: %s", name, error)
    plan = make()
    try:
        _torch.keep(FOLDER, name, json.dumps(asdict(plan)).encode())
    except OSError as error:  # it would only have saved time
        log.debug("the plan cannot be kept in %s: %s", name, error)
    return plan


def _plan_of(told: Any) -> Plan:
    buckets = (Bucket(b["label"], tuple(b["starts"]), b["window"]) for b in told["buckets"])
    return Plan(**{**told, "buckets": tuple(buckets)})
