"""``inspect --bucketing torch-manual``: what torch's own pass buckets is read back whole."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from graphs import capture

from inductor_passes.adapters import fx
from inductor_passes.ir.program import Program
from simplefsdp import simple_fsdp
from simplefsdp.inspection.torch_passes import torch_manual, units_of
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama
from simplefsdp.provenance import carried_fqn

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="inspect says what they lack")


def carried(program: Program) -> Counter[tuple[str, str]]:
    found = [op.collective for _, op in program.starts()]
    return Counter((c.kind, fqn) for c in found for fqn in c.fqns)


def launches(program: Program, kind: str) -> int:
    return sum(op.sends == kind for _, op in program.starts())


@pytest.mark.slow
def test_every_parameter_is_still_reduced_and_all_reduced(fake_mesh):
    """Since 2.14 torch buckets the all-reduces of hybrid sharding, too."""
    mesh = fake_mesh(2, 2, names=("replicate", "shard"))
    model = simple_fsdp(Llama(replace(CONFIGS["debug"], n_layers=2)), mesh, mode="hybrid_shard")
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    options = {"executor": "aot_eager", "bucketing": "none"}
    with capture() as graphs:
        run = torch.compile(model, backend="simplefsdp", fullgraph=True, options=options)
        run(tokens).sum().backward()
    units = units_of([name for name, _ in model.named_parameters()])
    for graph in (*graphs.forward, *graphs.backward):
        made = torch_manual(copy.deepcopy(graph), units)
        was, now = (fx.read(gm.graph, carried_fqn).program for gm in (graph, made))
        assert carried(now) == carried(was)
        starts = launches(was, "all_reduce"), launches(now, "all_reduce")
        assert starts[1] <= starts[0]
        if starts[0] and torch.__version__ >= "2.14":
            assert starts[1] < starts[0]
    assert starts[0] > 1
