"""What a search tries is what merging and ordering make of a program."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from layered import KINDS, layered
from programs import descendants, random_program

from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.planner.auto import plan_auto
from inductor_passes.planner.plan import scheduled
from inductor_passes.planner.search import schedules
from inductor_passes.planner.search.schedules import Schedules
from inductor_passes.transform.merge import bucket_class


def tried(monkeypatch) -> list[tuple[Program, Sequence[Bucket], Program | None]]:
    """Programs, buckets, and what they became, as a search asks for it; None where it raised."""
    found = []
    of = Schedules.of

    def recorded(self: Schedules, buckets: Sequence[Bucket]) -> Program:
        found.append((self.program, buckets, None))
        after = of(self, buckets)
        found[-1] = (self.program, buckets, after)
        return after

    monkeypatch.setattr(Schedules, "of", recorded)
    return found


def but_shards(program: Program) -> list[str]:
    """The ops in order, without waits for reduces and what needs these: at one place they may have
    another sequence."""
    waits = {i for i, of in program.start_of.items() if program.ops[of[0]].sends != "gather"}
    late = waits | descendants(program, waits)
    starts = {i for i, _ in program.starts()}
    return [op.name for i, op in enumerate(program.ops) if i not in late or i in starts]


def none_is_looked_for_anew(monkeypatch) -> None:
    def refused(program: Program, buckets: Sequence[Bucket]) -> Program:
        raise AssertionError(f"merged, and then put in order: {buckets}")

    monkeypatch.setattr(schedules, "scheduled", refused)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_tries_what_is_merged_and_put_in_order(kind, monkeypatch):
    found = tried(monkeypatch)
    for seed in range(4):
        program, cost, fqns = layered(seed, 9, kind)
        plan_auto(program, cost, fqns, budget_nbytes=10**9, work=20_000)
    several = same = 0
    for program, buckets, after in found:
        by_passes = made_by(scheduled, program, buckets)
        assert (after is None) == (by_passes is None)
        if after is None or by_passes is None:
            continue
        assert set(after.ops) == set(by_passes.ops)
        assert but_shards(after) == but_shards(by_passes)
        same += after.ops == by_passes.ops and after.start_of == by_passes.start_of
        several += len(buckets) < sum(len(bucket.starts) for bucket in buckets)
    assert several > 50
    assert same == len(found) or (kind == "mixed" and same > 0.8 * len(found))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hybrid"])
def test_what_layers_send_is_not_looked_for_anew(kind, monkeypatch):
    none_is_looked_for_anew(monkeypatch)
    found = tried(monkeypatch)
    for seed in range(4):
        program, cost, fqns = layered(seed, 9, kind)
        plan_auto(program, cost, fqns, budget_nbytes=10**9, work=5_000)
    assert found


def buckets_of_all(program: Program, rng: random.Random) -> list[Bucket]:
    """Random ones of all collectives, of which some may need each other."""
    alike: dict[object, list[str]] = {}
    for _, op in program.starts():
        c = op.collective
        if c is not None and c.kind != "other":
            alike.setdefault((bucket_class(c), rng.randint(0, 2)), []).append(op.name)
    found = [Bucket(f"b{k}", tuple(names)) for k, names in enumerate(alike.values())]
    return [replace(bucket, window=rng.choice([0, 1, 2, 3])) for bucket in found]


def of_schedules(program: Program, buckets: Sequence[Bucket]) -> Program:
    return Schedules(program).of(buckets)


def made_by(
    make: Callable[[Program, Sequence[Bucket]], Program],
    program: Program,
    buckets: Sequence[Bucket],
) -> Program | None:
    try:
        return make(program, buckets)
    except ProgramError:
        return None


def test_random_programs_are_legal_and_refused_where_merging_refuses():
    refused = fast = 0
    for seed in range(400):
        program = random_program(seed, 24)
        buckets = buckets_of_all(program, random.Random(seed))
        by_passes = made_by(scheduled, program, buckets)
        if by_passes is None:
            refused += 1
            assert made_by(of_schedules, program, buckets) is None
            continue
        after = of_schedules(program, buckets).verify()
        assert {op.name: op for op in after.ops} == {op.name: op for op in by_passes.ops}
        # What is known of its waits is what can be read off it.
        assert after.start_of == replace(after).start_of
        fast += after.ops == by_passes.ops and len(after.ops) < len(program.ops)
    assert refused > 10
    assert fast > 100


def test_what_is_written_in_place_is_looked_for_anew(monkeypatch):
    """But not for the sake of collectives that are not ours, of which none is merged."""
    programs = (random_program(seed, 40) for seed in range(200))
    written = [p for p in programs if p.in_place and len(buckets_of_all(p, random.Random(0))) > 1]
    together, asked = Schedules._together, 0

    def counted(*args: Any) -> Program | None:
        nonlocal asked
        asked += 1
        return together(*args)

    monkeypatch.setattr(Schedules, "_together", counted)
    anew = theirs = 0
    for program in written:
        ours, other = (
            {
                program.buffers[name].storage
                for _, op in program.starts()
                if (op.sends == "other") == is_other
                for name in (*op.reads, *op.writes)
            }
            for is_other in (False, True)
        )
        before = asked
        if made_by(of_schedules, program, buckets_of_all(program, random.Random(0))) is not None:
            assert (asked == before) == (not ours.isdisjoint(program.in_place))
            anew += asked == before
            theirs += asked > before and not other.isdisjoint(program.in_place)
    assert anew > 5 and theirs > 1
