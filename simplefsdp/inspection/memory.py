"""The memory of a graph: over time, and at its peak by kind and by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inductor_passes.ir.program import Program
from inductor_passes.machine.simulate import Memory, live_at_peak, live_by_use
from simplefsdp.inspection.names import block_of


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a graph, without the resident parameter shards that it gathers."""

    peak_op: str  # the op during which memory is at its peak
    peak_us: float  # when that op begins
    by_kind: Mapping[str, int]  # bytes at the peak: activations, gathered parameters, ...
    # Bytes at the peak by the block that made them (or whose parameters they are), largest first.
    by_module: Mapping[str, int]
    curve: tuple[tuple[float, int], ...]  # (us, live bytes) at each change, and at the end


def memory_report(
    program: Program, memory: Memory, arrival: Sequence[float], module_of: Mapping[str, str]
) -> MemoryReport:
    """Report on the ``memory`` of a program whose ops begin at ``arrival``. ``module_of`` has
    modules by the name of an op or input; other modules are not known."""
    at = program.index.get(memory.peak_op, 0)
    owner, by_module = _owners(program, module_of, at), Counter[str]()
    for storage, nbytes in live_at_peak(program).items():
        by_module[owner.get(storage, "")] += nbytes
    return MemoryReport(
        memory.peak_op,
        arrival[at],
        {kind: nbytes for kind, nbytes in live_by_use(program).items() if nbytes},
        {block or "(no module)": nbytes for block, nbytes in by_module.most_common() if nbytes},
        _curve(memory, arrival),
    )


def _owners(program: Program, module_of: Mapping[str, str], at: int) -> dict[str, str]:
    """The block that each storage belongs to at the op with index ``at``: the one that last wrote
    to it; gathered or reduced parameters belong to the block that has the parameter."""
    owner = {name: block_of(module_of[name]) for name in program.inputs if name in module_of}
    for i, op in enumerate(program.ops):
        module = module_of.get(op.name, "")
        if op.collective is not None and op.collective.fqns:
            module = op.collective.fqns[0].rpartition(".")[0]
        for name in op.writes:
            storage = program.storage[name]
            if op.kind == "compute" and program.writer.get(name) == i <= at:
                owner[storage] = block_of(module)
            owner.setdefault(storage, block_of(module))
    for _, op in program.starts():
        fqns = program.sent[op.name].fqns
        if len(fqns) == len(op.writes):
            for name, fqn in zip(op.writes, fqns, strict=True):
                owner[program.storage[name]] = block_of(fqn.rpartition(".")[0])
    return owner


def _curve(memory: Memory, arrival: Sequence[float]) -> tuple[tuple[float, int], ...]:
    points: list[tuple[float, int]] = []
    for us, nbytes in zip(arrival, memory.live_nbytes, strict=False):
        if points and points[-1][0] == us:
            points[-1] = (us, max(nbytes, points[-1][1]))
        elif not points or points[-1][1] != nbytes:
            points.append((us, nbytes))
    end = memory.live_nbytes[-1] if memory.live_nbytes else 0
    return (*points, (arrival[-1], end))
