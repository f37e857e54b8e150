"""A local search for plans: from a plan to a better one near it, as long as there is one.

The only judge is the simulator, on a compact program. The longest stall is looked at first: the
bucket that compute waits for, and what is on the wire just before it::

    regular plans --> the best few --> what does not fit is mended --> moves, one after the other
                                       (moves.small_repairs, repairs)  (moves.around, ...)
                                  --> neighbours joined, until launches are few enough --> moves
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product
from math import ceil, inf

from inductor_passes.ir.program import Bucket, Collective, Program, ProgramError
from inductor_passes.machine.simulate import total_us
from inductor_passes.planner.invariant import common_ops
from inductor_passes.planner.plan import Plan
from inductor_passes.planner.regular import (
    Shape,
    by_room,
    gather_shapes,
    least,
    reduce_shapes,
    regular,
)
from inductor_passes.planner.search.moves import (
    all_turned,
    apart,
    around,
    everywhere_alike,
    joined,
    pairs,
    repairs,
    small_repairs,
)
from inductor_passes.planner.search.small import Small
from inductor_passes.planner.search.tried import LAUNCHES, Score, Tried, alive, launches_price
from inductor_passes.planner.segments import (
    Segment,
    State,
    named_buckets,
    plain_buckets,
    room_of,
    state_of,
)

# A climb ends after PATIENCE plans in a row that are no better. FIRST_MOVES moves of the buckets
# with the longest stalls are tried before all buckets of a kind are moved.
PATIENCE, FIRST_MOVES = 120, 40
SHARE = 3 / 5  # fraction of the remaining work, after which a climb looks for no further move
SMALLEST = 12  # states that are tried as plans of the whole program if no end of a climb fits
GAIN = 3e-4  # fraction of the bound that a move must gain
# Buckets that fill memory: for gathers and for reduces, the share of free memory that a bucket
# takes, and its window. The last three are for little memory: gathers are large but not ahead, and
# reduces are waited for early.
SHARES = (
    *product(
        ((1 / 8, 2), (1 / 6, 2), (1 / 4, 2), (1 / 3, 2)),
        ((1 / 4, 1), (1 / 3, 1), (2 / 5, 1), (1 / 2, 1)),
    ),
    *product(((2 / 3, 1),), ((1 / 4, 1), (1 / 2, -1), (2 / 3, -1))),
)
SPARE = (0.0, 0.02)  # fractions of the budget that are not filled


def best_two(shapes: Mapping[Shape, Tried]) -> list[Shape]:
    """The two shapes of the best score. If two fit, the memory of slower ones is not computed."""
    by_price = sorted(shapes, key=lambda shape: shapes[shape].price_us)
    fitting = list(islice((shape for shape in by_price if shapes[shape].fits), 2))
    return fitting if len(fitting) == 2 else sorted(shapes, key=lambda s: shapes[s].score)[:2]


class LocalSearch:
    """The search of one program.

    Args:
        program: with nothing merged.
        small: the small program of ``program``.
        fqns: of the parameters, in the order in which members travel.
        manual: the plan by module, or the one that takes least memory. If it fits, no plan should
            make more launches.
        budget_nbytes: of live bytes.
        work: ops that are simulated in all, of those that all ranks have; not seconds, so that
            all ranks find the same.
        most_launches: that a plan should make at most, if ``manual`` does not fit.

    Attributes:
        allowed: plans that may be tried in all.
        left: plans that may still be tried.
        whole_nbytes: the given budget; ``budget_nbytes`` may be less, see :meth:`with_less_room`.
        most_launches: that a plan should make at most.
        most: launches that a plan may make at this moment.
        compute_us: sum over all computes.
        peaks: most live bytes of each tried state whose memory was computed.
    """

    def __init__(
        self,
        program: Program,
        small: Small,
        fqns: Sequence[str],
        *,
        manual: Plan,
        budget_nbytes: int,
        work: int,
        most_launches: float = inf,
    ) -> None:
        self.program, self.cost, self.first_of, self.lines, self.schedules = small
        self.fqns, self.manual, self.bound_us = fqns, manual, manual.lower_bound_us
        fits = manual.peak_nbytes <= budget_nbytes
        self.most_launches, self.most = len(manual.buckets) if fits else most_launches, inf
        self.allowed = self.left = work // max(1, len(common_ops(self.program, self.cost)))
        self.sent = program.sent
        self.compute_us = sum(self.cost.op_us.values())
        self.seen: set[frozenset[Segment]] = set()
        self.budget_nbytes = self.whole_nbytes = budget_nbytes
        self.peaks: dict[State, int] = {}

    def starts(self) -> list[Tried]:
        """Regular plans, the most promising first."""
        low = self.tried(least(self.lines))  # first: it may be a regular plan
        shapes = self._shapes(gather_shapes(self.lines, self._modules()))
        for like in best_two(shapes):
            shapes |= self._shapes(reduce_shapes(self.lines, self._modules(), like))
        found = sorted(shapes.values(), key=lambda tried: tried.price_us)
        if low is None or (found and found[0].fits):
            return found
        room = room_of(low.program, self.lines, self.budget_nbytes)
        for spare, shares in product(SPARE, SHARES):
            free = {k: [n - spare * self.budget_nbytes for n in of] for k, of in room.items()}
            found.append(self.tried(by_room(self.lines, free, *shares)) or low)
        return sorted(dict.fromkeys([*found, low]), key=self._promise)

    def _modules(self) -> int:
        counts = Counter(self.sent[bucket.starts[0]].kind for bucket in self.manual.buckets)
        return max(counts.values(), default=1)

    def _shapes(self, shapes: Iterable[Shape]) -> dict[Shape, Tried]:
        tried = {shape: self.tried(regular(shape, self.lines)) for shape in shapes}
        return {shape: found for shape, found in tried.items() if found is not None}

    def _promise(self, tried: Tried) -> float:
        """How promising a plan is as a start; less is better. A plan that exceeds the budget by
        little may be better, once repaired, than one that fits. Stalls can be moved away, but not
        the time of computing and sending."""
        over = tried.memory.peak_nbytes / max(1.0, self.budget_nbytes)
        least_us = max(tried.wire_us, self.compute_us)
        return (tried.price_us + least_us) * max(1.0, over)

    def by_buckets(self, buckets: Sequence[Bucket]) -> Tried | None:
        """The plan nearest to ``buckets`` of the whole program; None as for :meth:`tried`."""
        return self.tried(state_of(buckets, self.lines, self.first_of))

    def tried(self, state: State, below_us: float = inf) -> Tried | None:
        """``state`` with its price. None if it was tried before, is no legal plan, makes too many
        launches, or no work is left; with ``below_us``, also if its price is not below that, or it
        does not fit."""
        key = frozenset(state)
        if key in self.seen or self.left <= 0:
            return None
        self.seen.add(key)
        self.left -= 1
        buckets = plain_buckets(state, self.lines)
        if len(buckets) > self.most:
            return None
        try:
            after = self.schedules.of(buckets)
        except ProgramError:
            return None
        step_us = total_us(after, self.cost)
        share = launches_price(len(buckets), len(self.manual.buckets))
        price_us = step_us + share * self.bound_us
        if price_us >= below_us:
            return None
        room = self.budget_nbytes
        found = Tried(state, len(buckets), step_us, price_us, after, self.cost, room, self.peaks)
        return found if below_us == inf or found.fits else None

    def with_less_room(self, end: Tried, nbytes: int) -> Tried | None:
        """A new climb from ``end``, the end of another. Its plan takes ``nbytes`` more in the whole
        program than in the small one, so from now on the budget is less by that. None if the work
        is done."""
        self.budget_nbytes = min(self.budget_nbytes, self.whole_nbytes - nbytes)
        self.seen.clear()
        again = self.tried(end.state)
        return None if again is None else self.climb(again)

    def smallest(self) -> list[State]:
        """The states that take least memory."""
        return sorted(self.peaks, key=self.peaks.__getitem__)[:SMALLEST]

    def climb(self, at: Tried) -> Tried:
        """The best plan that moves lead to from ``at``; one that fits, if any was found. It takes
        at most a share of the work that is left, for another climb may lead further.

        Single moves hardly lead from one plan of few launches to another, since for each bucket
        that is parted two others must be joined. So launches are not limited at first.
        """
        self.most, left = inf, self.left
        share = SHARE if self.most_launches == inf else SHARE / 2
        end = self._up(self._fit(at), left * (1 - share))
        if end.score.over_nbytes or share == SHARE:
            return end
        if end.launches > self.most_launches:
            self.seen.clear()  # some plans that were too slow have few launches
            few = self._fewer(end)
            if few is None:
                return end
            end = few
        self.most = self.most_launches
        return self._up(self._fit(end), left * (1 - SHARE))

    def _fewer(self, at: Tried) -> Tried | None:
        """``at`` with neighbours joined, where that costs least, until launches are few enough;
        None if no more can be joined."""
        while at.launches > self.most_launches:
            of = {
                pair: self.tried(joined(at.state, [pair])) for pair in pairs(at.state, self.lines)
            }
            tried = {pair: one for pair, one in of.items() if one is not None}
            if not tried:
                return None
            best = sorted(tried, key=lambda pair: tried[pair].score)
            # The cost of one pair says little about joining many at once, so only half of the
            # launches that are too many are joined.
            some = apart(best, ceil((at.launches - self.most_launches) / 2))
            several = self.tried(joined(at.state, some)) if len(some) > 1 else None
            at = several or tried[best[0]]
        return at

    def _up(self, at: Tried, enough: float) -> Tried:
        """The end of a climb from ``at`` that leaves ``enough`` of the work."""
        moved: Tried | None = at
        while moved is not None:
            at = moved
            moved = None if self._is_close(at) or self.left < enough else self._better(at)
        return at

    def _is_close(self, at: Tried) -> bool:
        """Whether the plan is so near the bound that no better one would matter."""
        close_us = (1 + 2 * LAUNCHES) * self.bound_us
        return not at.score.over_nbytes and at.score.price_us <= close_us

    def _better(self, at: Tried) -> Tried | None:
        until, below_us = self.left - PATIENCE, inf
        if not at.score.over_nbytes:
            below_us = at.score.price_us - GAIN * self.bound_us
        near = self._near(at)
        for state in chain(islice(near, FIRST_MOVES), all_turned(at.state, self.lines), near):
            for new in (everywhere_alike(at.state, state, self.lines), state):
                found = None if new is None else self.tried(new, below_us)
                if found is not None and self._is_better(found.score, at.score):
                    return found
            if self.left < max(1, until):
                break
        return None

    def _is_better(self, new: Score, old: Score) -> bool:
        if new.over_nbytes != old.over_nbytes:
            return new.over_nbytes < old.over_nbytes
        return new.price_us < old.price_us - GAIN * self.bound_us

    def _near(self, at: Tried) -> Iterator[State]:
        for segment in self._by_stall(at):
            yield from around(at.state, segment, self.lines)

    def _by_stall(self, at: Tried) -> list[Segment]:
        """All segments. First come those that compute waits for longest, each with the two before
        it on its lane."""
        of = self._segment_of(at)
        sent = [span for span in at.timeline.spans if span.op in of]
        index = {span.op: i for i, span in enumerate(sent)}
        stalls = [(-us, index[n]) for n, us in at.timeline.exposed_us.items() if us and n in index]
        found: list[Segment] = []
        for _, i in sorted(stalls):
            lane = [span for span in sent[: i + 1] if span.lane == sent[i].lane]
            found += [of[span.op] for span in lane[:-4:-1]]
        return list(dict.fromkeys([*found, *at.state]))

    def _segment_of(self, at: Tried) -> dict[str, Segment]:
        return {self.lines.starts[s.kind][m]: s for s in at.state for m in s.members}

    def _fit(self, at: Tried) -> Tried:
        """``at`` with what does not fit into memory mended, as far as that is possible."""
        while at.score.over_nbytes and self.left > 0:
            somewhere, worst = alive(at, self._segment_of(at), self.budget_nbytes)
            less = self._less(at, small_repairs(at.state, worst, self.lines))
            less = less or self._less(at, repairs(at.state, (somewhere, worst), self.lines))
            if not less:
                break
            at = min(less, key=partial(self._dear, at.score))
        return at

    def _less(self, at: Tried, states: Iterable[State]) -> list[Tried]:
        """The plans of ``states`` that exceed the budget by less than ``at`` does."""
        found = map(self.tried, states)
        return [t for t in found if t and t.score.over_nbytes < at.score.over_nbytes]

    def _dear(self, was: Score, tried: Tried) -> float:
        """Time paid per byte of the excess that is gone; little time counts as much as none."""
        more_us = max(tried.score.price_us - was.price_us, GAIN * self.bound_us)
        return more_us / (was.over_nbytes - tried.score.over_nbytes)

    def buckets_of(self, state: State) -> tuple[Bucket, ...]:
        """The buckets of the whole program for ``state``."""
        travel: defaultdict[str, list[tuple[str, Collective]]] = defaultdict(list)
        for name, first in self.first_of.items():
            travel[first].append((name, self.sent[name]))
        return named_buckets(state, self.lines, self.fqns, travel)
