"""Why a collective is exposed: what its start, or its wait, was held back by.

Exposed time is split by cause, each share derived from the simulated run:

1. *Held back*: the lane stood idle while the collective could have been under way (a gather,
   before it began; a reduce, after it was waited for while compute was left). It would not be
   exposed if it had started earlier, or been waited for later. What forbade it is the **memory
   budget**, if the bytes it then holds do not fit; else a **prefetch limit**.
2. **wire-bound**: the collective could have begun earlier, but for transfers before it.
3. The rest: it began as soon as it could. **first use**, if the graph starts with it or ends with
   it, so that there is no compute to run meanwhile; else **dependency**.

Idle time is given away once: what would hide one collective cannot hide another.
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
    """What held the planner or the order back."""

    policy: OverlapPolicy | None = None  # of buckets without a window; None if nothing is moved
    budget_nbytes: int | None = None  # most live bytes that were allowed; None if nobody asked
    live_nbytes: tuple[int, ...] = ()  # those during each op, as the budget counts them
    placed_by: str = ""  # the name of somebody else's pass, whose rules are not known here


@dataclass(frozen=True)
class Exposure:
    """When one collective ran, and what of it is exposed, why."""

    launch_us: float  # the compute lane starts it
    begin_us: float  # its transfer begins
    end_us: float  # it has arrived
    ready_us: float  # the earliest time at which its inputs could be there
    needed_us: float  # the compute lane is at its wait
    exposed_us: float
    shares: Mapping[Reason, float]  # of ``exposed_us`` by cause; they add up to it
    reason: Reason | Literal[""]  # the largest share's; empty if nothing is exposed
    why: str  # a sentence on it, with figures

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


def explain(program: Program, timeline: Timeline, limits: Limits) -> dict[str, Exposure]:
    """The exposure of each start op by name, in the order of the program."""
    run = _Run(program, timeline, limits)
    # Gathers could go earlier: the first ones are the first to take idle time. Reduces later.
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
        # Idle time that another gather is to take is as good as busy.
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
            return 0.0  # whoever placed it needs it there
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
            # What a reduce reads is there already.
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
            return f"window {window}: waited for before use {-window} of a gather behind it"
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
        """Time before which nothing has been waited for: whatever is ready by then is at once."""
        first = next((i for i, op in enumerate(self.program.ops) if op.kind == "wait"), None)
        return self.arrival[first] + _TINY_US if first is not None else _TINY_US

    @cached_property
    def _free(self) -> list[bool]:
        """Which ops need only inputs, and so could run at any time."""
        found: list[bool] = []
        for i, op in enumerate(self.program.ops):
            movable = op.kind in ("compute", "view")
            found.append(movable and all(found[j] for j in self.program.predecessors[i]))
        return found

    def _ready_us(self, i: int) -> float:
        """When the inputs of a start could be there: those made of inputs alone, at once."""
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
        """The last op that the start needs, and that could not have run any time."""
        needed = [j for j in self.program.predecessors[i] if not self._free[j]]
        while needed and self.program.ops[last := max(needed)].kind == "view":
            needed = [j for j in self.program.predecessors[last] if not self._free[j]]
        return self.program.ops[max(needed)].name if needed else ""

    @cached_property
    def _compute_after(self) -> list[float]:
        """Per op, the compute after it that does not follow a reduce: that moves with the waits."""
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
