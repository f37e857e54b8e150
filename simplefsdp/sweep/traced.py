"""Reads a training step that was traced with batch, sequence and number of ranks left open."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import sympy
import torch.distributed as dist
from torch.fx import GraphModule

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import fused_program, work_of
from inductor_passes.ir.cells import Symbols
from inductor_passes.ir.program import Program
from inductor_passes.ir.sizes import formula_of, noted
from inductor_passes.machine.cluster import Work
from simplefsdp._torch.symbolic import opened
from simplefsdp.provenance import carried_fqn
from simplefsdp.simulation.prediction import shards_of
from simplefsdp.simulation.rank_sizes import with_ranks
from simplefsdp.simulation.trace import TracedStep

_GROWING = ("dp", "replicate")


@dataclass(frozen=True)
class OpenGraph:
    """A forward or backward graph whose sizes are formulas (``Size``)."""

    name: str  # "forward" or "backward"
    read: Program  # as it was read, with all buffers that an eager run would have
    program: Program  # with only the buffers that are left when Inductor has fused ops
    work: Mapping[str, Work]  # the work of its compute ops


@dataclass(frozen=True)
class OpenStep:
    """A step whose sizes were left open."""

    graphs: tuple[OpenGraph, ...]  # forward and backward
    symbols: Symbols  # ``batch``, ``seq`` and ``ranks``, and the conditions on them
    fqns: tuple[str, ...]  # names of the parameters, in the order in which they are gathered
    parameters_nbytes: int  # bytes of a rank's fp32 shards, a formula
    dim_of: Mapping[str, str]  # for each process group, its dimension of the mesh


def open_step(
    step: TracedStep, hints: Mapping[str, int], dim_of: Mapping[str, str], fixed: int
) -> OpenStep:
    """Read a step that was traced inside :func:`simplefsdp._torch.symbolic.open_sizes`.

    Args:
        step: its graphs; call this in the process group in which they were traced.
        hints: the numbers that stood for the open sizes in the trace.
        dim_of: for each of its process groups, by name, its dimension of the mesh.
        fixed: number of ranks in the dimensions that do not grow, such as tensor parallelism. A
            growing dimension has ``ranks / fixed`` ranks.

    Raises:
        CellError: a size became a number while it was traced.
    """
    by_name, holds = opened(step.forward.graph, hints)
    ranks = sympy.Symbol("ranks", positive=True, integer=True)
    ranks_of = {group: ranks / fixed for group, dim in dim_of.items() if dim in _GROWING}
    shards = shards_of(step.forward.graph)
    graphs, conditions, apart = [], set(holds), set[sympy.Basic]()
    if ranks_of:  # a data-parallel dimension of one rank communicates nothing: another graph
        alone = dist.get_world_size() == fixed
        conditions.add(sympy.Eq(ranks, fixed) if alone else ranks > fixed)
    for name, gm in (("forward", step.forward), ("backward", step.backward)):
        with noted() as notes:
            graph, of_ranks = _open_graph(name, gm, ranks_of, step, shards)
        differ = {note for note in notes if isinstance(note, sympy.Ne)}
        conditions |= notes - differ | of_ranks
        apart |= differ | _constants(graph.read)
        graphs.append(graph)
    forward = graphs[0].program
    nbytes = sum(forward.buffers[n].nbytes for n in forward.inputs if n in forward.resident)
    if any(c.group not in dim_of for graph in graphs for c in graph.read.sent.values()):
        # It is not known how other groups grow, so this holds for the traced number of ranks only.
        conditions.add(sympy.Eq(ranks, dist.get_world_size()))
    names = {"batch": (), "seq": ()} | by_name | {"ranks": (ranks,)}
    symbols = Symbols(names, frozenset(conditions), frozenset(apart))
    return OpenStep(tuple(graphs), symbols, step.fqns, nbytes, dim_of)


def _open_graph(
    name: str,
    gm: GraphModule,
    ranks_of: Mapping[str, sympy.Expr],
    step: TracedStep,
    shards: Collection[str],
) -> tuple[OpenGraph, set[sympy.Basic]]:
    reading = fx.read(gm.graph, carried_fqn)
    program, holds = with_ranks(reading.program, ranks_of, step.rows, step.moved)
    program = replace(program, resident=program.resident | set(program.inputs).intersection(shards))
    reading = replace(reading, program=program)
    return OpenGraph(name, program, fused_program(reading), work_of(reading)), holds


def _constants(program: Program) -> set[sympy.Basic]:
    """Conditions that constants, which are computed from no input, stay different in size if they
    are so in the trace: torch would make constants of equal size only once."""
    made = {
        formula_of(program.buffers[name].nbytes)
        for op in program.ops
        if op.kind == "compute" and not op.reads
        for name in op.writes
    }
    return {sympy.Ne(one, other) for one, other in itertools.combinations(made, 2)} - {sympy.true}
