"""The rules of programs: each is checked, and what breaks it is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from programs import layers, random_program

from inductor_passes.ir.buckets import Assignment, plan_buckets
from inductor_passes.ir.program import Buffer, Collective, Op, Program, ProgramError
from inductor_passes.ir.text import parse
from inductor_passes.transform.merge import merge

GATHER = "gather group=dp ranks=4 nbytes=64 dtype=f32"
REDUCE = "reduce group=dp ranks=4 nbytes=64 dtype=f32 op=sum"
ONE_GATHER = f"""\
input x: 64
resident p: 16
start g(p) -> full: 64 | {GATHER}
wait w(full) -> weight: 64 @full
compute mm(x, weight) -> y: 64
output y
"""


def needs(program: Program) -> dict[str, set[str]]:
    return {
        op.name: {program.ops[j].name for j in program.predecessors[i]}
        for i, op in enumerate(program.ops)
    }


BROKEN = {
    "double op": (
        "compute f(x) -> a: 8\ncompute f(x) -> b: 8",
        "op f appears more than once",
    ),
    "double input": ("input y: 8\ninput y", "input y appears more than once"),
    "negative size": ("compute f(x) -> a: -8", "buffer a: negative size -8"),
    "unknown storage": ("view v(x) -> a: 8 @nowhere", "buffer a: unknown storage nowhere"),
    "compute with a collective": (
        f"compute f(x) -> a: 8 | {GATHER}",
        "f: a start, and only a start, has a collective",
    ),
    "start without a collective": (
        "start g(x) -> a: 8\nwait w(a)",
        "g: a start, and only a start, has a collective",
    ),
    "reads what is nowhere": ("compute f(y) -> a: 8", "f: buffer to read y does not exist"),
    "reads what comes later": (
        "compute f(b) -> a: 8\ncompute g(x) -> b: 8",
        "f: buffer to read b does not exist",
    ),
    "output that nobody makes": ("output y", "output y does not exist"),
    "view before the wait": (
        f"start g(x) -> a: 8 | {GATHER}\nview v(a) -> b: 8 @a\nwait w(a)",
        "v uses a before the wait for g",
    ),
    "compute before the wait": (
        f"start g(x) -> a: 8 | {GATHER}\ncompute f(x, a) -> b: 8\nwait w(a)",
        "f uses a before the wait for g",
    ),
    "written before the wait": (
        f"start g(x) -> a: 8 | {GATHER}\ncompute f(x) -> a\nwait w(a)",
        "f uses a before the wait for g",
    ),
    "sent on before the wait": (
        f"start g(x) -> a: 8 | {GATHER}\nstart h(a) -> b: 8 | {GATHER}\nwait w(a, b)",
        "h uses a before the wait for g",
    ),
    "two starts fill one buffer": (
        f"start g(x) -> a: 8 | {GATHER}\nstart h(x) -> a | {GATHER}\nwait w(a)",
        "h uses a before the wait for g",
    ),
    "never waited for": (
        f"start g(x) -> a: 8, b: 8 | {GATHER}\nwait w(a)",
        "g: its buffer b is never waited for",
    ),
    "waits for an input": ("wait w(x)", "w waits for x, which no collective is filling"),
    "waits twice": (
        f"start g(x) -> a: 8 | {GATHER}\nwait w(a)\nwait v(a)",
        "v waits for a, which no collective is filling",
    ),
    "waits too early": (
        f"wait w(a)\nstart g(x) -> a: 8 | {GATHER}",
        r"needs its bytes|w: buffer to read a does not exist",
    ),
    "result of a wait elsewhere": (
        f"start g(x) -> a: 8 | {GATHER}\nwait w(a) -> b: 8",
        "w: the result of a wait shares its input's storage",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_rule_is_checked_and_its_breaker_named(case):
    lines, message = BROKEN[case]
    with pytest.raises(ProgramError, match=message):
        parse(f"input x: 8\n{lines}\n")


def test_rules_that_text_cannot_break():
    x, ops = Buffer("x", 8), (Op("f", "compute", ("x",), ("y",)),)
    with pytest.raises(ProgramError, match="f: buffer y does not exist"):
        Program(ops, {"x": x}, ("x",)).verify()
    with pytest.raises(ProgramError, match="input x does not exist"):
        Program((), {}, ("x",)).verify()
    with pytest.raises(ProgramError, match="resident buffer y does not exist"):
        Program(ops, {"x": x, "y": Buffer("y", 8)}, ("x",), frozenset({"y"})).verify()


def test_verify_returns_the_program():
    program = parse(ONE_GATHER)
    assert program.verify() is program


def test_a_buffer_is_its_own_storage_unless_told():
    assert Buffer("x", 8).storage == "x"
    assert Buffer("v", 8, "x").storage == "x"


def test_positions_writers_starts_and_waits():
    program = parse(
        f"input x: 8\nstart g(x) -> a: 8, b: 8 | {GATHER}\nstart h(x) -> c: 8 | {GATHER}\n"
        "wait w(a, c)\nwait v(b) -> d: 8 @b\ncompute f(d) -> x"
    )
    assert program.index == {"g": 0, "h": 1, "w": 2, "v": 3, "f": 4}
    assert program.writer == {"a": 0, "b": 0, "c": 1, "d": 3}  # x is an input
    assert program.start_of == {2: (0, 1), 3: (0,)}
    assert program.waits_of == {0: (2, 3), 1: (2,)}
    assert [op.name for _, op in program.starts()] == ["g", "h"]


def test_an_op_needs_the_writers_of_what_it_reads():
    assert needs(parse(ONE_GATHER)) == {"g": set(), "w": {"g"}, "mm": {"w"}}


def test_a_read_of_the_arrived_buffer_needs_the_wait():
    text = ONE_GATHER.replace(" -> weight: 64 @full", "").replace("weight", "full")
    assert "w" in needs(parse(text))["mm"]


def test_a_mutation_keeps_its_place_among_all_that_touches_the_storage():
    program = parse(
        "input x: 8\ncompute before(x) -> a: 8\nview v(x) -> y: 8 @x\n"
        "compute reads_view(y) -> b: 8\ncompute mutate(a) -> y\ncompute after(x) -> c: 8\n"
        "compute again(b) -> x\ncompute last(y) -> d: 8"
    )
    assert needs(program) == {
        "before": set(),
        "v": set(),
        "reads_view": {"v"},
        "mutate": {"before", "v", "reads_view"},
        "after": {"mutate"},
        "again": {"mutate", "after", "reads_view"},
        "last": {"v", "again"},
    }


def test_a_mutation_of_what_a_collective_reads_stays_behind_its_wait():
    program = parse(
        f"input grad: 64\nstart r(grad) -> part: 16 | {REDUCE}\nwait w(part)\n"
        "compute zero() -> grad"
    )
    assert needs(program)["zero"] == {"r", "w"}
    with pytest.raises(ProgramError, match="zero is placed before w, which it needs"):
        program.reorder(["r", "zero", "w"])


def test_uses_of_a_buffer_that_is_sent_in_place_stay_outside_the_transfer():
    program = parse(
        "input x: 64\nview v(x) -> y: 64 @x\n"
        "start s() -> x | all_reduce group=dp ranks=4 nbytes=64 dtype=f32 op=sum\n"
        "wait w(x)\ncompute f(y) -> z: 64"
    )
    assert "w" in needs(program)["f"]


def test_programs_without_mutation_need_nothing_but_writers():
    program = parse(layers(3, "backward"))
    found = needs(program)
    assert found["dgrad1"] == {"dgrad2", "v1"}
    assert found["r1"] == {"wgrad1"}
    assert found["divide1"] == {"rw1"}
    assert found["g1"] == set()


def test_predecessors_come_before():
    for seed in range(100):
        for i, before in enumerate(random_program(seed, 30).predecessors):
            assert all(j < i for j in before), seed


def test_reorder_refuses_what_is_not_a_permutation():
    program = parse(ONE_GATHER)
    for order in (["g", "w"], ["g", "w", "mm", "mm"], ["g", "w", "mmm"], ["g", "w", "w"]):
        with pytest.raises(ProgramError, match=r"must name every op once; it does not for .'"):
            program.reorder(order)


def test_reorder_refuses_an_op_before_what_it_needs():
    program = parse(ONE_GATHER)
    with pytest.raises(ProgramError, match="mm is placed before w, which it needs"):
        program.reorder(["g", "mm", "w"])
    with pytest.raises(ProgramError, match="w is placed before g, which it needs"):
        program.reorder(["w", "g", "mm"])


def test_reorder_changes_the_order_and_nothing_else():
    program = parse("input x: 8\ncompute f(x) -> a: 8\ncompute g(x) -> b: 8\noutput a")
    swapped = program.reorder(["g", "f"])
    assert [op.name for op in swapped.ops] == ["g", "f"]
    assert replace(swapped, ops=program.ops) == program
    assert swapped.index == {"g": 0, "f": 1}
    assert swapped.reorder(["f", "g"]) == program


def test_every_legal_reorder_verifies():
    """Predecessors say all: sorting by them at random never breaks a rule."""
    for seed in range(200):
        program, rng = random_program(seed, 20), random.Random(seed)
        left, order = set(range(len(program.ops))), []
        while left:
            ready = [i for i in sorted(left) if left.isdisjoint(program.predecessors[i])]
            left.remove(i := rng.choice(ready))
            order.append(program.ops[i].name)
        program.reorder(order).verify()


def test_programs_are_values():
    program = parse(ONE_GATHER)
    assert program == parse(ONE_GATHER)
    assert program != parse(ONE_GATHER.replace("x: 64", "x: 32"))
    assert hash(program) == hash(parse(ONE_GATHER))
    assert Collective("gather", "dp", 4, 64, "f32") == program.ops[0].collective


def test_merging_knows_what_comes_before_what():
    merged = 0
    for seed in range(100):
        program = random_program(seed, 40)
        sent = [op.collective.fqns for _, op in program.starts() if op.collective]
        fqns = list(dict.fromkeys(fqn for found in sent for fqn in found))
        try:
            together = Assignment(dict.fromkeys(fqns, "all"))
            after = merge(program, plan_buckets(program, together))
        except ProgramError:
            continue
        merged += len(after.ops) < len(program.ops)
        again = replace(after)  # which forgets what was found out
        assert list(map(set, after.predecessors)) == list(map(set, again.predecessors)), seed
    assert merged > 10
