"""Buckets in portable names: chosen in one graph, written into another with other node names."""

from __future__ import annotations

from programs import layers, random_program, renamed

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Bucket
from inductor_passes.ir.text import parse
from inductor_passes.transform.portable import (
    Member,
    PortableBucket,
    from_json,
    in_names,
    in_program,
    to_json,
)

TWICE = """\
resident p: 4
input x: 16
start a(p) -> af: 16 | gather group=dp ranks=4 nbytes=16 dtype=f32 fqns=l.w
wait aw(af) -> a1: 16 @af
compute f(x, a1) -> y: 16
start b(p) -> bf: 16 | gather group=dp ranks=4 nbytes=16 dtype=f32 fqns=l.w
wait bw(bf) -> b1: 16 @bf
compute h(y, b1) -> z: 16
output z
"""


def test_a_parameter_that_is_gathered_twice():
    buckets = (Bucket("late", ("b",), 3), Bucket("early", ("a",)))
    planned = in_names(parse(TWICE), buckets)
    assert planned == (
        PortableBucket("late", "gather", (Member("l.w", 1),), 3),
        PortableBucket("early", "gather", (Member("l.w", 0),)),
    )
    assert in_program(parse(TWICE), planned) == buckets


def test_the_names_of_nodes_do_not_matter():
    program = parse(layers(4, "backward"))
    other = renamed(program, "z{}".format)
    fqns = [op.collective.fqns[0] for _, op in program.starts()]
    buckets = plan_buckets(program, assign_by_module(list(dict.fromkeys(fqns))))
    found = in_program(other, in_names(program, buckets))
    assert [tuple(f"z{name}" for name in b.starts) for b in buckets] == [b.starts for b in found]


def test_what_is_gone_is_left_out_and_what_is_new_is_alone():
    planned = (
        PortableBucket("gone", "gather", (Member("other.w", 0),)),
        PortableBucket("l", "gather", (Member("other.w", 1), Member("l.w", 0)), 2),
    )
    assert in_program(parse(TWICE), planned) == (Bucket("l", ("a",), 2), Bucket("l.w", ("b",)))


def test_random_programs_keep_their_plan():
    for seed in range(100):
        program = random_program(seed, 30)
        fqns = dict.fromkeys(f for _, op in program.starts() for f in op.collective.fqns)
        buckets = plan_buckets(program, assign_by_module(list(fqns)))
        assert in_program(program, in_names(program, buckets)) == buckets


def test_planned_buckets_travel_as_text():
    program = parse(layers(3, "backward"))
    fqns = dict.fromkeys(fqn for _, op in program.starts() for fqn in op.collective.fqns)
    planned = in_names(program, plan_buckets(program, assign_by_module(list(fqns))))
    assert planned and from_json(to_json(planned)) == planned
    assert all(isinstance(bucket.members[0], Member) for bucket in from_json(to_json(planned)))
