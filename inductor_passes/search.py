"""Where to cut a chain into buckets: dynamic programming over its events.

A partial schedule is what has been launched and waited for so far, and the times at which lanes are
free and transfers done. Of two that launched and waited for the same, one that is nowhere later is
enough. As long as not more than ``width`` are left the result is exact for the chain; beyond, those
that could still end soonest are kept, so that the work grows with the length of the chain only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from inductor_passes.chain import SIDES, Chain, Side

Times = tuple[float, ...]


class Cut(NamedTuple):
    """A bucket: the units from the end of the one before up to, not including, ``end``."""

    end: int
    window: int


class Cuts(NamedTuple):
    """The buckets of a chain's gathers, and of its reduces."""

    gathers: tuple[Cut, ...]
    reduces: tuple[Cut, ...]


@dataclass(frozen=True)
class Limits:
    """What a schedule must keep.

    Attributes:
        nbytes: of memory; None for any.
        width: partial schedules that are kept.
        inflight: gather buckets under way when one is waited for, itself included; 1 or more.
        pending: reduce buckets under way; 1 or more.
    """

    nbytes: int | None
    width: int
    inflight: int = 4
    pending: int = 4


class _Partial(NamedTuple):
    now: float
    lanes: Times
    waited: int = 0  # units whose gathers were waited for
    ahead: tuple[int, ...] = ()  # ends of the gather buckets under way, and when each is there
    arriving: Times = ()
    settled: int = 0  # units whose reduces were waited for
    behind: tuple[int, ...] = ()  # ends of the reduce buckets under way, and when each is done
    leaving: Times = ()
    gathers: int = 0  # buckets launched
    reduces: int = 0
    log: Any = None  # what was done, last first: (before, side or "settle", end, window)

    def key(self) -> tuple[object, ...]:
        """What decides all that may still happen, but for the times."""
        return self.waited, self.ahead, self.settled, self.behind

    def times(self) -> Times:
        return (self.now, *self.lanes, *self.arriving, *self.leaving)


def best_cuts(chain: Chain, limits: Limits) -> list[Cuts]:
    """The best schedules found, the shortest first; none if none fits."""
    # What is still to be sent is guessed twice: in buckets of equal size, and in one, which is too
    # good, and so prefers small buckets now. Neither is better for all chains.
    found = [p for merged in (False, True) for p in _Search(chain, limits, merged).run()]
    found.sort(key=lambda p: (p.now, p.gathers + p.reduces))
    return [_cuts(p) for p in found]


def _cuts(p: _Partial) -> Cuts:
    gathers: list[Cut] = []
    ends: list[int] = []
    windows: list[int] = []
    log = p.log
    while log is not None:
        log, what, end, window = log
        if what == "gather":
            gathers.append(Cut(end, window))
        elif what == "reduce":
            ends.append(end)
        else:
            windows.append(window)
    count = len(ends)
    ends.reverse()
    windows.reverse()
    windows += [count - k for k in range(len(windows), count)]  # waited for at the end
    return Cuts(tuple(reversed(gathers)), tuple(map(Cut, ends, windows)))


class _Search:
    def __init__(self, chain: Chain, limits: Limits, merged: bool) -> None:
        self.chain, self.limits = chain, limits
        groups = [m.group for u in (*chain.gathers, *chain.reduces) for m in u.messages]
        self.lane = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        # Bytes of the first k units.
        self.gather_nbytes = list(accumulate((u.nbytes for u in chain.gathers), initial=0))
        self.reduce_nbytes = list(accumulate((u.nbytes for u in chain.reduces), initial=0))
        rest_us = accumulate((e.work_us for e in reversed(chain.events)), initial=0.0)
        self.rest_us = list(rest_us)[::-1]
        self.wire_us = {side: _wire_from_us(chain, side, merged=merged) for side in SIDES}
        # From the first use of each gather unit on; and from when the lane is free for it.
        rest = zip(chain.events, self.rest_us, strict=False)
        self.after_us = [us for event, us in rest if event.kind == "gather"]
        self.tail_us, wire = [0.0], self.wire_us["gather"]
        for k, after in reversed(list(enumerate(self.after_us))):
            self.tail_us.append(wire[k] - wire[k + 1] + max(after, self.tail_us[-1]))
        self.tail_us.reverse()

    def run(self) -> list[_Partial]:
        used = made = 0
        partials = [_Partial(0.0, (0.0,) * len(self.lane))]
        for i, event in enumerate(self.chain.events):
            if event.kind == "begin":
                partials = [q for p in partials for q in self._launch(p, 0, window=2)]
            elif event.kind == "gather":
                partials = [q for p in partials for q in self._use(p, used)]
                used += 1
            else:
                made += 1
                partials = [q for p in partials for q in self._ready(p, made)]
            partials = [
                p._replace(now=p.now + event.work_us)
                for p in partials
                if self._fits(p, event.base_nbytes, used, made)
            ]
            partials = self._prune(partials, self.rest_us[i + 1])
        return [p._replace(now=max(p.now, *p.leaving, 0.0)) for p in partials]

    def _use(self, p: _Partial, unit: int) -> Iterator[_Partial]:
        """A gather unit is used: launch some ahead, then wait for its bucket, if it begins one."""
        if unit < p.waited:
            yield p
            return
        for q in self._launch(p, 0 if p.ahead else 1, window=1):
            yield q._replace(
                now=max(q.now, q.arriving[0]),
                waited=q.ahead[0],
                ahead=q.ahead[1:],
                arriving=q.arriving[1:],
            )

    def _launch(self, p: _Partial, least: int, *, window: int) -> Iterator[_Partial]:
        """Launch ``least`` to 2 gather buckets; ``window`` is that of one needed at once."""
        if least < 1:
            yield p
        for q in self._gather(p, window, _ends):
            yield q
            # At the beginning there is one partial schedule, and time to look at all pairs.
            yield from self._gather(q, window, _few_ends if p.gathers else _ends)

    def _gather(
        self, p: _Partial, window: int, ends: Callable[[int, int], Iterator[int]]
    ) -> Iterator[_Partial]:
        begin, inflight = p.ahead[-1] if p.ahead else p.waited, len(p.ahead)
        if inflight == self.limits.inflight:
            return
        for end in ends(begin, len(self.chain.gathers)):
            lanes, done = self._transfer(p, "gather", begin, end)
            yield p._replace(
                lanes=lanes,
                ahead=(*p.ahead, end),
                arriving=(*p.arriving, done),
                gathers=p.gathers + 1,
                log=(p.log, "gather", end, inflight + window),
            )

    def _ready(self, p: _Partial, made: int) -> Iterator[_Partial]:
        """A reduce unit is ready: start the open bucket, or leave it open for more."""
        if made < len(self.chain.reduces):
            yield p
        begin = p.behind[-1] if p.behind else p.settled
        for q in self._settle(p):
            lanes, done = self._transfer(q, "reduce", begin, made)
            yield q._replace(
                lanes=lanes,
                behind=(*q.behind, made),
                leaving=(*q.leaving, done),
                reduces=q.reduces + 1,
                log=(q.log, "reduce", made, 0),
            )

    def _settle(self, p: _Partial) -> Iterator[_Partial]:
        """Wait for none of the reduces under way, if there is room for one more; for one; ..."""
        if len(p.behind) < self.limits.pending:
            yield p
        if p.behind:
            yield from self._settle(
                p._replace(
                    now=max(p.now, p.leaving[0]),
                    settled=p.behind[0],
                    behind=p.behind[1:],
                    leaving=p.leaving[1:],
                    log=(p.log, "settle", p.behind[0], len(p.behind)),
                )
            )

    def _transfer(self, p: _Partial, side: Side, begin: int, end: int) -> tuple[Times, float]:
        lanes, done = list(p.lanes), 0.0
        for group, us in self.chain.transfers(side, begin, end):
            i = self.lane[group]
            lanes[i] = max(lanes[i], p.now) + us
            done = max(done, lanes[i])
        return tuple(lanes), done

    def _fits(self, p: _Partial, base: int, used: int, made: int) -> bool:
        """Whether what is gathered ahead, and not yet reduced, fits beside what no plan changes."""
        if self.limits.nbytes is None:
            return True
        ahead = self.gather_nbytes[p.ahead[-1] if p.ahead else p.waited]
        ahead = max(0, ahead - self.gather_nbytes[used])
        behind = self.reduce_nbytes[made] - self.reduce_nbytes[p.settled]
        return base + ahead + behind <= self.limits.nbytes

    def _prune(self, partials: Sequence[_Partial], rest_us: float) -> list[_Partial]:
        """Those that no other makes needless, at most ``width``, the most promising first."""

        def promise(p: _Partial) -> tuple[float, float, int]:
            launched, lane = p.ahead[-1] if p.ahead else p.waited, max(p.lanes, default=0.0)
            firsts = (p.waited, *p.ahead)
            end = max(
                p.now + rest_us,
                # What is under way, and what follows on the lane, before what needs it.
                *(t + self.after_us[k] for t, k in zip(p.arriving, firsts, strict=False)),
                lane + self.tail_us[launched],
                lane
                + self.wire_us["gather"][launched]
                + self.wire_us["reduce"][p.behind[-1] if p.behind else p.settled],
            )
            return end, sum(p.times()), p.gathers + p.reduces

        kept: list[_Partial] = []
        best: dict[tuple[object, ...], list[Times]] = {}
        for p in sorted(partials, key=promise):
            times, rivals = p.times(), best.setdefault(p.key(), [])
            if any(all(a <= b for a, b in zip(r, times, strict=True)) for r in rivals):
                continue
            rivals.append(times)
            kept.append(p)
            if len(kept) == self.limits.width:
                break
        return kept


def _wire_from_us(chain: Chain, side: Side, *, merged: bool) -> list[float]:
    """A guess at what the units from each on will cost: in one bucket, or in equal ones."""
    units = len(chain.gathers if side == "gather" else chain.reduces)
    work_us = sum(event.work_us for event in chain.events)

    def cut(size: int, begin: int = 0) -> list[float]:
        return [
            sum(us for _, us in chain.transfers(side, k, min(k + size, units)))
            for k in range(begin, units, size)
        ]

    def exposed_us(size: int) -> float:
        costs = cut(size)
        return max(sum(costs) - work_us, 0.0) + max(costs, default=0.0)

    if merged:
        return [sum(cut(units, k)) for k in range(units)] + [0.0]
    size = min((1, 2, 3, 4, 6, 8, 12, 16, 24, 32), key=exposed_us)
    share = [us / size for us in cut(size) for _ in range(size)][:units]
    return list(accumulate(reversed(share), initial=0.0))[::-1]


def _ends(begin: int, total: int) -> Iterator[int]:
    """Where a bucket may end: anywhere near, then at growing distances, and at the end."""
    size = 1
    while begin + size < total:
        yield begin + size
        size += 1 if size < 8 else size // 3
    if begin < total:
        yield total


def _few_ends(begin: int, total: int) -> Iterator[int]:
    """Likewise, of a second bucket that is launched at the same place."""
    return (begin + size for size in (1, 2, 4, 8, 16) if begin + size <= total)
