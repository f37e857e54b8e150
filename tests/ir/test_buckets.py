"""The manual planner: which bucket each parameter gets, and each collective."""

from __future__ import annotations

import itertools
import random

import pytest
from programs import layers, random_program

from inductor_passes.ir import buckets as module
from inductor_passes.ir.buckets import Assignment, assign_by_module, plan_buckets
from inductor_passes.ir.program import Bucket
from inductor_passes.ir.text import parse

LLAMA = [
    "embed.weight",
    "layers.0.attention.q.weight",
    "layers.0.attention.q.bias",
    "layers.0.norm.weight",
    "layers.1.attention.q.weight",
    "layers.1.attention.q.bias",
    "layers.1.norm.weight",
    "norm.weight",
    "head.weight",
]


def by_label(found: Assignment) -> dict[str, list[str]]:
    labels: dict[str, list[str]] = {}
    for fqn, label in found.label_of.items():
        labels.setdefault(label, []).append(fqn)
    return {label: sorted(fqns) for label, fqns in labels.items()}


def test_default_is_a_bucket_per_list_element_and_one_for_each_run_around():
    found = assign_by_module(LLAMA)
    assert by_label(found) == {
        "layers.0": sorted(LLAMA[1:4]),
        "layers.1": sorted(LLAMA[4:7]),
        "embed": ["embed.weight"],
        "norm+head": ["head.weight", "norm.weight"],
    }
    assert found.uncovered == ()


def test_default_with_several_lists_has_a_run_between_them():
    fqns = ["enc.0.w", "enc.1.w", "bridge.w", "gate.w", "dec.0.w", "dec.1.w"]
    assert by_label(assign_by_module(fqns)) == {
        "enc.0": ["enc.0.w"],
        "enc.1": ["enc.1.w"],
        "dec.0": ["dec.0.w"],
        "dec.1": ["dec.1.w"],
        "bridge+gate": ["bridge.w", "gate.w"],
    }


def test_default_of_nested_lists_is_the_outermost():
    fqns = ["stages.0.blocks.0.w", "stages.0.blocks.1.w", "stages.1.blocks.0.w"]
    assert by_label(assign_by_module(fqns)) == {"stages.0": fqns[:2], "stages.1": fqns[2:]}


def test_default_without_lists_is_one_bucket_per_top_level_module():
    fqns = ["fc1.weight", "fc1.bias", "fc2.up.weight", "fc2.down.weight", "scale"]
    found = assign_by_module(fqns)
    assert by_label(found) == {
        "fc1": ["fc1.bias", "fc1.weight"],
        "fc2.up+fc2.down": ["fc2.down.weight", "fc2.up.weight"],
        "scale": ["scale"],
    }
    assert found.uncovered == ()


def test_default_of_a_parameter_list_is_not_a_module_list():
    """The last component is the parameter's own name."""
    assert by_label(assign_by_module(["scales.0", "scales.1"])) == {
        "scales": ["scales.0", "scales.1"]
    }


def test_no_parameters():
    assert assign_by_module([]) == Assignment({}, ())


def test_globs_give_each_module_they_match_a_bucket():
    found = assign_by_module(LLAMA, ["layers.*", "head"])
    assert by_label(found) == {
        "layers.0": sorted(LLAMA[1:4]),
        "layers.1": sorted(LLAMA[4:7]),
        "head": ["head.weight"],
        "embed": ["embed.weight"],
        "norm": ["norm.weight"],
    }
    assert found.uncovered == ("embed.weight", "norm.weight")


def test_a_star_stays_within_one_component():
    found = assign_by_module(LLAMA, ["layers.*.norm"])
    assert {"layers.0.norm", "layers.1.norm"} <= set(found.label_of.values())
    with pytest.raises(ValueError, match=r"'layers\*norm' matches no module"):
        assign_by_module(LLAMA, ["layers*norm"])
    assert assign_by_module(["a.1.w", "a.2.w", "a.3.w"], ["a.[12]"]).uncovered == ("a.3.w",)


def test_a_nested_list_shares_a_bucket():
    found = assign_by_module(LLAMA, [["embed", "layers.0"], ["layers.1", "norm", "head"]])
    assert by_label(found) == {
        "embed+layers.0": sorted(LLAMA[:4]),
        "layers.1+norm+head": sorted(LLAMA[4:]),
    }
    assert found.uncovered == ()
    shared = assign_by_module(LLAMA, [["layers.*"]])
    assert by_label(shared)["layers.0+layers.1"] == sorted(LLAMA[1:7])


def test_a_parameter_can_be_named():
    found = assign_by_module(LLAMA, ["layers.*", "layers.0.norm.weight"])
    assert found.label_of["layers.0.norm.weight"] == "layers.0.norm.weight"
    assert found.label_of["layers.1.norm.weight"] == "layers.1"


def test_the_innermost_module_wins_whatever_the_order_of_patterns():
    patterns = ["layers.*", "layers.*.attention", ["layers.0.attention.q", "head"], "embed"]
    found = [assign_by_module(LLAMA, order) for order in itertools.permutations(patterns)]
    assert all(one == found[0] for one in found)
    assert by_label(found[0]) == {
        "layers.0.attention.q+head": ["head.weight", *sorted(LLAMA[1:3])],
        "layers.0": ["layers.0.norm.weight"],
        "layers.1.attention": sorted(LLAMA[4:6]),
        "layers.1": ["layers.1.norm.weight"],
        "embed": ["embed.weight"],
        "norm": ["norm.weight"],
    }


def test_what_no_pattern_covers_is_assigned_by_default_and_reported():
    found = assign_by_module(LLAMA, ["embed"])
    assert found.uncovered == tuple(fqn for fqn in LLAMA if fqn != "embed.weight")
    assert by_label(found) == by_label(assign_by_module(LLAMA))


def test_the_assignment_keeps_the_order_of_the_parameters():
    for patterns in (None, ["layers.1"], [["head", "embed"]]):
        assert list(assign_by_module(LLAMA, patterns).label_of) == LLAMA


def test_two_runs_of_one_module_are_two_buckets():
    fqns = ["dec.pos", "dec.layers.0.w", "dec.layers.1.w", "dec.layers.2.w", "dec.cls"]
    label_of = assign_by_module(fqns).label_of
    assert label_of["dec.pos"] != label_of["dec.cls"]


def test_the_list_is_the_one_of_the_layers():
    coders = [f"{i}.layers.{k}.w" for i in range(2) for k in range(4)]
    assert len(set(assign_by_module(coders).label_of.values())) == 8
    experts = [f"layers.{k}.experts.{i}.w" for k in range(4) for i in range(8)]
    assert len(set(assign_by_module(experts).label_of.values())) == 4


def test_a_pattern_may_match_what_is_in_another_graph():
    found = assign_by_module(LLAMA, ["layers.*", "aux"], known=["aux.weight"])
    assert found.label_of == assign_by_module(LLAMA, ["layers.*"]).label_of


def test_every_parameter_has_a_label():
    for patterns in (None, ["layers.0"], [["head", "embed"]], ["*"], ["*.*", "layers.*.*.*"]):
        assert set(assign_by_module(LLAMA, patterns).label_of) == set(LLAMA), patterns


def test_naming_a_module_alike_twice_is_no_conflict():
    once = assign_by_module(LLAMA, ["layers.*"])
    assert assign_by_module(LLAMA, ["layers.*", "layers.0"]) == once


def test_a_pattern_without_a_match_names_the_closest():
    with pytest.raises(ValueError, match=r"'layer.0' matches no module.*'layers.0'"):
        assign_by_module(LLAMA, ["layer.0"])
    with pytest.raises(ValueError, match=r"'hed' matches no module.*'head'.*named_modules"):
        assign_by_module(LLAMA, [["embed", "hed"]])
    with pytest.raises(ValueError, match="'zzz' matches no module") as error:
        assign_by_module(LLAMA, ["zzz"])
    assert "closest" not in str(error.value)


@pytest.mark.parametrize(
    "patterns",
    [["head", ["head", "norm"]], [["head", "norm"], "head"], [["head", "norm"], ["head", "embed"]]],
)
def test_a_module_named_for_two_buckets(patterns):
    with pytest.raises(ValueError, match=r"'head' is named for two buckets, .*; name it"):
        assign_by_module(LLAMA, patterns)


@pytest.mark.parametrize(
    "patterns",
    [[3], [None], [["layers.0", 1]], [[]], [[["layers.0"]]], "layers.*", b"layers", 3],
    ids=repr,
)
def test_patterns_of_another_type(patterns):
    with pytest.raises(TypeError, match="buckets: expected module FQNs"):
        assign_by_module(LLAMA, patterns)


def program_of(*fields: str):
    """A program of starts, each a collective with the given fields, and their waits."""
    lines = ["input x: 8"]
    for i, field in enumerate(fields):
        kind, rest = field.split(" ", 1)
        lines.append(f"start s{i}(x) -> y{i}: 8 | {kind} nbytes=8 {rest}")
    lines += [f"wait w{i}(y{i})" for i in range(len(fields))]
    return parse("\n".join(lines))


SAME = Assignment(dict.fromkeys("abcdefghijklm", "all"))


def test_a_bucket_is_of_one_label_kind_group_op_and_dtype():
    program = program_of(
        "gather group=dp ranks=4 dtype=f32 fqns=a",
        "gather group=dp ranks=4 dtype=f32 fqns=b",
        "gather group=tp ranks=4 dtype=f32 fqns=c",
        "gather group=dp ranks=4 dtype=bf16 fqns=d",
        "reduce group=dp ranks=4 dtype=f32 op=sum fqns=e",
        "reduce group=dp ranks=4 dtype=f32 op=avg fqns=f",
        "reduce group=dp ranks=4 dtype=bf16 op=sum fqns=g",
        "all_reduce group=dp ranks=4 dtype=f32 op=sum fqns=h",
        "gather group=dp ranks=4 dtype=f32 fqns=i",
        "reduce group=dp ranks=4 dtype=f32 op=sum fqns=j",
    )
    assert plan_buckets(program, SAME) == (
        Bucket("all", ("s0", "s1", "s8")),
        Bucket("all", ("s2",)),
        Bucket("all", ("s3",)),
        Bucket("all", ("s4", "s9")),
        Bucket("all", ("s5",)),
        Bucket("all", ("s6",)),
        Bucket("all", ("s7",)),
    )


def test_labels_divide_and_those_without_one_are_alone():
    gather = "gather group=dp ranks=4 dtype=f32 fqns="
    program = program_of(*(gather + fqn for fqn in "abcd"))
    found = plan_buckets(program, Assignment({"a": "one", "b": "two", "d": "one"}))
    assert found == (Bucket("one", ("s0", "s3")), Bucket("two", ("s1",)), Bucket("c", ("s2",)))


def test_a_bucket_of_too_many_members_is_in_parts(monkeypatch):
    monkeypatch.setattr(module, "MOST_MEMBERS", 3)
    gather = "gather group=dp ranks=4 dtype=f32 fqns="
    program = program_of(*(gather + fqn for fqn in "abcdefgh"))
    labels = dict.fromkeys("abcdefg", "all") | {"h": "all/0"}
    assert plan_buckets(program, Assignment(labels)) == (
        Bucket("all/0'", ("s0", "s1", "s2")),
        Bucket("all/1", ("s3", "s4", "s5")),
        Bucket("all/2", ("s6",)),
        Bucket("all/0", ("s7",)),
    )


def test_collectives_of_others_are_never_in_a_bucket():
    program = program_of(
        "other group=dp ranks=4 dtype=f32 fqns=a",
        "other group=dp ranks=4 dtype=f32",
        "gather group=dp ranks=4 dtype=f32",  # of no parameter
    )
    assert plan_buckets(program, SAME) == ()


def test_buckets_of_layers():
    fqns = [f"layers.{k}.weight" for k in range(3)]
    found = plan_buckets(parse(layers(3, "backward")), assign_by_module(fqns))
    assert found == tuple(
        Bucket(f"layers.{k}", (f"{what}{k}",)) for k in (2, 1, 0) for what in ("g", "r")
    )


def test_every_collective_of_data_parallelism_is_in_one_bucket():
    for seed in range(200):
        program, rng = random_program(seed, 30), random.Random(seed)
        ours = [op for _, op in program.starts() if op.collective.kind != "other"]
        labels = {op.collective.fqns[0]: rng.choice("xyz") for op in ours}
        buckets = plan_buckets(program, Assignment(labels))
        starts = [name for bucket in buckets for name in bucket.starts]
        assert sorted(starts) == sorted(op.name for op in ours), seed
        for bucket in buckets:
            members = [program.ops[program.index[name]].collective for name in bucket.starts]
            places = [list(labels).index(c.fqns[0]) for c in members]
            assert places == sorted(places), seed
            assert len({(c.kind, c.group, c.ranks, c.reduce_op, c.dtype) for c in members}) == 1
            label = bucket.label.rstrip("'")  # of what is sent a second time, another one
            assert {labels[c.fqns[0]] for c in members} == {label}, seed
