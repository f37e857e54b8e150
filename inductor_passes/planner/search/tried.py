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

LAUNCHES = 0.005  # price of all launches of a plan by module, as a fraction of the bound


class Score(NamedTuple):
    """What a plan is worth; less is better, compared from left to right."""

    # Bytes above the budget: at the peak, plus summed over the ops that all ranks have; 0 if none.
    over_nbytes: int
    price_us: float  # time plus the price of launches
    step_us: float  # time


@dataclass(frozen=True, eq=False)
class Tried:
    """A plan as a state of the search, with its time. Memory, score and timeline are computed when
    they are first asked for: of most plans nobody asks."""

    state: State  # the plan
    launches: int  # buckets
    step_us: float  # time
    price_us: float  # time plus the price of launches
    program: Program  # with the buckets merged and in order
    cost: CostModel  # of its ops
    budget_nbytes: float  # of live bytes
    peaks: dict[State, int]  # most live bytes of each state whose memory was asked for

    @cached_property
    def memory(self) -> Memory:
        """Memory of the program."""
        held = memory(self.program)
        self.peaks[self.state] = held.peak_nbytes
        return held

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the program."""
        return simulate(self.program, self.cost)

    @cached_property
    def score(self) -> Score:
        """The plan's score."""
        return Score(self._over_nbytes(), self.price_us, self.step_us)

    @property
    def fits(self) -> bool:
        """Whether it keeps within the budget."""
        return self.memory.peak_nbytes <= self.budget_nbytes

    @property
    def wire_us(self) -> float:
        """Sum of the times of all that the program sends."""
        return sum(map(self.cost.collective_us, self.program.sent.values()))

    def _over_nbytes(self) -> int:
        """See :class:`Score`; 0 if all fits."""
        if self.fits:
            return 0
        live, room = self.memory.live_nbytes, self.budget_nbytes - self.memory.resident_nbytes
        over = (live[i] - room for i in common_ops(self.program, self.cost) if live[i] > room)
        return int(self.memory.peak_nbytes - self.budget_nbytes + sum(over)) + 1


def launches_price(launches: int, by_module: int) -> float:
    """The price of launches, as a fraction of the time that no plan can beat: half a percent for as
    many as the plan by module makes. Hosts pay for each launch."""
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
        # A storage that takes no bytes may be one that only some ranks have, as a padded shard.
        own = [lives[s] for s in names if s in lives and program.storage_nbytes[s]]
        if op.name not in segment_of or not own:
            continue
        begin, end = min(first for first, _ in own), max(last for _, last in own)
        if bisect_right(full, end) > bisect_left(full, begin):
            somewhere.add(segment_of[op.name])
        if begin <= peak <= end:
            worst.add(segment_of[op.name])
    return somewhere, worst
