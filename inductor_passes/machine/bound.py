"""The time that no schedule of a program can beat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from inductor_passes.ir.lineage import behind_reduces
from inductor_passes.ir.program import Collective, Program
from inductor_passes.machine.cost import CostModel
from inductor_passes.machine.simulate import alone_us
from inductor_passes.transform.merge import bucket_class, sent_together

Edges = Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Job:
    """Work for one lane, the time that must pass before it, and the time that must follow it."""

    head_us: float
    us: float
    tail_us: float
    collective: Collective | None


def lower_bound_us(program: Program, cost: CostModel) -> float:
    """Least time of ``program`` under any choice of buckets and any launch times.

    Compute that neither feeds a gather nor follows a reduce keeps its order, as it does under
    :func:`~inductor_passes.transform.order.overlap`; for other orders the bound does not hold.

    Take the jobs of one lane whose head (time before them) is longest. The lane cannot begin them
    before the shortest of these heads, must do them all, and after the last of them the shortest
    tail (time after a job) still follows. The bound is the largest such sum, and likewise for the
    longest tails. Heads and tails are longest paths, so the compute lane waits for its first gather
    and the last reduce waits for its gradients. Collectives that could share a bucket are counted
    as if they did. That is their least time if the time of a collective never falls with its bytes
    and two cost no less than their merger, as in any latency-bandwidth model.

    While something is in transfer, compute either runs slower or stands still; either way it costs
    at least what compute loses beside it.
    """
    us = alone_us(program, cost)
    before = _with_order_of_compute(program)
    heads, tails = _heads(program, us, before), _tails(program, us, before)
    jobs: defaultdict[str | None, list[_Job]] = defaultdict(list)
    for i, op in enumerate(program.ops):
        lane = op.collective.group if op.collective is not None else None
        if op.kind in ("compute", "start"):
            jobs[lane].append(_Job(heads[i], us[i], tails[i], op.collective))
    bound = 0.0
    for of_lane in jobs.values():
        bound = max(bound, *(job.head_us + job.us + job.tail_us for job in of_lane))
        mirrored = [replace(job, head_us=job.tail_us, tail_us=job.head_us) for job in of_lane]
        bound = max(bound, _packed_us(of_lane, cost), _packed_us(mirrored, cost))
    return max(bound, _held_up_us(jobs, cost))


def _held_up_us(jobs: Mapping[str | None, Sequence[_Job]], cost: CostModel) -> float:
    """A bound: all compute, and what it loses while the busiest lane is in transfer.

    If compute stands still for a time I, then at least ``wire - I`` of the transfers run beside
    compute and slow it. So the step takes at least ``compute + I + lost * (wire - I)``, and I is at
    least the shortest head plus the shortest tail of compute.
    """
    wires_us = [
        _packed_us([replace(job, head_us=0.0, tail_us=0.0) for job in of_lane], cost)
        for lane, of_lane in jobs.items()
        if lane is not None
    ]
    lost = 1 - cost.compute_beside
    computes = [job for job in jobs.get(None, ()) if job.us]
    idle = min((job.head_us for job in computes), default=0.0)
    idle += min((job.tail_us for job in computes), default=0.0)
    hidden = max(0.0, max(wires_us, default=0.0) - idle)
    return sum(job.us for job in computes) + idle + lost * hidden


def _packed_us(jobs: Sequence[_Job], cost: CostModel) -> float:
    """The largest bound by the jobs with the n longest heads, for any n."""
    bound = compute_us = 0.0
    shortest_tail = inf
    wire_us: dict[object, float] = {}
    sent: dict[object, Collective] = {}
    for job in sorted(jobs, key=lambda job: -job.head_us):
        shortest_tail = min(shortest_tail, job.tail_us)
        c = job.collective
        if c is None:
            compute_us += job.us
        else:
            key = id(c) if c.kind == "other" else bucket_class(c)
            sent[key] = sent_together(sent.get(key), c)
            wire_us[key] = cost.collective_us(sent[key])
        bound = max(bound, job.head_us + compute_us + sum(wire_us.values()) + shortest_tail)
    return bound


def _with_order_of_compute(program: Program) -> list[tuple[int, ...]]:
    """Predecessors of each op. Each compute that keeps its place also follows the one before it."""
    moves = moving(program)
    before = list(program.predecessors)
    still = [i for i, op in enumerate(program.ops) if op.kind == "compute" and i not in moves]
    for j, i in pairwise(still):
        before[i] = (*before[i], j)
    return before


def moving(program: Program) -> set[int]:
    """Positions of the ops that gathers need or that follow reduces: these move with them."""
    early = {i for i, op in program.starts() if op.sends == "gather"}
    # A wait for several collectives goes where the first of them must be waited for.
    early |= {wait for wait, starts in program.start_of.items() if len(starts) > 1}
    for i in reversed(range(len(program.ops))):
        if i in early:
            early.update(program.predecessors[i])
    return early | behind_reduces(program)


def _heads(program: Program, us: Sequence[float], before: Edges) -> list[float]:
    """Time before each op can begin: the longest path to it."""
    heads = [0.0] * len(us)
    for i, needed in enumerate(before):
        for j in needed:
            passed_us = 0.0 if _is_only_launched(program, j, i) else us[j]
            heads[i] = max(heads[i], heads[j] + passed_us)
    return heads


def _tails(program: Program, us: Sequence[float], before: Edges) -> list[float]:
    """Time after each op has ended: the longest path from it."""
    tails = [0.0] * len(us)
    for i in reversed(range(len(us))):
        for j in before[i]:
            follows = us[i] + tails[i] - (us[j] if _is_only_launched(program, j, i) else 0.0)
            tails[j] = max(tails[j], follows)
    return tails


def _is_only_launched(program: Program, j: int, i: int) -> bool:
    """Whether op ``i``, which needs ``j``, needs only its launch and not its end: ``j`` is a start,
    and ``i`` is not its wait."""
    return program.ops[j].kind == "start" and j not in program.start_of.get(i, ())
