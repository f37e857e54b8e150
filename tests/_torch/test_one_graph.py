"""The contract of whole steps with PyTorch's private parts: Dynamo, and the partitioner."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from simplefsdp._torch import updates
from simplefsdp._torch.one_graph import as_if_cut, partitioning

_COPY = torch.ops.aten.copy_.default


def traced(function, *inputs) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def step(weight, x, seed):
    """Two layers with one weight, whose update is written to it."""
    weight.requires_grad_()
    loss = torch.sin(torch.sin(x @ weight) @ weight).sum()
    (gradient,) = torch.autograd.grad(loss, [weight], seed)
    return loss.detach(), gradient


def written_step(*inputs) -> GraphModule:
    gm = traced(step, *inputs)
    output = gm.graph.output_node()
    loss, gradient = output.args[0]
    with gm.graph.inserting_before(output):
        gm.graph.call_function(_COPY, (gm.graph.find_nodes(op="placeholder")[0], gradient))
    output.args = ((loss,),)
    gm.recompile()
    return gm


def test_what_is_marked_is_computed_again_behind_the_forward():
    inputs = torch.randn(3, 3), torch.randn(3, 3), torch.tensor(2.0)
    wanted = step(*(value.clone() for value in inputs))
    gm = written_step(*inputs)
    sines = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert len(sines) == 2
    for node in sines:
        node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 1
    whole = as_if_cut(gm)
    again = whole.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert len(again) == 3  # of the last one the gradient needs the cosine only
    order = list(whole.graph.nodes)
    seed = whole.graph.find_nodes(op="placeholder")[-1]
    # Where it is used, not all at once in front of the backward.
    assert order.index(again[-1]) > min(map(order.index, seed.users))
    weight = inputs[0].clone()
    (loss,) = whole(weight, *inputs[1:])
    torch.testing.assert_close(loss, wanted[0])
    torch.testing.assert_close(weight, wanted[1])
    (copy,) = whole.graph.find_nodes(op="call_function", target=_COPY)
    assert copy.args[0].op == "placeholder"


def test_inputs_and_results_keep_their_places():
    inputs = torch.randn(3, 3), torch.randn(3, 3), torch.tensor(2.0)
    names = [n.target for n in traced(step, *inputs).graph.find_nodes(op="placeholder")]
    whole = as_if_cut(traced(step, *inputs))
    assert [n.target for n in whole.graph.find_nodes(op="placeholder")] == names
    for got, wanted in zip(whole(*inputs), step(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_autograds_own_recomputation_can_be_switched_off():
    from torch._functorch import config

    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    with partitioning():
        assert not getattr(config, name, False)


def test_steps_may_run_beside_each_other():
    """In 2.11 a patch cannot be entered twice."""
    with updates.no_backward_inside(), updates.no_backward_inside():
        assert not torch._dynamo.config.trace_autograd_ops
    with torch._dynamo.config.patch(trace_autograd_ops=True), updates.no_backward_inside():
        assert not torch._dynamo.config.trace_autograd_ops


def test_dynamo_follows_the_step_that_an_optimizer_defines():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    before = [param.clone() for param in model.parameters()]
    graph, tensors = updates.captured_step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    known = {id(tensor) for tensor in tensors.values()}
    for param in model.parameters():
        state = optimizer.state[param]
        assert float(state["step"]) == 0
        assert {id(param), id(param.grad), *map(id, state.values())} <= known
    assert id(optimizer.param_groups[0]["lr"]) in known
    assert graph.output_node().all_input_nodes == []


def test_state_that_a_step_makes_is_told():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(updates.MakesState):
        updates.captured_step(optimizer)


def test_hooks_of_optimizers_are_found():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    known = len(updates.step_hooks(optimizer))
    handles = [
        optimizer.register_step_pre_hook(lambda *_: None),
        optimizer.register_step_post_hook(lambda *_: None),
        register_optimizer_step_pre_hook(lambda *_: None),
        register_optimizer_step_post_hook(lambda *_: None),
    ]
    assert len(updates.step_hooks(optimizer)) == known + 4
    for handle in handles:
        handle.remove()


def test_schedules_learn_of_a_step(recwarn):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    updates.note_step(optimizer)
    schedule.step()
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_a_dynamo_graph_gets_an_input_more():
    weight = torch.ones(2)
    compiled_with = []

    def backend(gm, inputs):
        whole = updates.copied_graph(gm)
        like = next(n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder"))
        node, fake = updates.add_input(whole, "more", weight, like)
        output = whole.graph.output_node()
        with whole.graph.inserting_before(output):
            total = whole.graph.call_function(torch.add, (output.args[0][0], node))
        output.args = ((total,),)
        whole.recompile()
        compiled_with.append(tuple(fake.shape))
        from torch._inductor.compile_fx import compile_fx

        code = compile_fx(whole, [*inputs, fake])
        return lambda *args: code(*args, weight)

    torch._dynamo.reset()
    found = torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert compiled_with == [(2,)]
    torch.testing.assert_close(found, torch.full((2,), 3.0))
