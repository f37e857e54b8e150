"""Where the climbs of a search begin, and the plans of the whole program that they end at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inductor_passes.ir.program import Bucket
from inductor_passes.planner.plan import NEAR, Plan
from inductor_passes.planner.search.local_search import LocalSearch
from inductor_passes.planner.segments import State

AGAIN = 3  # times that a climb whose end does not fit goes on, with less room
# Climbs begin at the most promising plan, at the plan by module, and at the best that fits; and at
# the others of the MORE_CLIMBS most promising ones, while the fraction EASY of the work is left, as
# for small programs.
MORE_CLIMBS, EASY = 6, 4 / 5


def climbed(
    search: LocalSearch,
    manual: Plan,
    halves: Sequence[Bucket],
    found: Callable[[State], Plan | None],
) -> list[Plan]:
    """The ends of climbs from the most promising plans, as plans of the whole program.

    Args:
        search: of the small program.
        manual: the plan by module.
        halves: buckets from plans of the halves of a whole step; empty if it is no whole step.
        found: gives the plan of the whole program for a state; None if that cannot be made.
    """
    starts = search.starts()
    fitting = next((tried for tried in starts if tried.fits), None)
    near = search.by_buckets(manual.buckets)
    joined = search.by_buckets(halves) if halves else None
    known = [start for start in (joined, *starts[:1], near, fitting) if start is not None]
    plans: list[Plan] = []
    first = dict.fromkeys(known)
    for start in dict.fromkeys([*first, *starts[1:MORE_CLIMBS]]):
        if start not in first and search.left < EASY * search.allowed:
            break
        end = search.climb(start)
        plan = found(end.state)
        for _ in range(AGAIN):
            # The compact program does not quite have the memory of the whole one.
            if plan is None or end.score.over_nbytes or plan.peak_nbytes <= search.whole_nbytes:
                break
            again = search.with_less_room(end, plan.peak_nbytes - end.memory.peak_nbytes)
            if again is None:
                break
            end = again
            plan = found(end.state)
        if plan is not None:
            plans.append(plan)
            fits = plan.peak_nbytes <= search.whole_nbytes
            few = len(plan.buckets) <= search.most_launches
            if fits and few and plan.step_us <= NEAR * search.bound_us:
                break
    return plans
