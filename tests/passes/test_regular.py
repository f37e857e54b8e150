"""Regular plans: what they are, and that they are better where those by module fall short."""

from __future__ import annotations

import re

import pytest
from layered import KINDS, layered
from programs import layers

from inductor_passes import auto, regular
from inductor_passes.auto import plan_auto
from inductor_passes.buckets import assign_by_module, plan_buckets
from inductor_passes.cost import LinearCost
from inductor_passes.invariant import rank_invariant
from inductor_passes.merge import bucket_class
from inductor_passes.plan import evaluate
from inductor_passes.program import Bucket
from inductor_passes.regular import in_parts, joined, sent_on
from inductor_passes.text import parse

SIZES = (10, 10, 60, 10, 10)
ONE_MODULE = "\n".join(
    [
        *(f"resident p{i}: 4" for i in range(len(SIZES))),
        *(
            f"start g{i}(p{i}) -> f{i}: {n} | gather group=dp ranks=4 nbytes={n} dtype=f32 "
            f"fqns=m.p{i}\nwait w{i}(f{i}) -> v{i}: {n} @f{i}\ncompute c{i}(v{i}) -> y{i}: 1"
            for i, n in enumerate(SIZES)
        ),
        *(f"output y{i}" for i in range(len(SIZES))),
    ]
)


def fqns_of(program) -> list[str]:
    return sorted({f for _, op in program.starts() for f in op.collective.fqns})


def test_parts_have_about_as_many_bytes():
    program = parse(ONE_MODULE)
    (whole,) = plan_buckets(program, assign_by_module([f"m.p{i}" for i in range(len(SIZES))]))
    found = {len(buckets): buckets for buckets in in_parts([whole], program)}
    assert [b.starts for b in found[1]] == [whole.starts]
    assert [b.starts for b in found[2]] == [("g0", "g1"), ("g2", "g3", "g4")]
    assert [b.starts for b in found[3]] == [("g0", "g1"), ("g2",), ("g3", "g4")]
    assert [b.label for b in found[2]] == ["m/0", "m/1"]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_all_is_sent_once_and_in_order(part):
    program = parse(layers(5, part))
    fqns = fqns_of(program)
    manual = plan_buckets(program, assign_by_module(fqns))
    shapes = in_parts(manual, program)
    assert len(shapes) > 1
    for buckets in shapes:
        assert [s for b in buckets for s in b.starts] == [s for b in manual for s in b.starts]
        assert len({(b.label, b.starts[0][0]) for b in buckets}) == len(buckets)


def test_collectives_that_are_neither_stay_together():
    text = ONE_MODULE.replace("gather", "all_reduce").replace("dtype=f32", "dtype=f32 op=sum")
    program = parse(text)
    whole = Bucket("m", tuple(f"g{i}" for i in range(len(SIZES))))
    assert in_parts([whole], program) == [[whole]]


def four_each(n: int, reduced: bool) -> str:
    """Layers of four parameters, each gathered, computed with, and its gradient reduced or not."""
    lines = ["input x: 8"]
    for k in reversed(range(n)):
        names = [f"{k}_{i}" for i in range(4)]
        for i, name in enumerate(names):
            lines += [
                f"resident p{name}: 16",
                f"start g{name}(p{name}) -> f{name}: 64 | gather group=dp ranks=4 nbytes=64 "
                f"dtype=f32 fqns=layers.{k}.p{i}",
                f"wait w{name}(f{name}) -> v{name}: 64 @f{name}",
            ]
        for i, name in enumerate(names):
            lines += [f"compute c{name}(v{name}, x) -> d{name}: {64 if reduced else 1}"]
            if reduced:
                lines += [
                    f"start r{name}(d{name}) -> s{name}: 16 | reduce group=dp ranks=4 nbytes=64 "
                    f"dtype=f32 op=sum fqns=layers.{k}.p{i}",
                    f"wait q{name}(s{name}) -> t{name}: 16 @s{name}",
                ]
            lines += [f"output {'t' if reduced else 'd'}{name}"]
    return "\n".join(lines)


@pytest.mark.parametrize("reduced", [True, False])
def test_where_modules_do_not_fit_parts_do(monkeypatch, reduced):
    text = four_each(12, reduced)
    program, cost = parse(text), LinearCost(1, link_gb_s=0.02, launch_us=10)
    fqns = fqns_of(program)
    invariant = rank_invariant(program, cost)
    manual = evaluate(*invariant, plan_buckets(program, assign_by_module(fqns)), 0.0)
    made = [evaluate(*invariant, b, 0.0) for b in in_parts(manual.buckets, invariant[0])]
    budget = min(plan.peak_nbytes for plan in made)
    assert budget < 0.9 * manual.peak_nbytes
    monkeypatch.setattr(auto, "SEARCHES", ())
    found = plan_auto(program, cost, fqns, budget_nbytes=budget)
    monkeypatch.setattr(regular, "SHAPES", ())
    without = plan_auto(program, cost, fqns, budget_nbytes=budget)
    assert found.peak_nbytes <= budget and found.step_us < 0.95 * without.step_us


def _regular(buckets, program, fqns):
    return [
        *in_parts(buckets, program),
        *sent_on(buckets, program),
        *joined(buckets, program, fqns),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_regular_plans_can_be_made(kind):
    """Each sends the same, in buckets of one kind, group, op and dtype, in some legal order."""
    program, cost, fqns = layered(3, 9, kind)
    manual = plan_buckets(program, assign_by_module(fqns))
    shapes = _regular(manual, program, fqns)
    assert bool(sent_on(manual, program)) == (kind == "hybrid")
    assert bool(joined(manual, program, fqns)) == (kind != "replicate")
    for buckets in shapes:
        assert sorted(s for b in buckets for s in b.starts) == sorted(
            s for b in manual for s in b.starts
        )
        for bucket in buckets:
            sent = [program.ops[program.index[name]].collective for name in bucket.starts]
            assert len({bucket_class(c) for c in sent}) == 1
        assert evaluate(program, cost, buckets, 0.0) is not None


def test_joined_but_for_what_nothing_hides():
    program = parse(layers(9, "backward"))
    manual = plan_buckets(program, assign_by_module(fqns_of(program)))
    shapes = joined(manual, program, fqns_of(program))
    sizes = [
        [len(b.starts) for b in buckets if b.starts[0][0] == kind]
        for buckets in shapes
        for kind in "gr"
    ]
    assert sizes == [[1, 2, 2, 2, 2], [1] * 9, [1, 4, 4], [4, 4, 1]]
    assert shapes[0][1].starts == ("g6", "g7"), "in the order of the parameters"
    assert joined(manual[:2], program, fqns_of(program)) == []
    nameless = parse(re.sub(r" fqns=\S+", "", layers(9, "forward")))
    singles = [Bucket("", (op.name,)) for _, op in nameless.starts()]
    assert [len(b.starts) for b in joined(singles, nameless, [])[0]] == [1, 2, 2, 2, 2]


def test_where_the_wire_is_as_busy_as_compute_modules_are_joined(monkeypatch):
    """A gather takes 6 us and 10 a layer, whose compute takes 14: joined, two take 26 of 28."""
    program = parse(layers(16, "forward"))
    cost = LinearCost(6, link_gb_s=64e-4, op_us={f"mm{k}": 14 for k in range(16)})
    monkeypatch.setattr(auto, "SEARCHES", ())
    found = plan_auto(program, cost, fqns_of(program), budget_nbytes=1e9)
    monkeypatch.setattr(regular, "MODULES", ())
    without = plan_auto(program, cost, fqns_of(program), budget_nbytes=1e9)
    assert found.step_us < without.step_us - 10


def hybrid(n: int) -> str:
    """Backward of ``n`` layers of three parameters; what is reduced is all-reduced."""
    lines = ["input x: 8"]
    for name in (f"{k}_{i}" for k in reversed(range(n)) for i in range(3)):
        fqn = f"layers.{name.replace('_', '.p')}"
        lines += [
            f"compute c{name}(x) -> d{name}: 64",
            f"start r{name}(d{name}) -> s{name}: 16 | reduce group=dp ranks=4 nbytes=64 dtype=f32 "
            f"op=sum fqns={fqn}",
            f"wait q{name}(s{name}) -> t{name}: 16 @s{name}",
            f"start a{name}(t{name}) -> u{name}: 16 | all_reduce group=copies ranks=2 nbytes=16 "
            f"dtype=f32 op=sum fqns={fqn}",
            f"wait b{name}(u{name}) -> v{name}: 16 @u{name}",
            f"output v{name}",
        ]
    return "\n".join(lines)


@pytest.mark.parametrize("n", [2, 8])
def test_the_last_ones_are_sent_on_in_parts(n):
    program = parse(hybrid(n))
    whole, ends = sent_on(plan_buckets(program, assign_by_module(fqns_of(program))), program)
    last = min(n, 3)
    for kind, sizes in (("r", [1, 1, 1]), ("a", [1, 2])):
        assert [len(b.starts) for b in whole if b.starts[0][0] == kind] == [3] * n
        found = [len(b.starts) for b in ends if b.starts[0][0] == kind]
        assert found == [3] * (n - last) + sizes * last
    assert {b.window for b in ends if b.starts[0][0] == "r"} == {1}


def test_what_is_sent_on_goes_sooner(monkeypatch):
    """Each next module's compute of 12 us hides an all-reduce, if the reduce is waited for."""
    program = parse(hybrid(8))
    us = {op.name: 4 for op in program.ops if op.kind == "compute"}
    cost = LinearCost(6, link_gb_s=1e3, op_us=us)
    monkeypatch.setattr(auto, "SEARCHES", ())
    monkeypatch.setattr(auto, "_edges_split", lambda *_: ())
    steps = []
    for ends in (regular.ENDS, regular.ENDS[:1], ()):
        monkeypatch.setattr(regular, "ENDS", ends)
        found = evaluate(
            *rank_invariant(program, cost),
            plan_auto(program, cost, fqns_of(program), budget_nbytes=1e9).buckets,
            0.0,
        )
        steps.append(found.step_us)
    assert steps[0] <= steps[1] < steps[2] - 5
