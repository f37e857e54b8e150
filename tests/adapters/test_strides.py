"""Graphs that say otherwise of their values than they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.adapters.strides import correct_strides, take_strides_of_inputs

aten = torch.ops.aten


def traced() -> GraphModule:
    """A part of what was computed, its transpose, and what is computed of that."""

    def function(x):
        part = aten.slice.Tensor(aten.sin.default(x), 1, 0, 4)
        return aten.cos.default(aten.t.default(part)), aten.slice.Tensor(x, 1, 0, 4)

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.rand(3, 8))
        gm = make_fx(function, tracing_mode="real")(x)
    for node in (node for node in gm.graph.nodes if node.op == "call_function"):
        node.meta["original_aten"] = node.target
    return gm


def of(gm: GraphModule, target: object) -> Node:
    return gm.graph.find_nodes(op="call_function", target=target)[0]


def said(node: Node) -> tuple[int, ...]:
    return node.meta["val"].stride()


def densely(node: Node) -> None:
    """As torch's passes do, when they leave out a division by 1."""
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(value.shape)
    node.meta["original_aten"] = aten.div.Tensor


def test_a_view_that_took_what_was_known_of_its_copy_is_corrected():
    gm = traced()
    part, turned, cos = (of(gm, t) for t in (aten.slice.Tensor, aten.t.default, aten.cos.default))
    before = said(part), said(turned), said(cos)
    assert before[:2] == ((8, 1), (1, 8))
    densely(part)
    with part.meta["val"].fake_mode:
        turned.meta["val"] = part.meta["val"].t()
        cos.meta["val"] = turned.meta["val"].cos()
    assert said(part) == (4, 1) and said(turned) == (1, 4)
    correct_strides(gm.graph)
    assert (said(part), said(turned), said(cos)) == before


def test_what_lies_as_it_says_is_left():
    gm = traced()
    values = [node.meta.get("val") for node in gm.graph.nodes]
    correct_strides(gm.graph)
    assert all(n.meta.get("val") is v for n, v in zip(gm.graph.nodes, values, strict=True))


def test_an_input_is_told_by_what_is_given():
    gm = traced()
    (x,) = gm.graph.find_nodes(op="placeholder")
    with x.meta["val"].fake_mode:
        given = torch.empty(3, 16)[:, :8]
    take_strides_of_inputs(gm.graph, [given])
    assert x.meta["val"] is given
    correct_strides(gm.graph)
    of_input = gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)[1]
    assert said(of_input) == (16, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_strides_of_one_element_do_not_matter(size):
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.rand(size, 8))
        gm = make_fx(aten.sin.default, tracing_mode="real")(x)
        given = torch.empty(size, 16)[:, :8]
    take_strides_of_inputs(gm.graph, [given])
    (node,) = gm.graph.find_nodes(op="placeholder")
    assert (node.meta["val"] is given) == (size == 2)
