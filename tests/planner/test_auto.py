"""The auto planner: against every plan there is, within every budget, alike on every rank."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from layered import KINDS, all_plans, layered
from programs import ROUND_COST, layers, random_program, renamed

from inductor_passes.ir import buckets as module
from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import memory
from inductor_passes.planner import auto
from inductor_passes.planner.auto import plan_auto
from inductor_passes.planner.greedy import plan_greedy
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import BudgetError, Plan, evaluate, scheduled
from inductor_passes.transform.windows import buckets_by_module

ROOM = 10**9
# Ops that a search simulates: what holds of its plans does, however long it was.
FEW, SOME = 4_000, 10_000
# Programs against all their plans: 3 layers, or 2 where both sides have windows for each bucket.
EXHAUSTED = {"forward": 60, "backward": 24, "hybrid": 10, "replicate": 30, "mixed": 8}
EXHAUSTED["tensor_parallel"] = 8


def text_of(plan: Plan) -> str:
    return "; ".join(f"{' '.join(b.starts)} ({b.window})" for b in plan.buckets)


@pytest.mark.slow(quick=["forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_is_better(kind):
    for seed in range(EXHAUSTED[kind]):
        one_sided = kind in ("forward", "replicate")
        program, cost, fqns = layered(seed, 3 if one_sided else 2 + seed % 2, kind)
        each = one_sided or seed % 2 == 0
        invariant = rank_invariant(program, cost)
        plans = [evaluate(*invariant, buckets, 0.0) for buckets in all_plans(program, each)]
        peaks = sorted({plan.peak_nbytes for plan in plans})
        # An all-reduce fills a buffer of its own, so that one large bucket at the end can take
        # less memory than single ones do; the search knows nothing of it: there is room here.
        budget = random.Random(seed).choice([*peaks, ROOM]) if kind != "replicate" else ROOM
        found = plan_auto(program, cost, fqns, budget_nbytes=budget)
        best = min(plan.step_us for plan in plans if plan.peak_nbytes <= budget)
        assert found.step_us <= best * auto.CLOSE + 1e-9, (seed, budget)
        assert found.peak_nbytes <= budget, seed
        assert found.lower_bound_us <= min(plan.step_us for plan in plans) + 1e-9, seed
        if kind != "replicate":
            # Hybrid: less than all plans that were looked at, of which none sends the all-reduces
            # of several buckets of reduces as one.
            too_little = peaks[0] // 2 if kind == "hybrid" else peaks[0] - 1
            with pytest.raises(BudgetError):
                plan_auto(program, cost, fqns, budget_nbytes=too_little)


@pytest.mark.slow(quick=["forward", "hybrid"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_that_an_error_names_is_met(kind):
    for seed in range(6):
        program, cost, fqns = layered(seed, 2 + seed % 4, kind)
        with pytest.raises(BudgetError) as error:
            plan_auto(program, cost, fqns, budget_nbytes=1, work=FEW)
        enough = error.value.smallest_nbytes
        found = plan_auto(program, cost, fqns, budget_nbytes=enough, work=FEW)
        assert found.peak_nbytes <= enough, seed


def test_what_was_tried_and_fits_is_found():
    """Even if no climb ends there: of hybrid plans the compact program knows the memory roughly."""
    program, cost, fqns = layered(2, 2, "hybrid")
    assert plan_auto(program, cost, fqns, budget_nbytes=196, work=3000).peak_nbytes <= 196


def test_a_program_without_ops():
    with pytest.raises(BudgetError):
        plan_auto(parse("input x: 8\noutput x"), ROUND_COST, [], budget_nbytes=1)


@pytest.mark.slow(quick=["hybrid"])
@pytest.mark.parametrize("kind", KINDS)
def test_planned_memory_is_that_of_even_shards(kind):
    """Gradients' shards count from their reduce to the end, parameters' do not."""
    for seed in range(8):
        program, cost, fqns = layered(seed, 4, kind)
        plan = plan_auto(program, cost, fqns, work=SOME)
        found = memory(scheduled(program, plan.buckets))
        assert plan.peak_nbytes == found.peak_nbytes - found.resident_nbytes, seed


def small(seed: int) -> tuple[Program, LinearCost, list[str]]:
    rng = random.Random(seed)
    program = random_program(seed, 8)
    fqns = [fqn for _, op in program.starts() for fqn in op.collective.fqns]
    cost = LinearCost(rng.choice((0, 5, 30)), 1e-3 * rng.choice((1, 4, 50)), launch_us=10)
    cost = replace(cost, compute_beside=rng.choice((1.0, 0.5)))
    return program, cost, list(dict.fromkeys(fqns))


@pytest.mark.slow(quick=["0"])
@pytest.mark.parametrize("first", range(0, 1000, 200))
def test_random_programs_stay_within_the_budget(first):
    errors = 0
    for seed in range(first, first + 200):
        program, cost, fqns = small(seed)
        budget = random.Random(seed).randint(50, 1200)
        try:
            plan = plan_auto(program, cost, fqns, budget_nbytes=budget, work=FEW)
        except BudgetError as error:
            errors += 1
            given, budget = budget, error.smallest_nbytes
            if budget <= given:
                pytest.fail(f"program {seed}: {given} bytes are enough")
            plan = plan_auto(program, cost, fqns, budget_nbytes=budget, work=FEW)
        assert plan.peak_nbytes <= budget, seed
        assert plan.lower_bound_us <= plan.step_us * (1 + 1e-9), seed
        starts = [op.name for _, op in program.starts() if op.collective.kind != "other"]
        assert sorted(name for b in plan.buckets for name in b.starts) == sorted(starts), seed
    assert 20 < errors < 180


def test_never_slower_than_by_module_in_its_memory():
    for seed in range(80):
        program, cost, fqns = small(seed)
        invariant = rank_invariant(program, cost)
        assignment, ways = assign_by_module(fqns), (buckets_by_module, plan_buckets)
        plans = [evaluate(*invariant, buckets_of(program, assignment), 0.0) for buckets_of in ways]
        plan = plan_auto(program, cost, fqns, work=FEW)
        if None not in plans:
            assert plan.step_us <= min(p.step_us for p in plans) * auto.CLOSE, seed
            assert plan.peak_nbytes <= max(p.peak_nbytes for p in plans), seed


def shuffled(program: Program, seed: int) -> dict[str, str]:
    names = dict.fromkeys([op.name for op in program.ops] + list(program.buffers))
    names = [*names, *({"dp", "tp", "rep"} - set(names))]
    others = [f"n{k}" for k in range(len(names))]
    random.Random(seed).shuffle(others)
    return dict(zip(names, others, strict=True))


def anonymous(plan: Plan) -> Plan:
    """Names of ops are a rank's own."""
    return replace(plan, buckets=tuple(replace(b, starts=()) for b in plan.buckets))


@pytest.mark.slow(quick=["random"])
@pytest.mark.parametrize("kind", [*KINDS, "random"])
def test_names_do_not_matter(kind):
    for seed in range(8):
        program, cost, fqns = small(seed) if kind == "random" else layered(seed, 4, kind)
        new = shuffled(program, seed)
        us = {new[name]: us for name, us in cost.op_us.items()}
        plan = plan_auto(program, cost, fqns, work=SOME)
        program, cost = renamed(program, new.__getitem__), replace(cost, op_us=us)
        other = plan_auto(program, cost, fqns, work=SOME)
        assert anonymous(plan) == anonymous(other)
        starts = [tuple(new[name] for name in b.starts) for b in plan.buckets]
        assert [b.starts for b in other.buckets] == starts


@pytest.mark.slow(quick=["forward"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replicate"])
def test_sizes_of_shards_do_not_matter(kind):
    """Nor do the times of what is done to them."""
    for seed in range(8):
        program, cost, fqns = layered(seed, 4, kind)
        us = {name: us for name, us in cost.op_us.items() if not name.startswith("divide")}
        local = ("p", "part", "shard", "grad", "all", "summed")
        buffers = {
            name: replace(b, nbytes=seed) if name.rstrip("0123456789") in local else b
            for name, b in program.buffers.items()
        }
        uneven = replace(program, buffers=buffers).verify()
        plan = plan_auto(program, cost, fqns, work=SOME)
        assert plan_auto(uneven, replace(cost, op_us=us), fqns, work=SOME) == plan


PADDED = """
resident shard0: {rows}
resident shard1: 32
input x: 8
compute pad0(shard0) -> padded0: 32
start gather0({sent}) -> full0: 64 | gather group=dp ranks=2 nbytes=64 dtype=float32 fqns=first
wait wait0(full0) -> first: 64 @full0
compute use0(x, first) -> h0: 8
start gather1(shard1) -> full1: 64 | gather group=dp ranks=2 nbytes=64 dtype=float32 fqns=second
wait wait1(full1) -> second: 64 @full1
compute use1(h0, second) -> h1: 8
output h1
"""


def test_pads_of_shards_do_not_matter():
    """A rank with fewer rows pads its shard; the searches of all ranks see one compact program."""
    short = PADDED.format(rows=24, sent="padded0")
    even = "\n".join(line for line in short.splitlines() if "pad0(" not in line)
    even = even.replace("shard0: 24", "shard0: 32").replace("padded0", "shard0")
    one, other = (plan_auto(parse(text), ROUND_COST, ["first", "second"]) for text in (short, even))
    assert one == other


def test_forward():
    """Gathers of 8 us hide behind 10 us of compute, so all but the first do: as by module."""
    program, fqns = parse(layers(4, "forward")), [f"layers.{k}.weight" for k in range(4)]
    cost = replace(ROUND_COST, latency_us=8, link_gb_s=math.inf)
    plan = plan_auto(program, cost, fqns)
    assert text_of(plan) == "g0 (0); g1 (0); g2 (0); g3 (0)"
    assert (plan.step_us, plan.lower_bound_us, plan.exposed_us) == (48, 48, 8)
    assert plan.peak_nbytes == 64 * 5  # at mm2: h1 to h3, and two gathered weights


def test_forward_where_latency_counts():
    """A gather takes 20 us and 5 for each layer: 35 for three, behind 35 of compute."""
    program, fqns = parse(layers(4, "forward")), [f"layers.{k}.weight" for k in range(4)]
    cost = replace(ROUND_COST, latency_us=20, link_gb_s=64 / 5e3, op_us={"mm0": 35})
    plan = plan_auto(program, cost, fqns, budget_nbytes=ROOM)
    assert plan.lower_bound_us == 25 + 35 + 30
    assert plan.step_us <= 1.01 * plan.lower_bound_us and len(plan.buckets) < 4
    tight = plan_auto(program, cost, fqns, budget_nbytes=64 * 5)
    assert tight.step_us > plan.step_us
    assert tight.peak_nbytes <= 64 * 5


def test_backward_where_latency_counts():
    """Reduces of 20 us and 1 a layer hide, two and two, behind 40 us of compute with two."""
    program, fqns = parse(layers(6, "backward")), [f"layers.{k}.weight" for k in range(6)]
    cost = replace(ROUND_COST, latency_us=20, link_gb_s=64e-3)
    plan = plan_auto(program, cost, fqns, budget_nbytes=ROOM)
    reduces = [b.starts for b in plan.buckets if b.starts[0].startswith("r")]
    assert 1 < len(reduces) < 6
    assert plan.step_us <= plan.lower_bound_us * 1.02
    assert plan.exposed_us <= 2 * 26


def test_a_small_model_is_not_one_bucket():
    program, fqns = parse(layers(12, "forward")), [f"layers.{k}.weight" for k in range(12)]
    cost = LinearCost(latency_us=30, link_gb_s=1, op_us={f"mm{k}": 20 for k in range(12)})
    plan = plan_auto(program, cost, fqns, budget_nbytes=ROOM)
    assert len(plan.buckets) > 1
    assert len(plan.buckets[0].starts) <= 4  # whose gather takes 0.2 us longer than one's
    assert plan.exposed_us < 2 * 31


def test_a_mixed_run_is_a_bucket_of_each_dtype():
    text = layers(4, "forward").replace("dtype=f32 fqns=layers.2", "dtype=bf16 fqns=layers.2")
    cost = replace(ROUND_COST, latency_us=100, link_gb_s=math.inf, launch_us=1)
    plan = plan_auto(
        parse(text), cost, [f"layers.{k}.weight" for k in range(4)], budget_nbytes=ROOM
    )
    assert all(len({name == "g2" for name in b.starts}) == 1 for b in plan.buckets)
    assert any(b.starts == ("g2",) for b in plan.buckets)
    assert len(plan.buckets) == 2


@pytest.mark.parametrize(
    ("part", "latency_us", "most"), [("forward", 2, 1), ("backward", 2, 1), ("backward", 20, 2)]
)
def test_small_changes_of_cost_change_nothing(part, latency_us, most):
    """Nothing if the plan by module is as good as any, and little where there is a search."""
    program, fqns = parse(layers(8, part)), [f"layers.{k}.weight" for k in range(8)]
    plans, by_module = set(), buckets_by_module(program, assign_by_module(fqns))
    for percent in (-3, 0, 3):
        cost = replace(ROUND_COST, latency_us=latency_us * (1 + percent / 100), link_gb_s=64e-3)
        plan = plan_auto(program, cost, fqns, budget_nbytes=ROOM)
        assert (plan.buckets == by_module) == (latency_us == 2)
        plans.add(text_of(plan))
    assert len(plans) <= most


@pytest.mark.slow
def test_an_old_plan_stays_good_when_costs_change_a_little():
    for seed in range(10):
        program, cost, fqns = layered(seed, 5, "backward")
        plan = plan_auto(program, cost, fqns)
        changed = replace(cost, link_gb_s=cost.link_gb_s * 1.01)
        again = plan_auto(program, changed, fqns)
        kept = evaluate(*rank_invariant(program, changed), plan.buckets, 0.0)
        assert kept.step_us <= again.step_us * 1.02, seed


def test_a_budget_that_nothing_meets():
    program, fqns = parse(layers(3, "backward")), [f"layers.{k}.weight" for k in range(3)]
    with pytest.raises(BudgetError, match=r"no schedule fits 100 bytes.*384") as error:
        plan_auto(program, ROUND_COST, fqns, budget_nbytes=100)
    assert error.value.smallest_nbytes == 384
    # d3 and h0 to h2 come in, dgrad2 makes d2; its weight is gathered.
    assert "320 bytes of activations; 64 bytes of gathered" in str(error.value)
    assert plan_auto(program, ROUND_COST, fqns, budget_nbytes=384).peak_nbytes == 384


@pytest.mark.parametrize("planner", [plan_auto, plan_greedy])
def test_what_the_device_has_caps_the_default_budget(planner):
    program, fqns = parse(layers(6, "backward")), [f"layers.{k}.weight" for k in range(6)]

    def peak(**limits: int) -> int:
        return planner(program, ROUND_COST, fqns, **limits).peak_nbytes

    by_default = peak()
    assert peak(device_nbytes=by_default) == by_default
    assert peak(device_nbytes=by_default - 1) < by_default
    assert peak(device_nbytes=1) == by_default  # nothing fits: that was estimated wrongly
    with pytest.raises(BudgetError, match="no schedule fits 1 bytes"):  # the user's is a command
        peak(budget_nbytes=1, device_nbytes=by_default)


@pytest.mark.parametrize("value", [None, math.nan, -1.0, math.inf, "3"])
def test_a_cost_that_is_none(value):
    program, fqns = parse(layers(2, "forward")), [f"layers.{k}.weight" for k in range(2)]

    class NoCompute(LinearCost):
        def compute_us(self, program, op):
            return value if op.name == "mm1" else 1.0

    class NoWire(LinearCost):
        def collective_us(self, collective):
            return value

    got = re.escape(f"got {value!r}")
    with pytest.raises(ValueError, match=f"mm1.*{got}"):
        plan_auto(program, NoCompute(), fqns)
    with pytest.raises(ValueError, match=f"gather of 64 bytes.*layers.0.weight.*{got}"):
        plan_auto(program, NoWire(), fqns)


def test_nothing_to_plan():
    plan = plan_auto(parse("input x: 8\ncompute f(x) -> y: 8\noutput y"), ROUND_COST, [])
    assert (plan.buckets, plan.step_us, plan.peak_nbytes) == ((), 10, 16)


@pytest.mark.slow(quick=["forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bucket_has_too_many_members(kind, monkeypatch):
    """Whatever the plan is: by module, joined, in parts or searched for."""
    monkeypatch.setattr(module, "MOST_MEMBERS", 2)
    for seed in range(10):
        program, cost, fqns = layered(seed, 6, kind)
        found = plan_auto(program, cost, fqns, work=SOME)
        assert all(len(bucket.starts) <= 2 for bucket in found.buckets)
        assert sorted(name for bucket in found.buckets for name in bucket.starts) == sorted(
            op.name for _, op in program.starts() if op.collective.fqns
        )


@pytest.mark.slow
def test_memory_that_buys_no_time_is_given_back():
    """Without a budget; within one, all of it may be taken."""
    less = {}
    for seed in range(6):
        program, cost, fqns = layered(seed, 6, "backward")
        rank_invariants = rank_invariant(program, cost)
        manual = evaluate(*rank_invariants, plan_buckets(program, assign_by_module(fqns)), 0.0)
        fast = plan_auto(program, cost, fqns, budget_nbytes=manual.peak_nbytes, work=4 * SOME)
        lean = plan_auto(program, cost, fqns, work=4 * SOME)
        assert lean.budget_nbytes == manual.peak_nbytes, seed
        assert lean.peak_nbytes <= fast.peak_nbytes, seed
        assert lean.step_us <= auto.NEAR * fast.step_us, seed
        assert len(lean.buckets) <= auto.LEAN_LAUNCHES * len(manual.buckets), seed
        less |= {seed: (fast.peak_nbytes, lean.peak_nbytes)} if lean != fast else {}
    assert less == {5: (584, 464)}
