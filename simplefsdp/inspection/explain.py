"""Why a collective is exposed: what kept it from starting earlier, or from being waited for later.

The exposed time of a collective is split by cause, with shares derived from the simulated run:

1. *Held back*: its lane stood idle while the collective could have been under way (for a gather,
   before it began; for a reduce, after its wait, while compute was left). This share would be
   hidden if the collective started earlier, or was waited for later. The cause is the **memory
   budget**, if the bytes that it would then hold do not fit; else a **prefetch limit**.
2. **wire-bound**: the collective could have begun earlier if not for transfers before it.
3. The rest, for which it began as soon as it could. This is **first use**, if the graph starts or
   ends with the collective, so that there is no compute to run meanwhile; else **dependency**.

Each idle time is used only once: idle time that would hide one collective cannot hide another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from inductor_passes.ir.lineage import behind_reduces
from inductor_passes.ir.program import Collective, Program
from inductor_passes.machine.simulate import Span, Timeline
from inductor_passes.transform.order import OverlapPolicy
from simplefsdp.inspection.lanes import Lane, arrivals, lanes_of
from simplefsdp.inspection.names import nbytes_text
from simplefsdp.words import plural

Reason = Literal["first use", "memory budget", "prefetch limit", "dependency", "wire-bound"]
_TINY_US = 1e-6
_HIDDEN: tuple[Literal[""], float, str] = ("", 0.0, "")


@dataclass(frozen=True)
class Limits:
    """The limits that the planner and the reordering had to keep."""

    policy: OverlapPolicy | None = None  # for buckets without a window; None if nothing is moved
    budget_nbytes: int | None = None  # highest number of live bytes allowed; None without budget
    live_nbytes: tuple[int, ...] = ()  # live bytes during each op, as the budget counts them
    placed_by: str = ""  # the name of a pass of torch's, whose rules are not known here


@dataclass(frozen=True)
class Exposure:
    """When one collective ran, how much of it is exposed, and why."""

    launch_us: float  # when the compute lane launches it
    begin_us: float  # when its transfer begins
    end_us: float  # when its transfer ends
    ready_us: float  # the earliest time at which its inputs could be there
    needed_us: float  # when the compute lane reaches its wait
    exposed_us: float
    shares: Mapping[Reason, float]  # of ``exposed_us`` by cause; they add up to it
    reason: Reason | Literal[""]  # the cause of the largest share; empty if nothing is exposed
    why: str  # a sentence on that cause, with figures

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


def explain(program: Program, timeline: Timeline, limits: Limits) -> dict[str, Exposure]:
    """The exposure of each start op by name, in the order of the program."""
    run = _Run(program, timeline, limits)
    # Gathers could start earlier, so idle time is assigned to them in order. Reduces could be
    # waited for later, so it is assigned to them from the last to the first.
    gathers = [i for i in program.waits_of if program.ops[i].sends == "gather"]
    others = [i for i in program.waits_of if program.ops[i].sends != "gather"]
    found = {i: run.explain(i) for i in (*gathers, *reversed(others))}
    return {program.ops[i].name: found[i] for i in program.waits_of}


class _Run:
    def __init__(self, program: Program, timeline: Timeline, limits: Limits) -> None:
        self.program, self.timeline, self.limits = program, timeline, limits
        self.span_of: dict[str, Span] = {span.op: span for span in timeline.spans}
        self.arrival = arrivals(program, timeline)
        self.lanes = lanes_of(timeline)
        self.taken: defaultdict[tuple[str, bool], float] = defaultdict(float)

    def explain(self, i: int) -> Exposure:
        name = self.program.ops[i].name
        span, exposed = self.span_of[name], self.timeline.exposed_us[name]
        wait = min(self.program.waits_of[i])
        ready, needed = self._ready_us(i), self.arrival[wait]
        causes = list(self._causes(i, wait, span, ready, exposed))
        reason, _, why = max(causes, key=lambda cause: cause[1], default=_HIDDEN)
        return Exposure(
            self.arrival[i],
            span.begin_us,
            span.end_us,
            ready,
            needed,
            exposed,
            {cause: us for cause, us, _ in causes},
            reason,
            why,
        )

    def _causes(
        self, i: int, wait: int, span: Span, ready: float, exposed: float
    ) -> Iterator[tuple[Reason, float, str]]:
        c = self.program.sent[self.program.ops[i].name]
        if exposed <= _TINY_US:
            return
        gathers = c.kind == "gather"
        lane = self.lanes[c.group]
        held = min(exposed, self._room_us(c, wait, span, ready, lane))
        if held > _TINY_US:
            self.taken[c.group, gathers] += held
            yield self._held_back(i, wait, c, held, lane)
        busy = lane.busy_us(ready, span.begin_us)
        # Idle time that was assigned to another gather counts as busy.
        queue = span.begin_us - ready - held if gathers else busy
        queued = min(exposed - held, max(0.0, queue))
        if queued > _TINY_US:
            why = f"the lane was busy with other transfers for {busy:,.0f} us since it could have "
            yield "wire-bound", queued, why + f"started, at {ready:,.0f} us"
        rest = exposed - held - queued
        if rest > _TINY_US:
            yield self._as_soon_as_it_could(i, wait, ready, rest)

    def _room_us(self, c: Collective, wait: int, span: Span, ready: float, lane: Lane) -> float:
        """Idle time of the lane in which the collective could have been under way."""
        if c.kind == "other":
            return 0.0  # collectives of other code are not to be moved
        early = lane.idle_us(ready, span.begin_us)
        if c.kind == "gather":
            return max(0.0, early - self.taken[c.group, True])
        late = lane.idle_us(span.end_us, self.timeline.total_us) - self.taken[c.group, False]
        return early + max(0.0, min(late, self._compute_after[wait]))

    def _held_back(
        self, i: int, wait: int, c: Collective, held: float, lane: Lane
    ) -> tuple[Reason, float, str]:
        op = self.program.ops[i]
        begin, nbytes = self.span_of[op.name].begin_us, c.nbytes
        if c.kind == "gather" or lane.idle_us(self._ready_us(i), begin) >= held:
            from_us, to_us = lane.idle_before(begin, held), self.arrival[i]
            change = f"started {begin - from_us:,.0f} us earlier, {held:,.0f} us would be hidden"
            # A reduce's inputs are live already, so an earlier start costs only its outputs.
            nbytes = sum(self.program.buffers[name].nbytes for name in op.writes)
        else:
            from_us = self.arrival[wait]
            to_us = from_us + held
            change = f"waited for {held:,.0f} us later, {held:,.0f} us would be hidden"
        held_nbytes = zip(self.limits.live_nbytes, self.arrival, strict=False)
        live = max((n for n, us in held_nbytes if from_us <= us <= to_us), default=0)
        budget = self.limits.budget_nbytes
        if budget is not None and live + nbytes > budget:
            more, beside = nbytes_text(nbytes), nbytes_text(live)
            why = f"{change}, but {more} more do not fit beside {beside} into {nbytes_text(budget)}"
            return "memory budget", held, why
        return "prefetch limit", held, f"{self._window_text(c)}; {change}"

    def _window_text(self, c: Collective) -> str:
        policy = self.limits.policy
        gathers = c.kind == "gather"
        if self.limits.placed_by:
            return f"{self.limits.placed_by} left it here"
        if policy is None:
            return f"nothing moves it: it {'starts' if gathers else 'is waited for'} in place"
        default = policy.max_inflight_gathers if gathers else policy.max_pending_reduces
        window = c.window or default
        if window < 0:
            behind = "the next" if window == -1 else f"number {-window} of the next"
            return f"window {window}: waited for just before {behind} gathered bucket is used"
        return f"window {window}: at most {plural(window, 'bucket')} " + (
            "in flight" if gathers else "of gradients pending"
        )

    def _as_soon_as_it_could(
        self, i: int, wait: int, ready: float, rest: float
    ) -> tuple[Reason, float, str]:
        kind = self.program.ops[i].sends
        if kind == "gather" and ready <= self._start_us:
            return "first use", rest, "the graph starts with it: there is nothing to hide behind"
        if kind in ("reduce", "all_reduce") and self._compute_after[wait] <= _TINY_US:
            why = "its gradients are the last: no compute is left to hide behind"
            return "first use", rest, why
        made = self._maker(i)
        after = f"as soon as {made} was done" if made else "at once"
        later = self.arrival[wait] - self.arrival[i]
        return "dependency", rest, f"it began {after}, and is needed {later:,.0f} us later"

    @cached_property
    def _start_us(self) -> float:
        """When the first wait begins: what is ready by then was ready from the start."""
        first = next((i for i, op in enumerate(self.program.ops) if op.kind == "wait"), None)
        return self.arrival[first] + _TINY_US if first is not None else _TINY_US

    @cached_property
    def _free(self) -> list[bool]:
        """For each op, whether it is computed from inputs alone, and so could run at any time."""
        found: list[bool] = []
        for i, op in enumerate(self.program.ops):
            movable = op.kind in ("compute", "view")
            found.append(movable and all(found[j] for j in self.program.predecessors[i]))
        return found

    def _ready_us(self, i: int) -> float:
        """The earliest time at which the inputs of a start could be there. Ops that are computed
        from inputs alone are taken to run at the beginning."""
        us, free_us = 0.0, 0.0
        stack, seen = list(self.program.predecessors[i]), set[int]()
        while stack:
            j = stack.pop()
            if j in seen:
                continue
            seen.add(j)
            if self._free[j]:
                free_us += self._compute_us(j)
                stack += self.program.predecessors[j]
            else:
                us = max(us, self.arrival[j + 1])
        return min(max(us, free_us), self.span_of[self.program.ops[i].name].begin_us)

    def _maker(self, i: int) -> str:
        """Name of the last op before a start that it needs and that could not run at any time."""
        needed = [j for j in self.program.predecessors[i] if not self._free[j]]
        while needed and self.program.ops[last := max(needed)].kind == "view":
            needed = [j for j in self.program.predecessors[last] if not self._free[j]]
        return self.program.ops[max(needed)].name if needed else ""

    @cached_property
    def _compute_after(self) -> list[float]:
        """For each op, the time of the compute after it, without compute that needs the result of a
        reduce: that would move together with the waits."""
        late = behind_reduces(self.program)
        found, us = [0.0] * len(self.program.ops), 0.0
        for i in reversed(range(len(found))):
            found[i] = us
            us += 0.0 if i in late else self._compute_us(i)
        return found

    def _compute_us(self, i: int) -> float:
        op = self.program.ops[i]
        if op.kind != "compute":
            return 0.0
        span = self.span_of[op.name]
        return span.end_us - span.begin_us
