"""What is sent for a bucket of units, and what a partial schedule still has to send and compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import Literal

from inductor_passes.chain import Chain, Event, Unit
from inductor_passes.cost import CostModel
from inductor_passes.merge import bucket_class, sent_together
from inductor_passes.program import Collective

What = Literal["gather", "reduce", "then"]
Sends = tuple[tuple[int, float], ...]


_Merged = dict[tuple[object, ...], Collective]


def merged_us(collectives: Iterable[Collective], cost: CostModel) -> dict[str, float]:
    """Time on each group's lane if all that may share a bucket do."""
    return _us_by_group(_merged({}, collectives), cost)


def _merged(before: _Merged, collectives: Iterable[Collective]) -> _Merged:
    """``before`` and ``collectives``, those that may share a bucket as one."""
    together = dict(before)
    for c in collectives:
        key = bucket_class(c)
        together[key] = sent_together(together.get(key), c)
    return together


def _us_by_group(merged: _Merged, cost: CostModel) -> dict[str, float]:
    us: dict[str, float] = {}
    for c in merged.values():
        us[c.group] = us.get(c.group, 0.0) + cost.collective_us(c)
    return us


class TransferTimes:
    """Times of the buckets of a chain, each asked of the cost model once."""

    def __init__(self, chain: Chain, cost: CostModel) -> None:
        self.chain, self.cost = chain, cost
        self._sends: dict[tuple[What, int, int], Sends] = {}
        self._buckets: dict[tuple[What, int, int], _Merged] = {}

    def sends(self, what: What, begin: int, end: int) -> Sends:
        """Lane and time of each collective of the bucket of units ``begin`` to ``end``.

        ``"then"`` is of the all-reduces that follow a bucket of reduces.
        """
        key = (what, begin, end)
        found = self._sends.get(key)
        if found is None:
            us = _us_by_group(self._bucket(what, begin, end), self.cost)
            found = tuple((self.chain.lanes[group], time) for group, time in us.items())
            self._sends[key] = found
        return found

    def _bucket(self, what: What, begin: int, end: int) -> _Merged:
        """What is sent for the units: what is for all but the last, which was asked for before as a
        rule, and for that one."""
        units = self.chain.gathers if what == "gather" else self.chain.reduces
        known = end
        while known > begin and (what, begin, known) not in self._buckets:
            known -= 1
        merged = self._buckets.get((what, begin, known), {})
        for i in range(known, end):
            merged = self._buckets[what, begin, i + 1] = _merged(merged, _carried(units[i], what))
        return merged

    def sends_to_the_end(self, what: What) -> list[Sends]:
        """The same of all units from each to the end, and of none."""
        units = self.chain.gathers if what == "gather" else self.chain.reduces
        merged: _Merged = {}
        found: list[Sends] = [()]
        for unit in reversed(units):
            merged = _merged(merged, _carried(unit, what))
            us = _us_by_group(merged, self.cost)
            found.append(tuple((self.chain.lanes[group], time) for group, time in us.items()))
        return found[::-1]

    def latency_us(self, what: What) -> dict[int, float]:
        """What one bucket more costs on each lane: two units apart, less the two as one."""
        units = self.chain.gathers if what == "gather" else self.chain.reduces
        found = dict.fromkeys(self.chain.lanes.values(), 0.0)
        for i in range(len(units) - 1):
            apart = dict(self.sends(what, i, i + 1))
            for lane, us in self.sends(what, i + 1, i + 2):
                if lane in apart:
                    both = dict(self.sends(what, i, i + 2))[lane]
                    found[lane] = max(found[lane], apart[lane] + us - both)
        return found

    def launch(
        self, what: What, begin: int, end: int, now: float, lanes: tuple[float, ...]
    ) -> tuple[tuple[float, ...], float]:
        """When the lanes are free after the bucket is launched, and when all of it arrives."""
        arrival = now
        for lane, us in self.sends(what, begin, end):
            done = max(now, lanes[lane]) + us
            lanes = (*lanes[:lane], done, *lanes[lane + 1 :])
            arrival = max(arrival, done)
        return lanes, arrival


def _carried(unit: Unit, what: What) -> Sequence[Collective]:
    return [c for _, c in unit.then] if what == "then" else unit.collectives


class Rest:
    """Least that is left to do from each event, and from each unit, to the end."""

    def __init__(
        self,
        chain: Chain,
        wire: TransferTimes,
        bucket_nbytes: float = inf,
        budget_nbytes: float = inf,
    ) -> None:
        self.chain, self.bucket_nbytes, self.budget_nbytes = chain, bucket_nbytes, budget_nbytes
        us = [event.us if event.kind == "run" else 0.0 for event in chain.events]
        self.compute = _sums_to_the_end(us)
        n = len(chain.reduces)
        self.tail = max((us for _, us in wire.sends("reduce", n - 1, n)), default=0.0) if n else 0.0
        self.gathers = self._lanes(wire, "gather", len(chain.gathers))
        self.reduces = self._lanes(wire, "reduce", n)
        units = range(len(chain.gathers))
        self.next_gather: list[Sends] = [*(wire.sends("gather", i, i + 1) for i in units), ()]
        self.uses = [at for at, event in enumerate(chain.events) if event.kind == "use"]
        self.from_use = [self.compute[at] for at in self.uses]
        self.runs = [at for at, event in enumerate(chain.events) if event.kind == "run"]
        self._reach: dict[tuple[int, int], int] = {}

    def _lanes(self, wire: TransferTimes, what: What, n: int) -> list[tuple[float, ...]]:
        """Time on each lane of the units from each to the end."""
        latency_us = wire.latency_us(what)
        nbytes = self.chain.gathered if what == "gather" else self.chain.reduced
        found = []
        for i, sends in enumerate(wire.sends_to_the_end(what)):
            lanes = [0.0] * len(self.chain.lanes)
            more = max(0.0, (nbytes[n] - nbytes[i]) / self.bucket_nbytes - 1)
            for lane, us in sends:
                lanes[lane] = us + more * latency_us[lane]
            found.append(tuple(lanes))
        return found

    def next_run(self, at: int) -> Event | None:
        """The first stretch of compute behind event ``at``."""
        i = self.next_run_at(at)
        return self.chain.events[i] if i < len(self.chain.events) else None

    def next_run_at(self, at: int) -> int:
        """Where that is; the number of events if there is none."""
        return self._next(self.runs, at)

    def next_use(self, at: int) -> int:
        """Where the first use of a gather behind event ``at`` is, likewise."""
        return self._next(self.uses, at)

    def _next(self, places: Sequence[int], at: int) -> int:
        i = bisect_left(places, at + 1)
        return places[i] if i < len(places) else len(self.chain.events)

    def runs_between(self, unit: int, other: int) -> list[Event]:
        """The compute between the first uses of two gathers."""
        within = self.chain.events[self.uses[unit] : self.uses[other]]
        return [event for event in within if event.kind == "run"]

    def reach(self, at: int, most: int) -> int:
        """End of the next gathers, ``most`` or fewer, that fit into memory if event ``at`` launches
        them."""
        if (at, most) not in self._reach:
            self._reach[at, most] = self._find_reach(at, most)
        return self._reach[at, most]

    def _find_reach(self, at: int, most: int) -> int:
        used = self.chain.events[at].used if at >= 0 else 0
        gathered = self.chain.gathered
        worst = float("-inf")
        end = used
        i = bisect_left(self.runs, at + 1)
        while end < min(len(self.chain.gathers), used + most):
            while i < len(self.runs) and self.chain.events[self.runs[i]].used <= end:
                run = self.chain.events[self.runs[i]]
                worst = max(worst, run.nbytes - gathered[run.used])
                i += 1
            if worst + gathered[end + 1] > self.budget_nbytes:
                break
            end += 1
        return end


def _sums_to_the_end(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values), initial=0.0))[::-1]
