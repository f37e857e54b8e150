"""``wait_tensors``, new in torch 2.15: one wait for several results, of one collective or more."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from fx_graphs import RANKS, copied, same_numbers
from graphs import no_kernels
from test_fx_adapter import (
    by_twos,
    forward,
    inputs_of,
    ours,
    read,
    trace,
)
from torch._inductor import config
from torch.distributed import _functional_collectives as funcol

from inductor_passes.adapters import fx, scheduler
from inductor_passes.adapters.layouts import BucketLayout
from inductor_passes.ir.program import ProgramError
from inductor_passes.ir.verify import verify_unchanged
from inductor_passes.passes import bucket_and_reorder
from inductor_passes.rehearsal import Settings

pytestmark = pytest.mark.skipif(torch.__version__ < "2.15", reason="there is none before 2.15")
_ops = torch.ops._c10d_functional


def test_a_wait_for_several_is_a_wait():
    """As a coalesced functional collective makes it under tracing: of one start, or of two."""

    def function(a, b):
        x, y = _ops.all_gather_into_tensor_coalesced([a, b], RANKS, "dp")
        one, _, other = _ops.wait_tensors([x, y, _ops.all_reduce(b, "sum", "dp")])
        return one * 2, other * 3

    reading = fx.read(trace(function, torch.ones(2, 3), torch.ones(5)), ours)
    program = reading.program
    assert [op.kind for op in program.ops] == ["start", "start", "wait", "compute", "compute"]
    gathers, all_reduce, wait, *_ = program.ops
    assert wait.reads == (*gathers.writes, *all_reduce.writes)
    assert len(program.start_of[2]) == 2
    one, _, other = (program.buffers[name] for name in wait.writes)
    assert (one.storage, other.storage) == (gathers.writes[0], all_reduce.writes[0])
    assert (one.nbytes, other.nbytes) == (4 * 24, 4 * 5)
    assert [n.name for n in reading.nodes[wait.name]] == [wait.name, *wait.writes]


def test_a_wait_for_what_is_used_before_is_none():
    def function(a, b):
        x, y = _ops.all_gather_into_tensor_coalesced([a, b], RANKS, "dp")
        z = _ops.all_reduce(b, "sum", "dp")
        return z.sin(), *_ops.wait_tensors([x, y, z])

    program = read(trace(function, torch.ones(2, 3), torch.ones(5)))
    assert not list(program.starts()) and not program.waits_of  # for all of them or for none
    assert sum(op.kind == "compute" for op in program.ops) == 3


@pytest.mark.parametrize("layout", get_args(BucketLayout))
def test_buckets_beside_a_wait_for_several(layout):
    """The user's own coalesced gather: it is not ours, and stays what it is."""

    def function(x, *shards):
        theirs = _ops.all_gather_into_tensor_coalesced([x[:1], x[1:2]], RANKS, "tp")
        one, other = _ops.wait_tensors(theirs)
        return forward(x + one.sum(0) - other.sum(0), *shards)

    graph = trace(function, *inputs_of(forward))
    was, now = read(graph), copied(graph)
    bucket_and_reorder(now, Settings(by_twos(was), layout=layout), ours)
    verify_unchanged(was, read(now))
    assert same_numbers(graph, now)
    launched = [sum(op.sends == "gather" for op in read(g).ops) for g in (graph, now)]
    assert launched == [6, 3]
    waits = [n for n in now.nodes if n.target is _ops.wait_tensors.default]
    assert len(waits) == 1


def test_the_scheduler_waits_for_several_at_once(fake_mesh):
    """From the user's call, as Dynamo traces it, to the order that our pass leaves."""
    group = fake_mesh(RANKS).get_group()
    seen = []

    def keep(nodes):
        seen.append(scheduler.read(nodes).program)
        return nodes

    def function(a, b):
        full = funcol.all_gather_into_tensor_coalesced([a, b], group)
        return full[0] * 2, full[1].sin()

    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [keep],
        "fx_graph_cache": False,
    }
    with config.patch(settings), no_kernels():
        torch.compile(function, fullgraph=True)(torch.ones(2, 3), torch.ones(5))
    (program,) = seen
    assert [op.kind for op in program.ops if op.kind != "compute"] == ["start", "wait"]
    start, wait = (op for op in program.ops if op.kind != "compute")
    assert set(wait.reads) == set(start.writes) and len(wait.reads) == 2
    names = [op.name for op in program.ops if op is not wait]
    with pytest.raises(ProgramError, match="which it needs"):
        program.reorder([*names, wait.name])
