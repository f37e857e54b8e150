"""No two buckets of a plan share a label: when ops are ordered they would be taken for one."""

from __future__ import annotations

import pytest
from programs import ROUND_COST

from inductor_passes.ir import buckets as module
from inductor_passes.ir.buckets import assign_by_module, new_label, of_few_members, plan_buckets
from inductor_passes.ir.program import Bucket
from inductor_passes.ir.text import parse
from inductor_passes.planner import auto
from inductor_passes.planner.auto import plan_auto
from inductor_passes.planner.plan import evaluate
from inductor_passes.planner.regular import few_shapes, regular
from inductor_passes.planner.segments import bare, lines_of, named_buckets
from inductor_passes.transform.merge import bucket_class

# The parameters of `norm` are read before and after the layers: two runs, norm and norm'.
FQNS = [
    *("norm.a", "norm.b"),
    *(f"layers.{i}.w" for i in range(3)),
    *("norm.c", "norm.d"),
]


def program_of(fqns):
    lines = [f"resident p{i}: 16" for i in range(len(fqns))]
    for i, fqn in enumerate(fqns):
        lines += [
            f"start g{i}(p{i}) -> f{i}: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 "
            f"fqns={fqn}",
            f"wait w{i}(f{i}) -> v{i}: 64 @f{i}",
            f"compute c{i}(v{i}) -> y{i}: 1",
            f"output y{i}",
        ]
    return parse("\n".join(lines))


def shared(buckets, program) -> list[str]:
    """Labels that two buckets of one kind, group and dtype share."""
    seen, found = set(), []
    for bucket in buckets:
        key = bucket.label, bucket_class(program.ops[program.index[bucket.starts[0]]].collective)
        found += [bucket.label] if key in seen else []
        seen.add(key)
    return found


def test_every_plan_that_is_looked_at(monkeypatch):
    program = program_of(FQNS)
    manual = plan_buckets(program, assign_by_module(FQNS))
    assert {"norm", "norm'"} <= {b.label for b in manual}
    looked_at = []

    def recorded(program, cost, buckets, bound):
        looked_at.append(buckets)
        return evaluate(program, cost, buckets, bound)

    monkeypatch.setattr(auto, "evaluate", recorded)
    plan_auto(program, ROUND_COST, FQNS, budget_nbytes=10**9)
    assert len(looked_at) > 2
    assert [shared(buckets, program) for buckets in looked_at] == [[] for _ in looked_at]


@pytest.mark.parametrize("shape", few_shapes(3))
def test_regular_plans(shape):
    program = program_of(FQNS)
    lines = lines_of(bare(program))
    assert shared(named_buckets(regular(shape, lines), lines, FQNS), program) == []


def test_modules_may_be_called_as_parts_are(monkeypatch):
    monkeypatch.setattr(module, "MOST_MEMBERS", 1)
    program = program_of([f"{i}.{j}" for i in range(3) for j in range(2)])
    labels = ("m", "m/0", "m/0'")
    buckets = [Bucket(label, (f"g{2 * i}", f"g{2 * i + 1}")) for i, label in enumerate(labels)]
    parts = of_few_members(buckets)
    assert len(parts) == 6 and shared(parts, program) == []


def test_a_new_label_is_new():
    assert new_label("x", []) == "x"
    assert new_label("x", ["x", "x'"]) == "x''"
