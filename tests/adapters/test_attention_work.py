"""What attention is taken to do, as every release writes it: bare, and recomputed with a state."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._prims import rng_prims
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from inductor_passes.adapters import _torch, fx, roofline
from inductor_passes.adapters._torch_calls import call_of
from inductor_passes.ir.program import ProgramError
from inductor_passes.machine.cluster import Work

_aten = torch.ops.aten
BATCH, HEADS, KV_HEADS, LENGTH, CHANNELS = 2, 8, 2, 64, 16
ONE = 2 * BATCH * HEADS * LENGTH**2 * CHANNELS  # operations of one of its matmuls
FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
FUSED += ("fused_attention_overrideable",)
FLASH = _aten._scaled_dot_product_flash_attention.default


def value(heads: int, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(BATCH, heads, LENGTH, CHANNELS, dtype=dtype, device="meta")


def placeholder(graph: Graph, name: str, val: object) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = val
    return node


def grouped(graph: Graph) -> list[Node]:
    """Query, key and value, of which a head of the two last serves several of the first."""
    return [
        placeholder(graph, name, value(heads))
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    ]


def call(graph: Graph, target: object, *args: object, **kwargs: object) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = (value(HEADS), torch.empty(BATCH, HEADS, LENGTH, device="meta"))
    return node


def works_of(graph: Graph) -> dict[str, Work]:
    return roofline.work_of(fx.read(graph, lambda node: None))


@pytest.mark.parametrize("name", FUSED)
def test_grouped_queries_are_not_free_forward_or_backward(name: str) -> None:
    forward = getattr(_aten, f"_scaled_dot_product_{name}").default
    backward = getattr(_aten, f"_scaled_dot_product_{name}_backward").default
    graph = Graph()
    q, k, v = grouped(graph)
    grad = placeholder(graph, "grad", value(HEADS))
    there, back = call(graph, forward, q, k, v), call(graph, backward, grad, q, k, v)
    graph.output([there, back])
    works = works_of(graph)
    assert [works[node.name].flops for node in (there, back)] == [2 * ONE, 5 * ONE]
    assert {works[node.name].kind for node in (there, back)} == {"attention"}


def test_flex_attention_is_not_free_either() -> None:
    higher_order = torch.ops.higher_order
    graph = Graph()
    q, k, v = grouped(graph)
    there = call(graph, higher_order.flex_attention, q, k, v, None, (), 1.0, {})
    back = call(graph, higher_order.flex_attention_backward, q, k, v, there, there, there)
    works = {node: roofline.work_of_node(node, 0, 1) for node in (there, back)}
    assert [work.flops for work in works.values()] == [2 * ONE, 5 * ONE]
    assert {work.kind for work in works.values()} == {"attention"}
    assert flex_attention.__name__ == there.target.name() == "flex_attention"


def test_attention_that_nobody_knows_is_named_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(roofline, "_without_formula", set())
    with torch.library._scoped_library("somebodys", "FRAGMENT") as library:
        library.define("fast_attn(Tensor q, Tensor k, Tensor v) -> Tensor")
        op = torch.ops.somebodys.fast_attn.default
        graph = Graph()
        q, k, v = grouped(graph)
        graph.output([call(graph, op, q, k, v), call(graph, op, q, k, v)])
        assert {work.flops for work in works_of(graph).values()} == {0}
    lines = [r.getMessage() for r in caplog.records if "cannot be counted" in r.getMessage()]
    (line,) = lines
    assert line.startswith("somebodys::fast_attn: its floating") and "no formula" in line


def test_attention_that_writes_its_gradients() -> None:
    """As the flash-attn package's backward: AOTAutograd has another operator call it."""
    made: list[GraphModule] = []
    tensors = [torch.ones(BATCH, LENGTH, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def keep(gm: GraphModule, _: object) -> Callable[..., object]:
        made.append(gm)
        return make_boxed_func(gm.forward)

    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define(
            "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
            "Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, "
            "float softmax_scale, bool causal) -> Tensor"
        )
        for key in ("CPU", "Meta"):
            library.impl("_flash_attn_backward", lambda *args: args[5].clone(), key)
        op = torch.ops.flash_attn._flash_attn_backward

        def backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grads = [torch.empty_like(given) for given in (q, k, v)]
            op(q, q, k, v, q, q.sum(-1), *grads, 0.0, 1.0, True)
            return grads[0].sin()

        torch.compile(backward, backend=aot_autograd(fw_compiler=keep))(*tensors)
        (node,) = [n for n in made[0].graph.nodes if "auto_functionalized" in str(n.target)]
        work = roofline.work_of_node(node, 0, 1)
        assert (work.flops, work.kind) == (5 * ONE // 2, "attention")  # half of it is masked
        assert _torch.multiplies_matrices(node)


def with_state(graph: Graph, how: str, op: object, *args: object, **kwargs: object) -> Node:
    """``op`` as activation checkpointing has it run, in one of the three ways."""
    if how == "graphsafe":
        own = placeholder(graph, "bwd_rng_state_0", torch.Generator())
        return call(
            graph, rng_prims.graphsafe_run_with_rng_state, op, *args, rng_state=own, **kwargs
        )
    state = placeholder(graph, "rng_state", torch.empty(16, dtype=torch.uint8, device="meta"))
    if how == "given":
        return call(graph, rng_prims.run_with_rng_state, state, op, *args, **kwargs)
    node = call(graph, rng_prims.run_and_save_rng_state, op, *args, **kwargs)
    node.meta["val"] = (state.meta["val"], node.meta["val"])
    return node


HOW = ("graphsafe", "given", "saved")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_recomputed_attention_is_attention(how: str, causal: bool) -> None:
    graph = Graph()
    q, k, v = grouped(graph)
    bare = call(graph, FLASH, q, k, v, 0.0, causal)
    again = with_state(graph, how, FLASH, q, k, v, 0.0, is_causal=causal)
    graph.output([bare, again])
    works = works_of(graph)
    expected, found = works[bare.name], works[again.name]
    assert found.flops == expected.flops == ONE * (1 if causal else 2)
    assert (found.kind, found.dtype, found.kernels) == ("attention", "bfloat16", 1)
    assert 0 <= found.nbytes - expected.nbytes <= 2 * 16  # the state
    assert _torch.multiplies_matrices(again)
    assert call_of(again)[:2] == (FLASH, again.args[2:] if how == "given" else again.args[1:])


@pytest.mark.parametrize("how", HOW)
def test_what_is_recomputed_writes_none_of_its_tensors(how: str) -> None:
    graph = Graph()
    q, k, v = grouped(graph)
    again = with_state(graph, how, FLASH, q, k, v)
    after = call(graph, _aten.cos.default, q)
    graph.output([again, after])
    program = fx.read(graph, lambda node: None).program
    op = program.ops[program.index[again.name]]
    assert not {"q", "k", "v", "effects"} & set(op.writes)
    # Only a generator of its own moves on, or the device's where it is drawn from.
    moved = {"graphsafe": {"bwd_rng_state_0"}, "given": set(), "saved": {"random state"}}
    assert set(op.writes) - {again.name} == moved[how]
    program.reorder([after.name, again.name])  # nothing holds them in their sequence


def test_what_saves_the_generator_keeps_its_place_among_what_draws() -> None:
    graph = Graph()
    q, k, v = grouped(graph)
    drawn = call(graph, _aten.rand_like.default, q)
    saves = with_state(graph, "saved", FLASH, q, k, v)
    recomputes = with_state(graph, "given", FLASH, q, k, v)
    graph.output([drawn, saves, recomputes])
    program = fx.read(graph, lambda node: None).program
    program.reorder([recomputes.name, drawn.name, saves.name])
    with pytest.raises(ProgramError, match=f"{saves.name} is placed before {drawn.name}"):
        program.reorder([saves.name, drawn.name, recomputes.name])


def test_an_operator_that_writes_does_so_when_it_is_recomputed() -> None:
    graph = Graph()
    q, k, _ = grouped(graph)
    again = with_state(graph, "graphsafe", _aten.copy_.default, q, k)
    state = again.kwargs["rng_state"]
    assert list(_torch.mutated_arguments(again)) == [state, q]


def test_how_torch_writes_what_is_recomputed() -> None:
    """The contract: what the partitioner makes of operators that draw random numbers."""
    for name in ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"):
        assert isinstance(getattr(rng_prims, name), torch._ops.HigherOrderOperator), name
    assert torch.Tag.nondeterministic_seeded in FLASH.tags  # why attention is among them
    draw = _aten.rand.default
    state, first = rng_prims.run_and_save_rng_state(draw, [3], device="cpu")
    again = rng_prims.run_with_rng_state(state, draw, [3], device="cpu")
    assert torch.equal(first, again), "the operator's place among the arguments moved"


def checkpointed(function: Callable[..., Tensor], *inputs: Tensor) -> list[Graph]:
    """Forward and backward of a function that is checkpointed, as the partitioner writes them."""
    found = []

    def keep(gm: GraphModule, _: object) -> Callable[..., object]:
        found.append(gm.graph)
        return make_boxed_func(gm.forward)

    def run(*given: Tensor) -> Tensor:
        return checkpoint(function, *given, use_reentrant=False)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    torch.compile(run, backend=backend)(*inputs).sum().backward()
    return found


def test_what_is_recomputed_has_its_bytes() -> None:
    """The partitioner does not note what the calls that it writes return."""
    x = torch.ones(8, 16, requires_grad=True)
    graphs = checkpointed(lambda x: (x.sin() * torch.rand_like(x)).sin(), x)
    names = ["run_and_save_rng_state", "run_with_rng_state"]
    state = torch.get_rng_state().numel()
    for graph, name, nbytes in zip(graphs, names, (state + 512, 512), strict=True):
        (node,) = [n for n in graph.nodes if name in str(n.target) or name in n.name]
        reading = fx.read(graph, lambda node: None)
        assert reading.program.buffers[node.name].nbytes == nbytes
        assert roofline.work_of(reading)[node.name].nbytes >= 2 * 512


def test_results_that_are_taken_apart_have_their_bytes() -> None:
    graph = Graph()
    q, k, v = grouped(graph)
    again = with_state(graph, "graphsafe", FLASH, q, k, v)
    out, logsumexp = again.meta.pop("val")
    for i, val in ((0, out), (1, logsumexp)):
        graph.call_function(operator.getitem, (again, i)).meta["val"] = val
    program = fx.read(graph, lambda node: None).program
    assert program.buffers[again.name].nbytes == out.nbytes + logsumexp.nbytes
