"""Merging: the collectives of a bucket become one, and nothing else changes."""

from __future__ import annotations

import graphlib
import random
from collections import Counter

import pytest
from programs import layers, random_program

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Bucket, Program, ProgramError
from inductor_passes.ir.text import parse, to_text
from inductor_passes.transform.merge import merge

TWO = """\
input x: 64
resident p: 16
resident q: 8
start g(p) -> full_p: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 fqns=fc.weight
wait w(full_p) -> weight: 64 @full_p
compute cast(q) -> half_q: 4
start h(half_q) -> full_q: 16 | gather group=dp ranks=4 nbytes=16 dtype=f32 fqns=fc.bias
wait u(full_q) -> bias: 16 @full_q
compute mm(x, weight, bias) -> y: 64
output y
"""

TWO_MERGED = """\
input x: 64
resident p: 16
resident q: 8
compute cast(q) -> half_q: 4
start g(p, half_q) -> full_p: 64, full_q: 16 | gather group=dp ranks=4 nbytes=80 \
dtype=f32 bucket=fc members=2 fqns=fc.weight, fc.bias
wait w(full_p) -> weight: 64 @full_p
wait u(full_q) -> bias: 16 @full_q
compute mm(x, weight, bias) -> y: 64
output y
"""


def test_gathers():
    assert to_text(merge(parse(TWO), [Bucket("fc", ("g", "h"))])) == TWO_MERGED


def test_the_order_on_the_wire_is_the_buckets():
    merged = merge(parse(TWO), [Bucket("fc", ("h", "g"))])
    start = merged.ops[merged.index["h"]]
    assert start.reads == ("half_q", "p")
    assert start.writes == ("full_q", "full_p")
    assert start.collective.fqns == ("fc.bias", "fc.weight")
    assert "g" not in merged.index


def test_reduces():
    text = """\
input a: 64
input b: 32
start r(a) -> ra: 16 | reduce group=dp ranks=4 nbytes=64 dtype=f32 op=avg fqns=fc.weight
wait w(ra) -> da: 16 @ra
compute scale(da) -> ga: 16
start s(b) -> rb: 8 | reduce group=dp ranks=4 nbytes=32 dtype=f32 op=avg fqns=fc.bias
wait u(rb) -> db: 8 @rb
output ga
output db
"""
    merged = """\
input a: 64
input b: 32
start r(a, b) -> ra: 16, rb: 8 | reduce group=dp ranks=4 nbytes=96 dtype=f32 op=avg \
bucket=fc members=2 fqns=fc.weight, fc.bias
wait w(ra) -> da: 16 @ra
compute scale(da) -> ga: 16
wait u(rb) -> db: 8 @rb
output ga
output db
"""
    assert to_text(merge(parse(text), [Bucket("fc", ("r", "s"))])) == merged


def test_a_bucket_of_one_only_gets_its_label():
    merged = to_text(merge(parse(TWO), [Bucket("fc", ("g",))]))
    assert merged == TWO.replace("fqns=fc.weight", "bucket=fc fqns=fc.weight")


def test_no_buckets_change_nothing():
    assert merge(parse(TWO), []) == parse(TWO)


def test_merging_merged_ones():
    text = TWO + "start i(p) -> full_r: 4 | gather group=dp ranks=4 nbytes=4 dtype=f32 fqns=r\n"
    program = merge(parse(text + "wait iw(full_r)\n"), [Bucket("fc", ("g", "h"))])
    again = merge(program, [Bucket("all", ("g", "i"))])
    collective = again.ops[again.index["g"]].collective
    assert collective.nbytes == 84
    assert collective.fqns == ("fc.weight", "fc.bias", "r")
    assert collective.bucket == "all"
    assert collective.members == 3


def test_a_mutation_keeps_its_side_of_the_merged_start():
    """What is written between two members is written before them, if one of them reads it."""
    text = TWO.replace("compute cast(q) -> half_q: 4", "compute step(x) -> q").replace(
        "half_q", "q"
    )
    merged = merge(parse(text), [Bucket("fc", ("g", "h"))])
    assert [op.name for op in merged.ops] == ["step", "g", "w", "u", "mm"]


def starts(*fields: str) -> Program:
    lines = ["input x: 8"]
    for i, field in enumerate(fields):
        lines.append(f"start s{i}(x) -> y{i}: 8 | {field}\nwait w{i}(y{i})")
    return parse("\n".join(lines))


GATHER = "gather group=dp ranks=4 nbytes=8 dtype=f32"
REDUCE = "reduce group=dp ranks=4 nbytes=8 dtype=f32 op=sum"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GATHER, GATHER.replace("group=dp", "group=tp")),
        (GATHER, GATHER.replace("ranks=4", "ranks=2")),
        (GATHER, REDUCE),
        (REDUCE, REDUCE.replace("op=sum", "op=avg")),
        (REDUCE, REDUCE.replace("reduce ", "all_reduce ")),
        (REDUCE, REDUCE.replace("dtype=f32", "dtype=bf16")),
    ],
)
def test_members_of_different_kinds(one, other):
    with pytest.raises(
        ProgramError, match="bucket fc: its members must be collectives of one kind"
    ):
        merge(starts(one, other), [Bucket("fc", ("s0", "s1"))])


def test_collectives_of_others_are_not_merged():
    other = "other group=dp ranks=4 nbytes=8 dtype=f32"
    with pytest.raises(ProgramError, match="bucket fc"):
        merge(starts(other, other), [Bucket("fc", ("s0", "s1"))])


def test_members_that_are_no_starts():
    with pytest.raises(ProgramError, match="bucket fc: its members must be collectives"):
        merge(parse(TWO), [Bucket("fc", ("g", "mm"))])
    with pytest.raises(ProgramError, match="bucket fc: its members must be collectives"):
        merge(parse(TWO), [Bucket("fc", ("mm",))])
    with pytest.raises(ProgramError, match="bucket fc"):
        merge(parse(TWO), [Bucket("fc", ())])


def test_a_member_that_is_not_there():
    with pytest.raises(ProgramError, match=r"bucket fc.*nobody"):
        merge(parse(TWO), [Bucket("fc", ("g", "nobody"))])


def test_an_op_in_two_buckets():
    program = starts(GATHER, GATHER, GATHER)
    for one, other in ((("s0", "s1"), ("s2", "s1")), (("s0", "s1"), ("s1", "s2"))):
        with pytest.raises(ProgramError, match="bucket two: s1 is in another bucket, too"):
            merge(program, [Bucket("one", one), Bucket("two", other)])


def test_an_op_that_is_first_in_two_buckets():
    with pytest.raises(ProgramError, match="bucket two: s0 is in another bucket, too"):
        merge(
            starts(GATHER, GATHER, GATHER),
            [Bucket("one", ("s0", "s1")), Bucket("two", ("s0", "s2"))],
        )


def test_an_op_twice_in_a_bucket():
    with pytest.raises(ProgramError, match=r"bucket one: .*s0"):
        merge(starts(GATHER, GATHER), [Bucket("one", ("s0", "s0"))])


DEPENDENT = f"""\
input x: 8
start a(x) -> b: 8 | {GATHER} fqns=a
wait w(b) -> c: 8 @b
compute f(c) -> d: 8
start e(d) -> g: 8 | {GATHER} fqns=e
wait u(g)
"""


def test_members_of_which_one_needs_the_other():
    with pytest.raises(
        ProgramError, match="bucket fc: one member's result is needed to make anoth"
    ):
        merge(parse(DEPENDENT), [Bucket("fc", ("a", "e"))])


def test_buckets_that_need_each_other():
    text = DEPENDENT + DEPENDENT.replace("input x: 8\n", "")
    first, second = DEPENDENT, DEPENDENT.replace("input x: 8\n", "")
    for name in "abcdefguw":
        for sign in "( ,:\n)":
            second = second.replace(f" {name}{sign}", f" {name}2{sign}")
            second = second.replace(f"({name}{sign}", f"({name}2{sign}")
        second = second.replace(f"@{name}\n", f"@{name}2\n")
    text = first + second
    merge(parse(text), [Bucket("fc", ("a", "a2")), Bucket("fe", ("e", "e2"))]).verify()
    with pytest.raises(ProgramError, match=r"bucket .*put them into different buckets"):
        merge(parse(text), [Bucket("one", ("a", "e2")), Bucket("two", ("a2", "e"))])


def test_layers_in_pairs():
    program = parse(layers(4, "backward"))
    fqns = [f"layers.{k}.weight" for k in range(4)]
    assignment = assign_by_module(fqns, [["layers.0", "layers.1"], ["layers.2", "layers.3"]])
    merged = merge(program, plan_buckets(program, assignment)).verify()
    assert [op.name for _, op in merged.starts()] == ["g2", "r2", "g0", "r0"]
    assert merged.ops[merged.index["r2"]].collective.fqns == ("layers.2.weight", "layers.3.weight")
    assert [op.name for op in merged.ops if op.kind == "compute"][:5] == [
        "dgrad3",
        "wgrad3",
        "dgrad2",
        "wgrad2",
        "divide3",
    ]


def contraction_is_acyclic(program: Program, buckets: list[Bucket]) -> bool:
    node = {name: bucket.starts[0] for bucket in buckets for name in bucket.starts}
    graph: dict[str, set[str]] = {}
    for i, op in enumerate(program.ops):
        at = graph.setdefault(node.get(op.name, op.name), set())
        at.update(
            node.get(program.ops[j].name, program.ops[j].name) for j in program.predecessors[i]
        )
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return not any(name in before for name, before in graph.items())


def random_buckets(program: Program, rng: random.Random) -> list[Bucket]:
    """Of one kind, group and op each, but maybe with members that need each other."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for _, op in program.starts():
        c = op.collective
        if c.kind != "other" and rng.random() < 0.8:
            label = f"bucket {rng.randint(0, 1)}"
            key = (label, c.kind, c.group, c.ranks, c.reduce_op, c.dtype)
            alike.setdefault(key, []).append(op.name)
    for names in alike.values():
        rng.shuffle(names)
    return [Bucket(str(key[0]), tuple(names)) for key, names in alike.items()]


def assert_conserved(before: Program, after: Program, buckets: list[Bucket], seed: int) -> None:
    gone = {name for bucket in buckets for name in bucket.starts[1:]}
    assert {op.name for op in after.ops} == {op.name for op in before.ops} - gone, seed
    others = [{op.name: op for op in p.ops if op.kind != "start"} for p in (before, after)]
    assert others[0] == others[1], seed
    for read in (lambda op: op.reads, lambda op: op.writes, lambda op: op.collective.fqns):
        found = [Counter(x for _, op in p.starts() for x in read(op)) for p in (before, after)]
        assert found[0] == found[1], seed
    nbytes = [sum(op.collective.nbytes for _, op in p.starts()) for p in (before, after)]
    assert nbytes[0] == nbytes[1], seed
    same = ("buffers", "inputs", "resident", "outputs")
    assert all(getattr(before, name) == getattr(after, name) for name in same), seed


def test_random_programs_in_random_legal_buckets():
    merges = refusals = 0
    for seed in range(500):
        program, rng = random_program(seed, 24), random.Random(seed)
        legal: list[Bucket] = []
        for bucket in random_buckets(program, rng):
            if contraction_is_acyclic(program, [*legal, bucket]):
                legal.append(bucket)
                continue
            refusals += 1
            with pytest.raises(ProgramError, match="put them into different buckets"):
                merge(program, [*legal, bucket])
        merged = merge(program, legal).verify()
        assert_conserved(program, merged, legal, seed)
        merges += sum(len(bucket.starts) > 1 for bucket in legal)
    assert merges > 300  # the programs do have something to merge,
    assert refusals > 10  # and to refuse


def test_merging_is_deterministic_and_does_not_depend_on_the_order_of_buckets():
    for seed in range(100):
        program, rng = random_program(seed, 24), random.Random(seed)
        buckets = random_buckets(program, rng)
        if contraction_is_acyclic(program, buckets):
            merged = merge(program, buckets)
            assert (
                merged == merge(program, buckets[::-1]) == merge(random_program(seed, 24), buckets)
            )
