"""Matmuls that add in place to what several backwards add up."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.adapters.loops import name_of
from inductor_passes.adapters.matmuls import ADD_MATMUL, add_matmuls_in_place
from inductor_passes.adapters.roofline import flops_of
from simplefsdp import microbatch, simple_fsdp
from simplefsdp.compiler.observers import observing


def traced(step, *inputs):
    return make_fx(step, tracing_mode="fake")(*inputs)


def one(total, left, right):
    total.copy_(total + left.t() @ right)
    return (left + 1,)


def read_elsewhere(total, left, right):
    product = left.t() @ right
    total.copy_(total + product)
    return (product,)


def cast_first(total, left, right):
    total.copy_(total + (left.t() @ right).double())
    return (left,)


def test_it_adds_in_place_the_same_bits():
    total, left, right = torch.randn(6, 5), torch.randn(8, 6), torch.randn(8, 5)
    graph = traced(one, total, left, right)
    add_matmuls_in_place(graph.graph)
    graph.recompile()
    (node,) = graph.graph.find_nodes(op="call_function", target=ADD_MATMUL)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert name_of(node) == "inductor_passes::add_matmul_"
    assert flops_of(node) == 2 * 6 * 8 * 5
    expected = torch.addmm(total, left.t(), right)
    graph(total, left, right)
    assert torch.equal(total, expected)


def test_what_is_needed_elsewhere_or_cast_stays():
    left, right = torch.randn(8, 6), torch.randn(8, 5)
    for step, dtype in ((read_elsewhere, torch.float32), (cast_first, torch.float64)):
        graph = traced(step, torch.zeros(6, 5, dtype=dtype), left, right)
        add_matmuls_in_place(graph.graph)
        assert not graph.graph.find_nodes(op="call_function", target=ADD_MATMUL), step


def test_deferred_gradients_of_a_model_are_added_in_place(fake_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4)), fake_mesh(2))
    run = torch.compile(model, backend="simplefsdp", fullgraph=True)
    found = []
    with observing(found.append), microbatch(model, is_last=False):
        run(torch.ones(4, 8)).sum().backward()
    (backward,) = (graph for graph in found if graph.part == "backward")
    program = backward.rehearsal.reading.program
    sums = [op for op in program.ops if op.name.startswith("add_matmul_")]
    assert len(sums) == 2  # the bias is no matmul's
    totals = {op.reads[0] for op in sums}
    assert totals <= {name for op in sums for name in op.writes}
    assert totals <= set(program.outputs) & set(program.inputs)
