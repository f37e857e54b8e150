"""Search: walk a chain with a frontier of partial schedules, and keep the ones that may win.

A state is what was decided (which gathers are launched but not waited for, where the open reduce
bucket begins, which reduces are pending) and when: the compute lane, each communication lane, and
each transfer in flight. What a state can still become, memory included, depends on the first part
alone, and all of it grows with the times; so among states that agree in the first part, one that
is nowhere later and has no more buckets makes the others superfluous. The search is exact while
the frontier fits its width (but that a reduce which has arrived is waited for at once, though the
all-reduce behind it may slow compute); beyond, it keeps the states with the least time that they
cannot avoid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import le
from typing import NamedTuple

from inductor_passes.chain import Chain, Event
from inductor_passes.schedule import Schedule, Segment
from inductor_passes.simulate import slowed_us
from inductor_passes.wire import Rest, TransferTimes


@dataclass(frozen=True)
class SearchLimits:
    """How far a search looks.

    Attributes:
        work: states that it extends in all, about; shared out among the events.
        least_width: of the frontier, whatever the work.
        most_width: likewise.
        units: in one bucket.
        flying: gather buckets, and pending reduce buckets, at a time.
    """

    work: int = 3_000
    least_width: int = 24
    most_width: int = 600
    units: int = 16
    flying: int = 6


Trace = tuple["Trace | None", str, Segment]


class State(NamedTuple):
    """A partial schedule.

    Attributes:
        waited: gather units before this one were waited for.
        flying: ends of the gather buckets in flight, which begin at ``waited``.
        opened: first unit of the open reduce bucket.
        pending: first units of the reduce buckets that are pending.
        buckets: how many there are.
        now: compute lane.
        owed: when the last all-reduce that follows a reduce is done.
        lanes: when each is free.
        arrivals: of ``flying``.
        dones: of ``pending``.
        others: of the other collectives in flight.
        trace: decisions, newest first.
    """

    waited: int
    flying: tuple[int, ...]
    opened: int
    pending: tuple[int, ...]
    buckets: int
    now: float
    owed: float
    lanes: tuple[float, ...]
    arrivals: tuple[float, ...]
    dones: tuple[float, ...]
    others: tuple[float, ...]
    trace: Trace | None

    @property
    def launched(self) -> int:
        return self.flying[-1] if self.flying else self.waited

    @property
    def held(self) -> int:
        """Gradients of the reduce units from here on are alive."""
        return self.pending[0] if self.pending else self.opened


class Search:
    """The walk: ``run`` it once; ``extended`` counts the states that it made.

    With ``at_uses`` it waits for reduces where gathers are used, too.
    """

    def __init__(
        self,
        chain: Chain,
        wire: TransferTimes,
        budget_nbytes: float,
        limits: SearchLimits,
        at_uses: bool = True,
    ) -> None:
        self.at_uses = at_uses
        self.chain, self.wire, self.budget, self.limits = chain, wire, budget_nbytes, limits
        share = limits.work // max(1, len(chain.events))
        self.width = min(limits.most_width, max(limits.least_width, share))
        self.rest = Rest(chain, wire, _bucket_nbytes(chain, budget_nbytes), budget_nbytes)
        self.lost = 1 - wire.cost.compute_beside
        self.extended = 0

    def run(self) -> list[Schedule]:
        """Schedules within the budget, by time and number of buckets; none if none was found."""
        step = {"run": self._run, "use": self._use, "made": self._made}
        step |= {"start": self._start, "wait": self._wait}
        lanes = (0.0,) * len(self.chain.lanes)
        first = State(0, (), 0, (), 0, 0.0, 0.0, lanes, (), (), (), None)
        frontier = self._launched([first], -1)
        for at, event in enumerate(self.chain.events):
            frontier = step[event.kind](frontier, at, event)
        ended = sorted(map(self._ended, frontier), key=lambda s: (s.now, s.buckets))
        return [_schedule(state) for state in ended]

    def _run(self, frontier: list[State], at: int, event: Event) -> list[State]:
        us, beside = event.us, self.wire.cost.compute_beside
        return [
            s._replace(now=s.now + us + slowed_us(us, max(s.lanes, default=0.0) - s.now, beside))
            for s in frontier
        ]

    def _start(self, frontier: list[State], at: int, event: Event) -> list[State]:
        moved = []
        for s in frontier:
            done = max(s.now, s.lanes[event.lane]) + event.us
            lanes = (*s.lanes[: event.lane], done, *s.lanes[event.lane + 1 :])
            moved.append(s._replace(lanes=lanes, others=(*s.others, done)))
        return moved

    def _wait(self, frontier: list[State], at: int, event: Event) -> list[State]:
        i = event.at
        return [
            s._replace(now=max(s.now, s.others[i]), others=s.others[:i] + s.others[i + 1 :])
            for s in frontier
        ]

    def _use(self, frontier: list[State], at: int, event: Event) -> list[State]:
        unit = event.used - 1
        waited = [s for s in frontier if s.waited > unit]
        due = [child for s in frontier if s.waited <= unit for child in self._relieved(s)]
        ahead = [s for s in due if s.flying]
        late = [s for s in due if not s.flying]
        ahead += self._best([child for s in late for child in self._launches(s, at)], at)
        arrived = [
            s._replace(
                waited=s.flying[0],
                flying=s.flying[1:],
                now=max(s.now, s.arrivals[0]),
                arrivals=s.arrivals[1:],
            )
            for s in self._launched(ahead, at)
        ]
        return self._best(waited + arrived, at)

    def _relieved(self, s: State) -> Iterator[State]:
        """``s``, at the use of a bucket, with ever fewer pending reduces."""
        # What has arrived is waited for: that is free.
        arrived = sum(done <= s.now for done in s.dones)
        for waits in range(arrived, len(s.dones) + 1) if self.at_uses else (0,):
            yield self._waited(s, waits, s.opened, use=s.waited)

    def _launched(self, states: list[State], at: int) -> list[State]:
        """``states``, and what becomes of them if they launch one gather or several."""
        found, latest = list(states), states
        while latest:
            latest = self._best([child for s in latest for child in self._launches(s, at)], at)
            found += latest
        return found

    def _launches(self, s: State, at: int) -> Iterator[State]:
        """``s`` with one more gather launched."""
        if len(s.flying) >= self.limits.flying:
            return
        begin, turn = s.launched, s.waited if at >= 0 else -1
        units = self.chain.gathers
        horizon = self.limits.units * self.limits.flying
        reach = self.rest.reach(at, horizon)
        for end in range(begin + 1, min(reach, begin + self.limits.units) + 1):
            if end - begin > 1 and (units[begin].alone or units[end - 1].alone):
                return
            lanes, arrival = self.wire.launch("gather", begin, end, s.now, s.lanes)
            self.extended += 1
            yield State(  # not _replace, which takes three times as long
                s.waited,
                (*s.flying, end),
                s.opened,
                s.pending,
                s.buckets + 1,
                s.now,
                s.owed,
                lanes,
                (*s.arrivals, arrival),
                s.dones,
                s.others,
                (s.trace, "gather", Segment(begin, end, turn)),
            )

    def _made(self, frontier: list[State], at: int, event: Event) -> list[State]:
        units = self.chain.reduces
        moved = []
        for s in frontier:
            last = (
                event.made == len(units) or units[event.made - 1].alone or units[event.made].alone
            )
            if not last and event.made - s.opened < self.limits.units:
                moved.append(s)
            # What has arrived is waited for: that is free.
            arrived = sum(done <= s.now for done in s.dones)
            least = max(arrived, len(s.dones) - self.limits.flying + 1)
            for waits in range(least, len(s.dones) + 1):
                moved.append(self._closed(s, event.made, waits))
        # What is sent stays until it is waited for, and what is left of it is there already.
        fitting = [s for s in moved if self._nbytes(s, event, False) <= self.budget]
        return self._best(fitting, at)

    def _closed(self, s: State, end: int, waits: int) -> State:
        """``s`` after ``waits`` waits for pending reduces, with its open bucket launched."""
        self.extended += 1
        s = self._waited(s, waits, s.opened)
        lanes, done = self.wire.launch("reduce", s.opened, end, s.now, s.lanes)
        return s._replace(
            opened=end,
            pending=(*s.pending, s.opened),
            buckets=s.buckets + 1,
            lanes=lanes,
            dones=(*s.dones, done),
        )

    def _waited(self, s: State, waits: int, turn: int, use: int | None = None) -> State:
        now, owed, lanes, trace = s.now, s.owed, s.lanes, s.trace
        ends = (*s.pending[1:], s.opened)
        for k in range(waits):
            now = max(now, s.dones[k])
            lanes, done = self.wire.launch("then", s.pending[k], ends[k], now, lanes)
            owed = max(owed, done)
            trace = (trace, "reduce", Segment(s.pending[k], ends[k], turn, use))
        return s._replace(
            pending=s.pending[waits:],
            dones=s.dones[waits:],
            now=now,
            owed=owed,
            lanes=lanes,
            trace=trace,
        )

    def _ended(self, s: State) -> State:
        s = self._waited(s, len(s.pending), len(self.chain.reduces))
        return s._replace(now=max(s.now, s.owed))

    def _best(self, states: list[State], at: int) -> list[State]:
        """The states that fit into memory and are not dominated, as many as the width allows."""
        run = self.rest.next_run(at)
        # At a use on the way there pending reduces can still be waited for.
        relieved = self.at_uses and self.rest.next_use(at) < self.rest.next_run_at(at)
        fitting = [
            s for s in states if run is None or self._nbytes(s, run, relieved) <= self.budget
        ]
        compute = self.rest.compute[at + 1]
        ranked = sorted((self._rank(s, compute), k) for k, s in enumerate(fitting))
        kept: list[State] = []
        rivals: defaultdict[tuple[object, ...], list[tuple[float, ...]]] = defaultdict(list)
        for _, k in ranked:
            s = fitting[k]
            if len(kept) == self.width:
                return [*kept, min(fitting, key=self._ahead)]
            times = _times(s)
            same = rivals[s[:4]]
            if not any(all(map(le, rival, times)) for rival in same):
                same.append(times)
                kept.append(s)
        return kept

    def _nbytes(self, s: State, event: Event, relieved: bool) -> int:
        """Live bytes at most during ``event``; if ``relieved``, if reduces are waited for."""
        gathered, chain = self.chain.gathered, self.chain
        ahead = gathered[max(event.used, s.launched)] - gathered[event.used]
        held = chain.held(event.made, s.opened, s.held)
        if relieved:
            held = min(held, chain.held(event.made, s.opened, s.opened))
        return event.nbytes + ahead + held

    def _ahead(self, s: State) -> int:
        """Bytes of what is launched and of what is not waited for: least is safest."""
        return self.chain.gathered[s.launched] - self.chain.reduced[s.held]

    def _rank(self, s: State, compute_us: float) -> tuple[float, ...]:
        """Time that the step takes at least, then time that the lanes are busy, then buckets."""
        # Without max() of two: this is called a million times.
        rest, now, launched, from_use = self.rest, s.now, s.launched, self.rest.from_use
        computed = least = now + compute_us
        if s.opened < len(self.chain.reduces):
            least += rest.tail
        begin = s.waited
        for arrival, end in zip(s.arrivals, s.flying, strict=True):
            used = arrival + from_use[begin]
            least = used if used > least else least
            begin = end
        gathers, reduces = rest.gathers[launched], rest.reduces[s.opened]
        lanes = [
            (lane if lane > now else now) + gathered + reduced
            for lane, gathered, reduced in zip(s.lanes, gathers, reduces, strict=True)
        ]
        if lanes:  # what is still in transfer slows compute by as much, or is exposed
            slowed = computed + self.lost * (max(lanes) - now)
            least = slowed if slowed > least else least
        for lane, us in rest.next_gather[launched]:
            free = s.lanes[lane]
            used = (free if free > now else now) + us + from_use[launched]
            least = used if used > least else least
        return (max((least, *lanes, *s.dones)), sum(lanes), s.buckets)


def _bucket_nbytes(chain: Chain, budget_nbytes: float) -> float:
    """Size of a bucket that memory has room for next to another of its kind, and of the other."""
    runs = sorted(event.nbytes for event in chain.events if event.kind == "run")
    spare = budget_nbytes - (runs[len(runs) // 2] if runs else 0)
    kinds = bool(chain.gathers) + bool(chain.reduces)
    return max(1.0, spare / (2 * max(1, kinds)))


def _times(s: State) -> tuple[float, ...]:
    """What a state that dominates must not exceed; times that have passed are all alike."""
    clocks = (*s.lanes, *s.arrivals, *s.dones, *s.others)
    return (s.buckets, s.now, s.owed, *(max(s.now, clock) for clock in clocks))


def _schedule(ended: State) -> Schedule:
    gathers: list[Segment] = []
    reduces: list[Segment] = []
    trace = ended.trace
    while trace is not None:
        trace, what, segment = trace
        (gathers if what == "gather" else reduces).append(segment)
    return Schedule(tuple(sorted(gathers)), tuple(sorted(reduces)), ended.now)
