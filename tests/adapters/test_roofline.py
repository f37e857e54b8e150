"""The work of FX graphs: bytes that reach memory after fusion, operations, and where groups sit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from graphs import capture
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu
from torch.utils.flop_counter import flop_registry

from inductor_passes.adapters import fx, roofline
from inductor_passes.adapters.fx import Reading
from inductor_passes.adapters.roofline import device_of, nodes_of, work_of
from inductor_passes.ir.buckets import Assignment
from inductor_passes.machine.cluster import ClusterCost, Work
from inductor_passes.machine.presets import preset
from inductor_passes.machine.simulate import simulate
from inductor_passes.passes import rehearse
from inductor_passes.rehearsal import Auto, Settings, predict
from simplefsdp import simple_fsdp
from simplefsdp.models import LlamaConfig
from simplefsdp.models.llama3 import Llama
from simplefsdp.provenance import carried_fqn as fqn_of

_aten, _ops = torch.ops.aten, torch.ops._c10d_functional
ROWS, WIDTH = 64, 96
N = 4 * ROWS * WIDTH  # bytes of an activation


def read(function: Callable[..., object], *inputs: Tensor, mode: str = "fake") -> Reading:
    return fx.read(make_fx(function, tracing_mode=mode)(*inputs).graph, lambda node: None)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


X, W = ones(ROWS, WIDTH), ones(WIDTH, WIDTH)
TABLE, INDEX = ones(1000, WIDTH), torch.zeros(ROWS, dtype=torch.int64)


def totals(works: Sequence[Work]) -> tuple[float, int]:
    """Bytes of what is no matmul or attention, and its kernels."""
    rest = [work for work in works if not work.flops]
    return sum(work.nbytes for work in rest), sum(work.kernels for work in rest)


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.sum(0), y.sum(1)


FUSED: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], float, int]] = {
    # name: function, inputs, bytes, kernels
    "a chain": (lambda x: (x * 2 + 1).relu(), (X,), 2 * N, 1),
    "one input twice": (lambda x: x * x.sin(), (X,), 2 * N, 1),
    "two outputs": (lambda x: ((y := x * 2), y + 1), (X,), 3 * N, 1),
    "two readers of one input": (lambda x: (x * 2, x + 1), (X,), 3 * N, 1),
    "strangers": (lambda x, y: (x * 2, y * 2), (X, ones(ROWS, WIDTH)), 4 * N, 2),
    "around a matmul": (lambda x, w: ((x * 2) @ w).relu(), (X, W), 4 * N, 2),
    "kept for later": (lambda x, w: (y := x * 2) + y @ w, (X, W), 5 * N, 2),
    "computed when needed": (lambda x, w: x.sin() * (x @ w), (X, W), 3 * N, 1),
    "a matmul's result, viewed": (lambda x, w: (x @ w).view(-1, 8).t() + 1, (X, W), 2 * N, 1),
    "a norm": (norm, (X, ones(WIDTH)), 2 * N + 4 * WIDTH, 1),
    "a softmax": (softmax, (X,), 2 * N, 1),
    "a share of all": (lambda x: x / x.sum(), (X,), 3 * N + 8, 2),
    "a sum of all": (lambda x: (x * 2).sum(), (X,), N + 4, 1),
    "rows and columns": (both_ways, (X,), 3 * N + 4 * WIDTH + 4 * ROWS, 2),
    "few elements": (lambda x: x.view(-1, 4, WIDTH).sum(1) * 2, (X,), N + N / 4, 1),
    "a half": (lambda x: x[:, : WIDTH // 2] * 2, (X,), N, 1),
    "both halves": (lambda x: x[:, : WIDTH // 2] * x[:, WIDTH // 2 :], (X,), 1.5 * N, 1),
    "broadcast": (lambda x, w: x * w.expand(ROWS, -1), (X, ones(WIDTH)), 2 * N + 4 * WIDTH, 1),
    "a cast": (lambda x: x.bfloat16(), (X,), 1.5 * N, 1),
    "a copy": (lambda x: x.t().clone(memory_format=torch.contiguous_format), (X,), 2 * N, 1),
    "cat": (lambda x, y: torch.cat([x * 2, y]), (X, ones(ROWS, WIDTH)), 4 * N, 1),
    "zeros": (lambda x: x + torch.full([ROWS, WIDTH], 1.0), (X,), 2 * N, 1),
    "lookup": (lambda t, i: t[i] * 2, (TABLE, INDEX), 2 * N + 8 * ROWS, 1),
    "embedding": (lambda i, t: embedding(i, t) * 2, (INDEX, TABLE), 2 * N + 8 * ROWS, 1),
    "embedding's backward": (
        lambda i, g: _aten.index_put(torch.full([1000, WIDTH], 0.0), [i], g, True),
        (INDEX, X),
        4 * 1000 * WIDTH + 3 * N + 8 * ROWS,  # zeros; gradients read, the rows read and written
        2,
    ),
    "a part replaced": (
        lambda x, p: torch.slice_scatter(x * 2, p, 0, 0, 8),
        (X, ones(8, WIDTH)),
        2 * N + 3 * N / 8,
        2,
    ),
    "a part of an input replaced": (
        lambda x, p: torch.slice_scatter(x, p, 0, 0, 8),
        (X, ones(8, WIDTH)),
        2 * N + N / 8,
        1,
    ),
    "a number in each row of zeros": (
        lambda i: torch.full([ROWS, WIDTH], 0.0).scatter(1, i.view(-1, 1), -1.0) * 2,
        (INDEX,),
        N + 8 * ROWS,
        1,
    ),
    "in place": (lambda x, y: x.add_(y), (X, ones(ROWS, WIDTH)), 3 * N, 1),
    "sorted": (lambda x: (x * 2).sort()[0] * 2, (X,), 2 * N + (N + 3 * N) + 2 * N, 3),
    "views": (lambda x: x.view(-1).view(WIDTH, ROWS).t(), (X,), 0, 0),
}


@pytest.mark.parametrize("name", FUSED)
def test_bytes_that_reach_memory(name: str) -> None:
    function, inputs, nbytes, kernels = FUSED[name]
    assert totals([*work_of(read(function, *inputs)).values()]) == (nbytes, kernels)


def test_a_wait_ends_a_kernel() -> None:
    def function(x: Tensor, shard: Tensor) -> Tensor:
        return x * 2 + _ops.wait_tensor(_ops.all_gather_into_tensor(shard * 2, 4, "dp"))

    reading = read(function, X, ones(ROWS // 4, WIDTH))
    # The shard is doubled in a kernel of its own; x is, where the gathered shard is added.
    assert totals([*work_of(reading).values()]) == (2 * N / 4 + 3 * N, 2)
    assert len(work_of(reading)) == 3  # no start, no wait


def test_matmuls_read_and_write_everything() -> None:
    [work] = work_of(read(lambda x, w: x @ w, X.bfloat16(), W.bfloat16())).values()
    nbytes = 2 * (2 * ROWS * WIDTH + WIDTH * WIDTH)
    assert work == Work(2 * ROWS * WIDTH**2, nbytes, "matmul", "bfloat16", 1)


def attend(causal: bool) -> Callable[..., object]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(out.sum(), (q, k, v))

    return function


@pytest.mark.parametrize("causal", [False, True])
def test_attention_forward_and_backward(causal: bool) -> None:
    heads, length, channels = 4, 128, 32
    inputs = [ones(2, heads, length, channels).requires_grad_() for _ in range(3)]
    works = [w for w in work_of(read(attend(causal), *inputs)).values() if w.flops]
    one = 2 * 2 * heads * length**2 * channels / (2 if causal else 1)  # of one matmul
    assert [w.kind for w in works] == ["attention"] * 2
    assert [w.flops for w in works] == [2 * one, 5 * one]
    tensor = 4 * 2 * heads * length * channels
    logsumexp = tensor / channels
    assert works[0].nbytes == 4 * tensor + logsumexp
    assert works[1].nbytes == 7 * tensor + logsumexp + 4  # the gradient is one number, expanded


def test_symbolic_sizes_count_as_traced_and_add_no_guard() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        q = (norm(x, w[0]) @ w).view(1, 1, -1, WIDTH)
        return scaled_dot_product_attention(q, q, q, is_causal=True).relu()

    traced = make_fx(function, tracing_mode="symbolic")(X, W)
    assert any(isinstance(n, torch.SymInt) for n in device_values(traced)[0].shape)
    before = list(traced.shape_env.guards)
    symbolic = work_of(fx.read(traced.graph, lambda node: None))
    assert traced.shape_env.guards == before
    plain = work_of(read(function, X, W))
    assert sum(w.flops for w in symbolic.values()) == sum(w.flops for w in plain.values()) > 0
    assert totals([*symbolic.values()]) == totals([*plain.values()])


def device_values(traced: torch.fx.GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in traced.graph.nodes if "val" in node.meta]


@pytest.mark.slow
def test_a_llama_step_has_the_operations_of_the_formula(fake_mesh: Callable) -> None:
    config = LlamaConfig(
        vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, max_seq_len=16
    )
    model = simple_fsdp(Llama(config), fake_mesh(4))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with capture() as captured:
        compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
        compiled(tokens).sum().backward()
    graphs = [g.graph for g in (*captured.forward, *captured.backward)]
    works = [w for g in graphs for w in work_of(fx.read(g, fqn_of)).values()]
    matrices = sum(p.numel() for n, p in Llama(config).named_parameters() if p.dim() == 2)
    matrices -= config.vocab_size * config.dim  # the embedding is looked up
    per_kind = {k: sum(w.flops for w in works if w.kind == k) for k in ("matmul", "attention")}
    assert per_kind["matmul"] == 6 * matrices * tokens.numel()
    assert per_kind["attention"] == 7 * 2 * 16**2 * 32 * 2  # batch, length^2, dim, layers; causal


def test_nodes_of_the_groups_of_a_mesh(fake_mesh: Callable) -> None:
    mesh = fake_mesh(4, 8, names=("replicate", "shard"), rank=13)
    names = [mesh.get_group(name).group_name for name in ("replicate", "shard")]

    def function(x: Tensor) -> list[Tensor]:
        return [_ops.wait_tensor(_ops.all_reduce(x, "sum", name)) for name in [*names, "other"]]

    program = read(function, X).program
    assert nodes_of(program, 8) == {names[0]: 4, names[1]: 1}
    # An all-reduce is not told its number of ranks; its group is, if it is known.
    ranks = [op.collective.ranks for _, op in program.starts() if op.collective]
    assert ranks == [4, 8, 0]
    with pytest.raises(ValueError, match="its process group is unknown"):
        simulate(program, ClusterCost(preset("h100")))


def test_a_rough_prediction_says_what_it_assumes() -> None:
    graph = make_fx(lambda x: x * 2, tracing_mode="fake")(X)
    rehearsal = rehearse(graph, None, lambda node: None)
    assert device_of(rehearsal.reading) == torch.device("cpu")
    assert predict(rehearsal, None).device == "cpu-gloo"
    planned = Settings(Assignment({}), Auto(preset("a100")))
    assert predict(rehearsal, planned).device == "a100"
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = torch.empty(ROWS, WIDTH, device="meta")
    rehearsal = rehearse(graph, None, lambda node: None)
    assert predict(rehearsal, None).device == "h100 (there is no preset for meta)"


def test_the_work_prices_a_simulation() -> None:
    reading = read(lambda x, w: silu(x @ w) @ w + rms_norm(x, [WIDTH]), X, W)
    cost = ClusterCost(preset("h100"), work=work_of(reading))
    total = simulate(reading.program, cost).compute_us
    assert total == pytest.approx(sum(cost.cluster.compute_us(w) for w in cost.work.values()))


def test_an_op_whose_operations_cannot_be_counted_is_named_once(monkeypatch, caplog):
    def fails(*args: object, **kwargs: object) -> int:
        raise AssertionError("five dimensions")

    monkeypatch.setitem(flop_registry, _aten.mm, fails)
    monkeypatch.setattr(roofline, "_without_formula", set())
    reading = read(lambda x, w: (x @ w) @ w, X, W)
    works = work_of(reading)
    assert [work.flops for work in works.values()] == [0, 0]
    lines = [r.getMessage() for r in caplog.records]
    (line,) = [line for line in lines if "cannot be counted" in line]
    assert line.startswith("aten::mm: its floating"), lines
    assert "AssertionError: five dimensions" in line
