"""Work grows as the program does, however many members a bucket has; counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from layered import layered

from inductor_passes.ir.program import Bucket, Program
from inductor_passes.ir.text import parse
from inductor_passes.machine.fusion import Loop
from inductor_passes.machine.simulate import touched
from inductor_passes.machine.stored import as_stored
from inductor_passes.planner.plan import evaluate
from inductor_passes.transform.merge import merge


def steps(work: Callable[[], object]) -> int:
    """How many of Python's own instructions ``work`` takes."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_bucket(program: Program) -> list[Bucket]:
    """All gathers in one bucket, all reduces in another."""
    kinds: dict[str, list[str]] = {}
    for _, op in program.starts():
        kinds.setdefault(op.sends, []).append(op.name)
    return [Bucket(kind, tuple(names)) for kind, names in kinds.items()]


def planned(n: int) -> int:
    program, cost, _ = layered(0, n, "backward")
    return steps(lambda: evaluate(program, cost, one_bucket(program), 0.0))


def test_a_bucket_of_many_members_costs_as_much_for_each():
    """A quadratic part took four fifths of it: 5,000 parameters of one module are one bucket."""
    few, many = planned(50), planned(400)
    assert many < 9 * few


def test_what_ops_touch_is_not_told_once_for_each_wait_of_a_bucket():
    program, _, _ = layered(0, 300, "backward")
    merged = merge(program, one_bucket(program))
    assert sum(map(len, touched(merged))) < 8 * len(merged.ops)


def one_kernel(n: int) -> int:
    """Loops that share a kernel, for all read ``x``; each may write over what it alone reads."""
    lines = ["input x: 64", *(f"compute mm{i}(x) -> m{i}: 64" for i in range(n))]
    lines += [f"compute f{i}(x, m{i}) -> y{i}: 64\noutput y{i}" for i in range(n)]
    program, loop = parse("\n".join(lines)), Loop(8, 8, elementwise=True)
    loops = {f"f{i}": loop for i in range(n)}
    lowered = as_stored(program, loops)
    assert [lowered.buffers[f"y{i}"].storage for i in range(n)] == [f"m{i}" for i in range(n)]
    return steps(lambda: as_stored(program, loops))


def test_what_is_written_over_is_found_at_once_in_a_kernel_of_many_loops():
    """Each result was compared with all that the kernel reads."""
    few, many = one_kernel(50), one_kernel(400)
    assert many < 9 * few
