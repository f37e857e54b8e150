"""Models that Dynamo cannot take in one graph: each graph is compiled, and a warning says so."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from broken import WIDTH, Broken
from test_parity import compare_gradients, global_loss, local
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import inspect, simple_fsdp


def train_and_compare(names, options):
    """Two steps beside one process; gives the graphs and the gathers of the first."""
    torch.manual_seed(1)
    plain = Broken(*names)
    model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)))
    model.compile(backend="simplefsdp", options=options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    with inspect() as report:
        for step in range(2):
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
            wanted, loss = plain(x).square().mean(), model(local_rows(x)).square().mean()
            wanted.backward()
            loss.backward()
            assert global_loss(loss) == pytest.approx(wanted.item(), rel=1e-5)
            compare_gradients(plain, model, 1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    gathered = [b.fqns for g in report.graphs.values() for b in g.buckets if b.kind == "gather"]
    return len(report.graphs), [fqn for fqns in gathered for fqn in fqns]


def local_rows(x):
    """The rank's share of the rows, so that both items of dimension 0 are everywhere."""
    return x.transpose(0, 1).tensor_split(dist.get_world_size())[dist.get_rank()].transpose(0, 1)


@pytest.mark.parametrize("name", ["Views", "Crossing", "Twice", "Recomputed", "Guarded"])
def test_one_break_more(pools, name):
    options = {"executor": "aot_eager", "bucketing": "manual"}
    one, other = pools(2).run(train_and_compare, (name,), options)
    assert one == other
    print(one)


@pytest.mark.parametrize("bucketing", ["auto"])
def test_all_breaks_in_generated_code(pools, bucketing):
    options = {"executor": "inductor", "bucketing": bucketing}
    one, other = pools(2).run(train_and_compare, (), options)
    assert one == other
