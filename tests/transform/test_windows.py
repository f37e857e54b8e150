"""Which reduces are waited for before the next is launched, without a plan."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from layered import layered
from programs import layers

from inductor_passes.ir.buckets import assign_by_module, plan_buckets
from inductor_passes.ir.program import Program
from inductor_passes.ir.text import parse, to_text
from inductor_passes.planner.invariant import rank_invariant
from inductor_passes.planner.plan import evaluate
from inductor_passes.transform.windows import buckets_by_module


def kept(which: Callable[[int], bool]) -> Callable[[str], str]:
    """Of a backward as text, one that needs not gather the weights of some layers again."""

    def without(text: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            layer = re.search(r"fqns=layers\.(\d+)", line)
            if "| gather" in line and layer and which(int(layer[1])):
                continue
            wait = re.match(r"wait w(\d+)\(\w+\) -> (\w+): (\d+)", line)
            if wait and which(int(wait[1])):
                lines.insert(0, f"input {wait[2]}: {wait[3]}")
                continue
            lines.append(line)
        return "\n".join(lines)

    return without


def in_another_group(text: str) -> str:
    return re.sub(r"(\| reduce group=)dp", r"\1reduces", text)


SAME_WIRE = {"as it is": str}
OTHERS = {
    "all kept": kept(lambda k: True),
    "every other kept": kept(lambda k: k % 2 == 1),
    "one of three kept": kept(lambda k: k % 3 == 0),
    "a group of their own": in_another_group,
}


def windows(program: Program) -> list[int]:
    """Of the reduces, in the order in which they are launched."""
    fqns = [f"layers.{k}.weight" for k in range(6)]
    buckets = buckets_by_module(program, assign_by_module(fqns))
    reduces = [b for b in buckets if b.starts[0].startswith("r")]
    return [b.window for b in sorted(reduces, key=lambda b: program.index[b.starts[0]])]


def test_where_each_layer_is_gathered_one_is_pending():
    assert windows(parse(layers(6, "backward"))) == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("how", OTHERS)
def test_where_compute_would_wait_for_it_two_are_pending(how):
    program, *_ = layered(0, 6, "backward")
    assert windows(program) == [1, 1, 1, 1, 1, 0]
    found = windows(parse(OTHERS[how](to_text(program))))
    assert found.count(1) <= 1 and found[-2:] == [0, 0]


@pytest.mark.parametrize("kind", ["backward", "hybrid"])
@pytest.mark.parametrize("how", SAME_WIRE | OTHERS)
def test_it_costs_no_time_and_saves_memory(how, kind):
    saved = []
    for seed in range(10):
        program, cost, fqns = layered(seed, 8, kind)
        program = parse((SAME_WIRE | OTHERS)[how](to_text(program)))
        invariant, assignment = rank_invariant(program, cost), assign_by_module(fqns)
        before = evaluate(*invariant, plan_buckets(program, assignment), 0.0)
        after = evaluate(*invariant, buckets_by_module(program, assignment), 0.0)
        assert after.step_us <= before.step_us * 1.005, seed  # beside all-reduces compute slows
        assert after.peak_nbytes <= before.peak_nbytes, seed
        saved.append(after.peak_nbytes < before.peak_nbytes)
    assert any(saved) or how in OTHERS


def test_forward_and_copies_are_left_alone():
    assert windows(parse(layers(6, "forward"))) == []
    program, _, fqns = layered(0, 6, "hybrid")
    found = buckets_by_module(program, assign_by_module(fqns))
    kinds = {b.window: program.ops[program.index[b.starts[0]]].sends for b in found if b.window}
    assert kinds == {1: "reduce"}
