"""Where to cut a chain into buckets: dynamic programming over its events.

A partial schedule is what has been launched, waited for and flushed so far, and the times at which
the lanes are free and transfers done. Of two that launched the same, one that is nowhere later is
enough. As long as not more than ``width`` are left the result is exact for the chain; beyond, those
that could still end soonest are kept, so that the work grows with the length of the chain only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from inductor_passes.chain import Chain, Side

Times = tuple[float, ...]


class Cuts(NamedTuple):
    """Ends of the buckets: the units from the end before up to, not including, each.

    Attributes:
        gathers: ends among the chain's gathers.
        reduces: likewise.
    """

    gathers: tuple[int, ...]
    reduces: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What a schedule must keep.

    Attributes:
        inflight: gather buckets under way when one is waited for, itself included; 1 or more.
        pending: reduce buckets that nobody waits for when another one starts; 1 or more.
        nbytes: of memory; None for any.
        width: partial schedules that are kept.
    """

    inflight: int
    pending: int
    nbytes: int | None
    width: int


class _Partial(NamedTuple):
    now: float
    lanes: Times
    cuts: Cuts = Cuts((), ())
    used: int = 0  # gather buckets waited for
    done: int = 0  # reduce buckets waited for
    gathered: Times = ()  # when each gather that nobody has waited for is there
    reduced: Times = ()

    def key(self) -> tuple[object, ...]:
        """What decides all that may still happen, but for the times."""
        gathers, reduces = self.cuts
        waited = gathers[self.used - 1] if self.used else 0
        settled = reduces[self.done - 1] if self.done else 0
        return waited, gathers[self.used :], settled, reduces[self.done :]

    def times(self) -> Times:
        return (self.now, *self.lanes, *self.gathered, *self.reduced)


def best_cuts(chain: Chain, limits: Limits) -> list[tuple[float, Cuts]]:
    """The best schedules found, microseconds and cuts, the shortest first; none if none fits."""
    found = _Search(chain, limits).run()
    return sorted(((p.now, p.cuts) for p in found), key=lambda f: (f[0], sum(map(len, f[1])), f[1]))


class _Search:
    def __init__(self, chain: Chain, limits: Limits) -> None:
        self.chain, self.limits = chain, limits
        groups = [m.group for u in (*chain.gathers, *chain.reduces) for m in u.messages]
        self.lane = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        # Bytes of the first k units.
        self.gather_nbytes = list(accumulate((u.nbytes for u in chain.gathers), initial=0))
        self.reduce_nbytes = list(accumulate((u.nbytes for u in chain.reduces), initial=0))
        rest_us = accumulate((e.work_us for e in reversed(chain.events)), initial=0.0)
        self.rest_us = list(rest_us)[::-1]

    def run(self) -> list[_Partial]:
        seen = {"begin": 0, "gather": 0, "reduce": 0}
        partials = [_Partial(0.0, (0.0,) * len(self.lane))]
        for i, event in enumerate(self.chain.events):
            seen[event.kind] += 1
            if event.kind == "begin":
                partials = [
                    q for p in partials for q in self._launches(p, self.limits.inflight - 1)
                ]
            elif event.kind == "gather":
                partials = [q for p in partials for q in self._use(p, seen["gather"] - 1)]
            else:
                partials = [q for p in partials for q in self._ready(p, seen["reduce"])]
            partials = [
                p._replace(now=p.now + event.work_us)
                for p in partials
                if self._fits(p, event.base_nbytes, seen["gather"], seen["reduce"])
            ]
            partials = self._prune(partials, self.rest_us[i + 1])
        return [p._replace(now=max(p.now, *p.reduced, 0.0)) for p in partials]

    def _use(self, p: _Partial, unit: int) -> Iterator[_Partial]:
        """A gather unit is used: wait for its bucket, if it is the bucket's first."""
        if p.used and unit < p.cuts.gathers[p.used - 1]:
            yield p
            return
        for q in self._launches(p, self.limits.inflight - len(p.gathered)):
            yield q._replace(
                now=max(q.now, q.gathered[0]), gathered=q.gathered[1:], used=q.used + 1
            )

    def _launches(self, p: _Partial, count: int) -> Iterator[_Partial]:
        begin = p.cuts.gathers[-1] if p.cuts.gathers else 0
        total = len(self.chain.gathers)
        if count == 0 or begin == total:
            yield p
            return
        for end in _ends(begin, total):
            lanes, done = self._transfer(p, "gather", begin, end)
            cuts = Cuts((*p.cuts.gathers, end), p.cuts.reduces)
            q = p._replace(lanes=lanes, gathered=(*p.gathered, done), cuts=cuts)
            yield from self._launches(q, count - 1)

    def _ready(self, p: _Partial, made: int) -> Iterator[_Partial]:
        """A reduce unit is ready: start the open bucket, or leave it open for more."""
        if made < len(self.chain.reduces):
            yield p
        if len(p.reduced) == self.limits.pending:
            now = max(p.now, p.reduced[0])
            p = p._replace(now=now, reduced=p.reduced[1:], done=p.done + 1)
        begin = p.cuts.reduces[-1] if p.cuts.reduces else 0
        lanes, done = self._transfer(p, "reduce", begin, made)
        cuts = Cuts(p.cuts.gathers, (*p.cuts.reduces, made))
        yield p._replace(lanes=lanes, reduced=(*p.reduced, done), cuts=cuts)

    def _transfer(self, p: _Partial, kind: Side, begin: int, end: int) -> tuple[Times, float]:
        lanes, done = list(p.lanes), 0.0
        for group, us in self.chain.transfers(kind, begin, end):
            i = self.lane[group]
            lanes[i] = max(lanes[i], p.now) + us
            done = max(done, lanes[i])
        return tuple(lanes), done

    def _fits(self, p: _Partial, base: int, used: int, made: int) -> bool:
        """Whether what is gathered ahead, and not yet reduced, fits beside what no plan changes."""
        if self.limits.nbytes is None:
            return True
        ahead = self.gather_nbytes[p.cuts.gathers[-1] if p.cuts.gathers else 0]
        ahead = max(0, ahead - self.gather_nbytes[used])
        settled = p.cuts.reduces[p.done - 1] if p.done else 0
        behind = self.reduce_nbytes[made] - self.reduce_nbytes[settled]
        return base + ahead + behind <= self.limits.nbytes

    def _prune(self, partials: Sequence[_Partial], rest_us: float) -> list[_Partial]:
        """Those that no other makes needless, at most ``width``, the most promising first."""

        def promise(p: _Partial) -> tuple[object, ...]:
            size = len(p.cuts.gathers) + len(p.cuts.reduces)
            return max(p.now + rest_us, *p.lanes), sum(p.times()), size, p.cuts

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


def _ends(begin: int, total: int) -> Iterator[int]:
    """Where a bucket may end: anywhere near, then at growing distances, and at the end."""
    size = 1
    while begin + size < total:
        yield begin + size
        size += 1 if size < 8 else size // 3
    yield total
