"""Which full parameters stay from forward to backward."""

from __future__ import annotations

import pytest

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.text import parse
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import memory, simulate
from inductor_passes.planner.keep import Costed, Kept, choose_kept, keeping
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlap

LAYERS = 4
FQNS = [f"layers.{k}.weight" for k in range(LAYERS)]
RANKS, WHOLE, ACTIVATION = 40, 400, 50
SHARD = WHOLE // RANKS


NEAR = 4  # ranks of a machine
PART = WHOLE // NEAR


class Cost(LinearCost):
    """Between the ranks of a machine, a collective takes a fifth of the time."""

    def collective_us(self, collective):
        return super().collective_us(collective) * (0.2 if collective.ranks == NEAR else 1.0)


def gather(k: int, sent: str, group: str = f"dp ranks={RANKS}") -> list[str]:
    return [
        f"start g{k}({sent}) -> full{k}: {WHOLE} | gather group={group} nbytes={WHOLE} "
        f"dtype=bf16 fqns={FQNS[k]}",
        f"wait w{k}(full{k}) -> weight{k}: {WHOLE} @full{k}",
    ]


def step(us: float, parts: bool = False) -> tuple[Costed, Costed]:
    """Forward and backward of a few layers, each of whose matmuls takes ``us``. With ``parts``,
    forward leaves a part of each weight, which backward gathers."""
    forward = [f"input x0: {ACTIVATION}", *(f"resident p{k}: {SHARD}" for k in range(LAYERS))]
    for k in range(LAYERS):
        forward += [f"compute cast{k}(p{k}) -> c{k}: {SHARD}", *gather(k, f"c{k}")]
        forward += [f"compute narrow{k}(weight{k}) -> piece{k}: {PART}"] * parts
        forward += [f"compute mm{k}(x{k}, weight{k}) -> x{k + 1}: {ACTIVATION}"]
    forward += [f"output x{k}" for k in range(1, LAYERS + 1)]
    forward += [f"output piece{k}" for k in range(LAYERS)] * parts
    backward = [f"input d{LAYERS}: {ACTIVATION}"]
    for k in range(LAYERS):
        backward += [f"input x{k}: {ACTIVATION}"]
        backward += [f"input piece{k}: {PART}" if parts else f"resident p{k}: {SHARD}"]
    for k in reversed(range(LAYERS)):
        if parts:
            backward += gather(k, f"piece{k}", f"near ranks={NEAR}")
        else:
            backward += [f"compute cast{k}(p{k}) -> c{k}: {SHARD}", *gather(k, f"c{k}")]
        backward += [
            f"compute dgrad{k}(d{k + 1}, weight{k}) -> d{k}: {ACTIVATION}",
            f"compute wgrad{k}(d{k + 1}, x{k}) -> grad{k}: {WHOLE}",
            f"start r{k}(grad{k}) -> part{k}: {SHARD} | reduce group=dp ranks={RANKS} "
            f"nbytes={WHOLE} dtype=bf16 op=sum fqns={FQNS[k]}",
            f"wait rw{k}(part{k}) -> shard{k}: {SHARD} @part{k}",
            f"output shard{k}",
        ]
    op_us = {f"{op}{k}": 0.0 for op in ("cast", "narrow") for k in range(LAYERS)}
    op_us |= {f"{mm}{k}": us for mm in ("mm", "dgrad", "wgrad") for k in range(LAYERS)}
    cost = Cost(latency_us=10.0, link_gb_s=0.01, op_us=op_us)  # 50 us for 400 bytes
    return tuple(Costed(parse("\n".join(lines)).verify(), cost) for lines in (forward, backward))


def test_what_is_kept_is_gathered_once():
    forward, backward = step(100.0)
    kept, given = keeping(forward.program, backward.program, {FQNS[3], FQNS[1]})
    kept.verify()
    given.verify()
    assert {"full1", "full3"} <= set(kept.outputs)
    assert {"full1", "full3"} <= set(given.inputs) and not {"full1", "full3"} & given.resident
    starts = [op.name for _, op in given.starts()]
    assert starts == ["r3", "g2", "r2", "r1", "g0", "r0"]
    assert {"cast1", "cast3"}.isdisjoint(given.index)  # they made nothing else
    assert {"cast0", "w1", "dgrad1"} <= set(given.index)
    assert simulate(given, backward.cost).wire_us == pytest.approx(
        simulate(backward.program, backward.cost).wire_us - 2 * 50
    )
    more = memory(given).live_nbytes[0] - memory(backward.program).live_nbytes[0]
    assert more == 2 * WHOLE - SHARD  # the cast of the first is gone, too


def test_parts_are_kept_where_they_save_time():
    assignment = assign_by_module(FQNS, ["layers.*"])
    ways = [step(1.0), step(1.0, parts=True)]

    def of(budget_nbytes: int) -> Kept:
        return choose_kept(ways, assignment, FQNS, budget_nbytes=budget_nbytes)

    # First what backward needs first, whole; then of the others a part, for the wire is the limit.
    assert [of(n) for n in (1200, 1600)] == [Kept(), Kept(frozenset(FQNS[2:]))]
    assert of(2000) == Kept(frozenset(FQNS[3:]), way=1)
    assert choose_kept(ways[:1], assignment, FQNS, budget_nbytes=2000) == Kept(frozenset(FQNS))


def test_parts_bring_nothing_where_compute_hides_the_gathers():
    assignment = assign_by_module(FQNS, ["layers.*"])
    ways = [step(1000.0), step(1000.0, parts=True)]
    kept = choose_kept(ways, assignment, FQNS, budget_nbytes=10**9)
    assert kept == Kept(frozenset(FQNS[3:]))


def test_no_part_is_kept_of_what_is_kept_whole():
    forward, backward = (costed.program for costed in step(1.0, parts=True))
    kept, given = keeping(forward, backward, {FQNS[3]})
    kept.verify()
    given.verify()
    assert {"full3", "piece2"} <= set(kept.outputs) and "piece3" not in kept.outputs
    assert {"full3", "piece2"} <= set(given.inputs) and "piece3" not in given.inputs
    assert [op.name for _, op in given.starts() if op.sends == "gather"] == ["g2", "g1", "g0"]


def chosen(us: float, budget_nbytes: int | None) -> list[str]:
    assignment = assign_by_module(FQNS, ["layers.*"])
    kept = choose_kept([step(us)], assignment, FQNS, budget_nbytes=budget_nbytes)
    return sorted(kept.fqns)


def test_where_compute_hides_all_else_only_the_first_gather_of_backward_is_saved():
    assert chosen(1000.0, 10**9) == [FQNS[3]]


def test_where_the_wire_is_the_limit_memory_is_spent_on_it():
    assert chosen(1.0, 10**9) == FQNS
    numbers = []
    for budget_nbytes in range(1300, 2000, 20):
        some = chosen(1.0, budget_nbytes)
        numbers.append(len(some))
        assert some == FQNS[LAYERS - len(some) :]  # those that backward needs first
    assert numbers == sorted(numbers) and {0, LAYERS} < set(numbers)


def test_nothing_is_kept_that_does_not_fit():
    assert chosen(1.0, 100) == []


def test_by_default_memory_does_not_grow():
    forward, backward = step(1.0)
    assignment = assign_by_module(FQNS, ["layers.*"])
    kept = choose_kept([(forward, backward)], assignment, FQNS).fqns

    def peak(fqns) -> int:
        programs = keeping(forward.program, backward.program, fqns)
        merged = (merge(p, plan_buckets(p, assignment)) for p in programs)
        ordered = (p.reorder(overlap(p, OverlapPolicy())) for p in merged)
        return max(memory(p).peak_nbytes for p in ordered)

    assert kept and peak(kept) <= peak(())
    least = choose_kept([(forward, backward)], assignment, FQNS, device_nbytes=1)
    assert least == Kept()  # a device may have less


def test_others_than_the_candidates_are_left_alone():
    forward, backward = step(1.0)
    assignment = assign_by_module(FQNS, ["layers.*"])
    kept = choose_kept([(forward, backward)], assignment, FQNS[:2], budget_nbytes=10**9)
    assert kept.fqns == set(FQNS[:2])
