"""No two buckets of a plan share a label: when ops are ordered they would be taken for one."""

from __future__ import annotations

import pytest
from programs import ROUND_COST

from inductor_passes import auto
from inductor_passes.auto import plan_auto
from inductor_passes.buckets import assign_by_module, new_label, plan_buckets
from inductor_passes.merge import bucket_class, merge
from inductor_passes.order import OverlapPolicy, overlap, starts_in
from inductor_passes.plan import evaluate
from inductor_passes.program import Bucket
from inductor_passes.regular import in_parts, joined
from inductor_passes.text import parse

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
    plan_auto(program, ROUND_COST, FQNS)
    assert any(("g0",) in [b.starts for b in buckets] for buckets in looked_at)  # an edge is split
    assert [shared(buckets, program) for buckets in looked_at] == [[] for _ in looked_at]


def test_a_split_edge_is_ordered_by_itself():
    """Under one label with the run after the layers it would start where that one is used."""
    program = program_of(FQNS)
    manual = plan_buckets(program, assign_by_module(FQNS))
    taken = [b.label for b in manual]
    split = [part for bucket in manual for part in auto._split(bucket, ("g0",), taken)]
    after = merge(program, split)
    starts = starts_in(after, overlap(after, OverlapPolicy(1)))
    assert starts == ["g0", "g1", "g2", "g3", "g4", "g5"]


@pytest.mark.parametrize(
    "labels", [("m", "m/0", "m/0'"), ("a", "b+c", "a+b", "c"), ("m", "m'", "m''")]
)
def test_modules_may_be_called_as_parts_are(labels):
    fqns = [f"{i}.{j}" for i in range(len(labels)) for j in range(3)]
    program = program_of(fqns)
    buckets = [
        Bucket(label, tuple(f"g{3 * i + j}" for j in range(3))) for i, label in enumerate(labels)
    ]
    for shape in (*in_parts(buckets, program), *joined(buckets, program, fqns)):
        assert shared(shape, program) == []


def test_a_new_label_is_new():
    assert new_label("x", []) == "x"
    assert new_label("x", ["x", "x'"]) == "x''"
