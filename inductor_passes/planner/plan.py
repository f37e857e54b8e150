"""A plan, what it is worth, and the error if there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.machine.cost import CostModel
from inductor_passes.machine.simulate import live_by_use, memory, simulate
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlapped

# Plans that differ by less are held to be equally fast: small differences are those of the cost
# model, and fewer launches, or less memory, are worth more.
CLOSE, NEAR = 1.005, 1.01


@dataclass(frozen=True)
class Plan:
    """Buckets, and what is predicted of the program that they make.

    Times and bytes are of what all ranks share (see :mod:`inductor_passes.planner.invariant`):
    shards of parameters, and ops on shards, count nothing."""

    buckets: tuple[Bucket, ...]  # with windows; all gathers, reduces and all-reduces of the program
    step_us: float  # simulated time of the graph
    lower_bound_us: float  # time that no plan can beat
    exposed_us: float  # time that the compute lane stands still
    peak_nbytes: int  # most live bytes
    budget_nbytes: int = 0  # the budget for which it was chosen; 0 if it was not chosen


class BudgetError(ValueError):
    """No schedule meets the memory budget.

    Attributes:
        smallest_nbytes: a budget that can be met: the smaller peak of the plan by module and of
            single collectives. A search may find less.
    """

    def __init__(self, message: str, smallest_nbytes: int) -> None:
        super().__init__(message, smallest_nbytes)  # both, so that it can be pickled
        self.smallest_nbytes = smallest_nbytes

    def __str__(self) -> str:
        return str(self.args[0])


def scheduled(program: Program, buckets: Sequence[Bucket]) -> Program:
    """``program`` with ``buckets`` merged, in the order that their windows ask for."""
    return overlapped(merge(program, buckets), OverlapPolicy())


def evaluate(
    program: Program, cost: CostModel, buckets: Sequence[Bucket], lower_bound_us: float
) -> Plan | None:
    """The simulated plan of ``buckets``; None if members of one depend on each other."""
    try:
        after = scheduled(program, buckets)
    except ProgramError:
        return None
    timeline, peak = simulate(after, cost), memory(after).peak_nbytes
    return Plan(tuple(buckets), timeline.total_us, lower_bound_us, timeline.stalled_us, peak)


def default_budget(manual: Plan, least: Plan, device_nbytes: int | None) -> int:
    """The peak of ``manual``; or what a device has left, if that is less.

    If not even ``least`` fits into what a device has left, that was estimated wrongly (less
    optimizer state, frozen parameters, evaluation), and is ignored: a plan that is slow for its
    sake helps nobody.
    """
    if device_nbytes is None or device_nbytes < least.peak_nbytes:
        return manual.peak_nbytes
    return min(manual.peak_nbytes, device_nbytes)


def budget_error(program: Program, smallest: Plan, budget_nbytes: int) -> BudgetError:
    """The error that no plan meets ``budget_nbytes``; ``smallest`` is one that takes little."""
    room = "; ".join(
        f"{nbytes:,} bytes of {what}"
        for what, nbytes in live_by_use(scheduled(program, smallest.buckets)).items()
    )
    enough = smallest.peak_nbytes * 1.0005 / 1e9  # not less once it is rounded
    return BudgetError(
        f"memory budget: no schedule fits {budget_nbytes:,} bytes; the smallest peak found is "
        f"{smallest.peak_nbytes:,} bytes ({room}). Allow this graph that much (memory_budget_gb="
        f"{enough:.4g} or more; another may need more), lower the batch, or recompute activations",
        smallest.peak_nbytes,
    )
