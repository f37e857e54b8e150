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
    """Work for one lane, what must pass before it can begin, and what must follow its end."""

    head_us: float
    us: float
    tail_us: float
    collective: Collective | None


def lower_bound_us(program: Program, cost: CostModel) -> float:
    """Least time of ``program``, whatever is merged with what and whenever it starts.

    Compute that neither feeds a gather nor follows a reduce keeps its order, as it does under
    :func:`~inductor_passes.transform.order.overlap`; the bound is of no other orders.

    For every lane, and every set of jobs that have a long head (or a long tail): the lane cannot
    begin before the shortest head, must do the jobs, and after the last of them the shortest tail
    is still to come. Heads and tails are longest paths, so the compute lane waits for its first
    gather and the last reduce waits for its gradients. Collectives that could share a bucket are
    counted as if they did, which is as cheap as they get if the time of a collective never falls
    with its bytes and two cost no less than their merger; any latency-bandwidth model is so.

    What is in transfer holds compute up, or compute stands still: either way it costs at least what
    compute loses beside it.
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
    """All compute, and what it loses while the busiest lane is in transfer.

    If it stands still for I, all of the wire but I is beside compute, which loses by it: compute +
    I + lost * (wire - I), and I is no less than the shortest head and tail of compute.
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
    """Best bound of the sets of jobs with the longest heads."""
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
    """Predecessors of each op, and the compute before it if both keep their places."""
    moves = moving(program)
    before = list(program.predecessors)
    still = [i for i, op in enumerate(program.ops) if op.kind == "compute" and i not in moves]
    for j, i in pairwise(still):
        before[i] = (*before[i], j)
    return before


def moving(program: Program) -> set[int]:
    """What gathers need, and what follows reduces: it moves with them."""
    early = {i for i, op in program.starts() if op.sends == "gather"}
    # Who waits for several waits when the first must be waited for.
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
    """Whether op ``i``, which needs ``j``, need not wait for its end: that is a start, and this not
    its wait."""
    return program.ops[j].kind == "start" and j not in program.start_of.get(i, ())
