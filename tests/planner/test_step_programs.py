"""Programs of whole training steps: gathers of a forward and of a backward, and an update."""

from __future__ import annotations

import pytest

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Program
from inductor_passes.ir.text import parse, to_text
from inductor_passes.machine.cost import LinearCost
from inductor_passes.machine.simulate import lifetimes, memory
from inductor_passes.planner.auto import plan_auto
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import evaluate
from inductor_passes.planner.search.halves import border, halves
from inductor_passes.planner.update import UPDATE, with_one_update
from inductor_passes.transform.portable import in_names, in_program

LAYERS = 4


def gather(name: str, k: int) -> list[str]:
    return [
        f"start {name}{k}(p{k}) -> {name}full{k}: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 "
        f"fqns=layers.{k}.weight",
        f"wait {name}w{k}({name}full{k}) -> {name}weight{k}: 64 @{name}full{k}",
    ]


def step(n: int = LAYERS, clips: bool = True) -> Program:
    """Layers forward, layers backward, the norm if gradients are clipped, and the updates."""
    lines = ["input x0: 8", "input lr: 8"]
    lines += [f"resident p{k}: 16" for k in range(n)] + [f"resident m{k}: 16" for k in range(n)]
    for k in range(n):
        lines += [*gather("f", k), f"compute mm{k}(x{k}, fweight{k}) -> x{k + 1}: 8"]
    lines += [f"compute loss(x{n}) -> d{n}: 8"]
    for k in reversed(range(n)):
        lines += gather("b", k) if k else []
        lines += [f"compute dgrad{k}(d{k + 1}, bweight{k}) -> d{k}: 8"] if k else []
        lines += [
            f"compute wgrad{k}(d{k + 1}, x{k}) -> g{k}: 64",
            f"start r{k}(g{k}) -> s{k}: 16 | reduce group=dp ranks=4 nbytes=64 dtype=f32 op=sum "
            f"fqns=layers.{k}.weight",
            f"wait rw{k}(s{k}) -> grad{k}: 16 @s{k}",
            f"compute norm{k}(grad{k}) -> n{k}: 4",
        ]
    if clips:
        lines += [
            f"compute sum({', '.join(f'n{k}' for k in range(n))}) -> total: 4",
            "start ar(total) -> everywhere: 4 | other group=dp ranks=4 nbytes=4 dtype=f32 op=sum",
            "wait arw(everywhere) -> norm: 4 @everywhere",
        ]
    for k in range(n):
        factor = ", norm" if clips else ""
        lines += [
            f"compute moment{k}(m{k}, grad{k}{factor}) -> new{k}: 16",
            f"compute keep{k}(new{k}) -> kept{k}: 16, m{k}",
            f"compute write{k}(p{k}, new{k}, lr) -> written{k}: 16, p{k}",
        ]
    return parse("\n".join([*lines, "output d4"] + (["output norm"] if clips else []))).verify()


COST = LinearCost(
    2.0, 0.1, op_us={f"{op}{k}": 10.0 for k in range(LAYERS) for op in ("mm", "dgrad", "wgrad")}
)


@pytest.mark.parametrize("clips", [True, False])
def test_the_update_is_one_op_behind_all_reduces(clips):
    program = with_one_update(step(clips=clips)).verify()
    assert program.ops[-1].name == UPDATE
    assert set(program.ops[-1].reads) >= {f"grad{k}" for k in range(LAYERS)}
    left = {op.name.rstrip("0123456789") for op in program.ops[:-1]}
    assert left == {"f", "fw", "mm", "loss", "b", "bw", "dgrad", "wgrad", "r", "rw"}
    assert "d4" in program.outputs


def test_a_program_that_writes_nothing_is_left_alone():
    program, _ = halves(step(), border(step()))
    assert with_one_update(program) is program


def test_an_update_takes_the_memory_of_the_gradients():
    program, _ = rank_invariant(step(), COST)
    held = memory(program)
    assert held.resident_nbytes == 0  # neither parameters nor moments
    alive = {name for name, (_, last) in lifetimes(program).items() if last == len(program.ops) - 1}
    assert alive == {"s0", "s1", "s2", "s3", "d4", "lr", UPDATE}


def test_the_halves_are_programs():
    program = step()
    at = border(program)
    assert program.ops[at].name == "b3"
    first, second = (half.verify() for half in halves(program, at))
    assert [op.name for op in (*first.ops, *second.ops)] == [op.name for op in program.ops]
    assert {"x1", "d4"} <= set(first.outputs) and {"x1", "d4"} <= set(second.inputs)
    assert "p0" in first.resident and "m0" in second.resident
    assert border(first) is None and border(second) is None


def test_by_module_the_gathers_of_backward_are_buckets_of_their_own():
    buckets = plan_buckets(step(), assign_by_module([f"layers.{k}.weight" for k in range(LAYERS)]))
    gathers = [bucket for bucket in buckets if bucket.starts[0][0] in "fb"]
    assert [bucket.starts for bucket in gathers] == [
        *((f"f{k}",) for k in range(LAYERS)),
        *((f"b{k}",) for k in reversed(range(1, LAYERS))),
    ]
    assert len({bucket.label for bucket in gathers}) == 7


def test_buckets_hold_for_another_text_of_the_step():
    program = step()
    buckets = plan_buckets(program, assign_by_module([f"layers.{k}.weight" for k in range(LAYERS)]))
    again = parse(to_text(program).replace("start b", "start again"))
    starts = [b.starts for b in in_program(again, in_names(program, buckets))]
    assert starts == [tuple(s.replace("b", "again") for s in b.starts) for b in buckets]


@pytest.mark.parametrize("clips", [True, False])
def test_a_whole_step_is_no_slower_than_its_halves(clips):
    """In as much memory: the first gather of backward hides behind the forward."""
    program = step(clips=clips)
    fqns = [f"layers.{k}.weight" for k in range(LAYERS)]
    whole = plan_auto(program, COST, fqns, budget_nbytes=700)
    parts = [
        plan_auto(half, COST, fqns, budget_nbytes=700) for half in halves(program, border(program))
    ]
    assert whole.step_us < sum(part.step_us for part in parts) - 2
    assert whole.peak_nbytes <= 700
    again = evaluate(*rank_invariant(program, COST), whole.buckets, whole.lower_bound_us)
    assert again.step_us == whole.step_us >= whole.lower_bound_us
