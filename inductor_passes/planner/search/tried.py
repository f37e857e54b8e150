"""What a search knows about a plan that it has tried."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from inductor_passes.ir.program import Program
from inductor_passes.machine.cost import CostModel
from inductor_passes.machine.simulate import Memory, Timeline, lifetimes, memory, simulate
from inductor_passes.planner.invariant import common_ops
from inductor_passes.planner.segments import Segment, State

LAUNCHES = 0.005  # of the bound, that all launches of a plan by module are held to be worth


class Score(NamedTuple):
    """What a plan is worth; less is better, compared from left to right."""

    # Bytes that do not fit, where most is alive and summed over the ops that all ranks have.
    over_nbytes: int
    price_us: float  # time, and what launches are held to be worth
    step_us: float  # time


@dataclass(frozen=True, eq=False)
class Tried:
    """A plan as a state of the search, with its time. Memory, score and timeline are computed when
    they are first asked for: of most plans nobody asks."""

    state: State  # the plan
    launches: int  # buckets
    step_us: float  # time
    price_us: float  # time, and what launches are held to be worth
    program: Program  # with the buckets merged and in order
    cost: CostModel  # of its ops
    budget_nbytes: float  # of live bytes
    peaks: dict[State, int]  # most live bytes of each state whose memory was asked for

    @cached_property
    def memory(self) -> Memory:
        """Of the program."""
        held = memory(self.program)
        self.peaks[self.state] = held.peak_nbytes
        return held

    @cached_property
    def timeline(self) -> Timeline:
        """Of the program."""
        return simulate(self.program, self.cost)

    @cached_property
    def score(self) -> Score:
        """What it is worth."""
        return Score(self._over_nbytes(), self.price_us, self.step_us)

    @property
    def fits(self) -> bool:
        """Whether it keeps within the budget."""
        return self.memory.peak_nbytes <= self.budget_nbytes

    @property
    def wire_us(self) -> float:
        """Of all that the program sends."""
        return sum(map(self.cost.collective_us, self.program.sent.values()))

    def _over_nbytes(self) -> int:
        """See :class:`Score`; 0 if all fits."""
        if self.fits:
            return 0
        live, room = self.memory.live_nbytes, self.budget_nbytes - self.memory.resident_nbytes
        over = (live[i] - room for i in common_ops(self.program, self.cost) if live[i] > room)
        return int(self.memory.peak_nbytes - self.budget_nbytes + sum(over)) + 1


def launches_price(launches: int, by_module: int) -> float:
    """What launches are held to be worth, as a fraction of the time that no plan can beat; those
    of the plan by module, half a percent: hosts pay for each of them."""
    return LAUNCHES * launches / max(1, by_module)


def alive(
    tried: Tried, segment_of: Mapping[str, Segment], budget_nbytes: float
) -> tuple[set[Segment], set[Segment]]:
    """Segments that hold memory where there is too much, and those where there is most.

    Args:
        tried: a plan.
        segment_of: each start of its program.
        budget_nbytes: beyond which memory is too much.
    """
    program = tried.program
    live, lives = tried.memory.live_nbytes, lifetimes(program)
    room = budget_nbytes - tried.memory.resident_nbytes
    full = [i for i, nbytes in enumerate(live) if nbytes > room]
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    given = program.storages(program.inputs)
    somewhere, worst = set(), set()
    for _, op in program.starts():
        names = program.storages((*op.reads, *op.writes)) - given
        # What takes nothing may be what some ranks alone have, as a padded shard.
        own = [lives[s] for s in names if s in lives and program.storage_nbytes[s]]
        if op.name not in segment_of or not own:
            continue
        begin, end = min(first for first, _ in own), max(last for _, last in own)
        if bisect_right(full, end) > bisect_left(full, begin):
            somewhere.add(segment_of[op.name])
        if begin <= peak <= end:
            worst.add(segment_of[op.name])
    return somewhere, worst
