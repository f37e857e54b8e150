"""Operations of attention, by the formulas that hold for every version of torch."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from inductor_passes.adapters import roofline
from inductor_passes.machine import attention

_aten = torch.ops.aten
BATCH, HEADS, QUERIES, KEYS, WIDE, NARROW = 2, 6, 5, 7, 16, 8  # key and value differ in width
SCORES = BATCH * HEADS * QUERIES * KEYS
ATTENTION = {
    # 2 operations per score and number: q.k, s.v; q.k again, g.v, s.g, s.k, s.q
    "": 2 * SCORES * (WIDE + NARROW),
    "_backward": 2 * SCORES * (WIDE + NARROW + NARROW + WIDE + WIDE),
}


def attended(key_heads: int) -> tuple[Tensor, ...]:
    """Gradient of the output, query, key and value."""
    shapes = [(HEADS, QUERIES, NARROW), (HEADS, QUERIES, WIDE)]
    shapes += [(key_heads, KEYS, WIDE), (key_heads, KEYS, NARROW)]
    return tuple(torch.empty(BATCH, *shape, device="meta") for shape in shapes)


@pytest.mark.parametrize("key_heads", [6, 2, 1])  # less: grouped queries
@pytest.mark.parametrize("backward", ATTENTION)
def test_operations_of_attention(backward: str, key_heads: int) -> None:
    for name, operator in attention.OPERATORS.items():
        if operator.backward == bool(backward):
            given = attended(key_heads)[1 - operator.query :]
            args = [laid(tensor.shape, operator) for tensor in given]
            args += [KEYS if i == operator.longest else None for i in range(len(args), 15)]
            assert operator.flops(args) == ATTENTION[backward], name
            theirs = flop_registry.get(getattr(_aten, name[6:], None))
            if theirs and (key_heads == HEADS or torch.__version__ >= "2.12"):
                assert operator.flops(args) == theirs(*given), name


def laid(shape: torch.Size, operator: attention.AttentionOp) -> tuple[int, ...]:
    """Of ``[batch, heads, tokens, channels]`` as the operator takes it."""
    batch, heads, tokens, channels = shape
    if operator.longest is not None:
        return batch * tokens, heads, channels
    return (batch, tokens, heads, channels) if operator.length == -3 else (*shape,)


def test_sizes_may_be_open() -> None:
    seq = sympy.Symbol("seq")
    for name, operator in attention.OPERATORS.items():
        args = [seq if i == operator.longest else (BATCH, HEADS, seq, WIDE) for i in range(15)]
        assert operator.flops(args).free_symbols == {seq}, name


def test_flex_attention_is_counted_by_its_name() -> None:
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    graph = torch.fx.Graph()
    grad, *inputs = attended(2)
    nodes = [graph.placeholder(name) for name in "qkv"]
    for node, tensor in zip(nodes, inputs, strict=True):
        node.meta["val"] = tensor
    forward = graph.call_function(flex_attention, (*nodes, None, (), 1.0, {}))
    backward = graph.call_function(flex_attention_backward, (*nodes, forward))
    forward.meta["val"], backward.meta["val"] = (grad, grad), tuple(inputs)
    assert [roofline.flops_of(n) for n in (forward, backward)] == [*ATTENTION.values()]
    assert roofline.work_of_node(forward, 1, 1).kind == "attention"


def test_every_fused_attention_has_a_formula() -> None:
    names = {f"aten::{name}" for name in dir(_aten) if name.startswith("_scaled_dot_product_")}
    parts = {n for n in names if "math" in n or "quantized" in n or "_out" in n}
    assert not names - parts - attention.OPERATORS.keys()
