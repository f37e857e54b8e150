"""Gradients that are reduced in fp32 and never rounded: graph in, graph out, without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import work_of
from inductor_passes.adapters.unrounded import write_sums_unrounded
from simplefsdp import simple_fsdp
from simplefsdp.compiler.observed import observe
from simplefsdp.compiler.options import Options
from simplefsdp.compiler.plans import Compilation
from simplefsdp.compiler.size_limits import SizeLimits
from simplefsdp.simulation.trace import trace

_aten, _ops, _prims = torch.ops.aten, torch.ops._c10d_functional, torch.ops.prims
RANKS, M, K, N = 4, 24, 16, 8
ROUNDED = [_aten.mm.default, _prims.convert_element_type.default]


def to_fp32(x: Tensor) -> Tensor:
    return _prims.convert_element_type(x, torch.float32)


def rounded(x: Tensor) -> Tensor:
    return to_fp32(_prims.convert_element_type(x, torch.bfloat16))


def reduce(x: Tensor) -> Tensor:
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "avg", RANKS, "dp"))


def traced(
    function: Callable[..., object],
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    shapes: tuple[tuple[int, ...], ...] = ((M, K), (K, N)),
) -> Graph:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    graph.eliminate_dead_code()
    return graph


def targets(graph: Graph) -> list[object]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


START = [_ops.reduce_scatter_tensor.default, _ops.wait_tensor.default]
BECOME = {
    "a gradient": (lambda a, b: reduce(to_fp32(a @ b)), [_aten.mm.dtype, *START]),
    "a gradient, transposed, twice": (
        lambda a, b: reduce(to_fp32((a @ b).t()).t()),
        [_aten.mm.dtype, _aten.t.default, _aten.t.default, *START],
    ),
    "a gradient, viewed": (
        lambda a, b: reduce(to_fp32((a @ b).view(M, 2, -1)).view(-1)),
        [_aten.mm.dtype, _aten.view.default, _aten.view.default, *START],
    ),
    "what is only all-reduced": (
        lambda a, b: _ops.wait_tensor(_ops.all_reduce(to_fp32(a @ b), "sum", "dp")),
        [_aten.mm.dtype, _ops.all_reduce.default, _ops.wait_tensor.default],
    ),
}


TWICE = {
    "a sum": (lambda a: reduce(rounded(a * 2)), []),
    "a sum, viewed": (
        lambda a: reduce(to_fp32(_prims.convert_element_type(a * 2, torch.bfloat16).view(-1))),
        [_aten.view.default],
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_what_is_computed_in_fp32_is_not_rounded(name: str):
    function, views = TWICE[name]
    graph = traced(function, dtype=torch.float32, shapes=((M, K),))
    write_sums_unrounded(graph)
    graph.lint()
    assert targets(graph) == [_aten.mul.Tensor, *views, *START]
    assert all(n.meta["val"].dtype == torch.float32 for n in graph.nodes if n.op != "output")


def test_a_rounding_that_shows_elsewhere_stays():
    def function(a: Tensor) -> object:
        b = _prims.convert_element_type(a * 2, torch.bfloat16)
        return reduce(to_fp32(b)), b

    def of_a_part(a: Tensor) -> object:
        return reduce(rounded(_aten.slice(a, 1, 0, K // 2)))

    for case in (function, of_a_part):
        graph = traced(case, dtype=torch.float32, shapes=((M, K),))
        before = str(graph)
        write_sums_unrounded(graph)
        assert str(graph) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BECOME)
def test_a_sum_that_is_reduced_is_not_rounded(name: str, dtype: torch.dtype):
    function, expected = BECOME[name]
    graph = traced(function, dtype=dtype)
    was = [n.meta["val"] for n in graph.nodes if n.target in START]
    write_sums_unrounded(graph)
    graph.lint()
    assert targets(graph) == expected
    first = next(n for n in graph.nodes if n.op == "call_function")
    assert first.kwargs == {"out_dtype": torch.float32}
    values = [n.meta["val"] for n in graph.nodes if n.op == "call_function"]
    assert all(v.dtype == torch.float32 for v in values)
    now = [n.meta["val"] for n in graph.nodes if n.target in START]
    assert [v.shape for v in was] == [v.shape for v in now]
    start = next(n for n in graph.nodes if n.target in fx.KIND_OF)
    assert start.args[0].meta["val"].is_contiguous()


def test_experts_are_not_rounded():
    graph = traced(
        lambda a, b: reduce(to_fp32(torch.bmm(a, b))), shapes=((RANKS, M, K), (RANKS, K, N))
    )
    write_sums_unrounded(graph)
    assert targets(graph) == [_aten.bmm.dtype, *START]
    assert work_of(fx.read(graph, lambda node: None))["bmm"].flops == 2 * RANKS * M * K * N


STAY = {
    "used as it is, too": lambda a, b: (reduce(to_fp32(c := a @ b)), c.sum()),
    "used in fp32 elsewhere": lambda a, b: (reduce(c := to_fp32(a @ b)), c * 2),
    "returned": lambda a, b: (reduce(c := to_fp32(a @ b)), c),
    "a view of it returned": lambda a, b: (reduce((c := to_fp32(a @ b)).view(-1)), c.t()),
    "not reduced": lambda a, b: to_fp32(a @ b).sum(),
    "gathered": lambda a, b: _ops.wait_tensor(
        _ops.all_gather_into_tensor(to_fp32(a @ b), RANKS, "dp")
    ),
    "padded": lambda a, b: reduce(torch.nn.functional.pad(to_fp32(a @ b), (0, 0, 0, RANKS))),
    "a part of a larger one": lambda a, b: reduce(to_fp32(_aten.slice(a @ b, 1, 0, N // 2))),
    "in other bits": lambda a, b: reduce(to_fp32((a @ b).view(torch.int16))),
    "no matmul": lambda a, b: reduce(to_fp32(a * 2)),
    "an input": lambda a, b: reduce(to_fp32(a)),
}


@pytest.mark.parametrize("name", STAY)
def test_anything_else_stays(name: str):
    graph = traced(STAY[name])
    before = str(graph)
    write_sums_unrounded(graph)
    assert str(graph) == before


def test_other_dtypes_stay():
    def to_fp64(a: Tensor, b: Tensor) -> Tensor:
        return reduce(_prims.convert_element_type(a @ b, torch.float64))

    for graph in (traced(to_fp64), traced(to_fp64, dtype=torch.float32)):
        before = str(graph)
        write_sums_unrounded(graph)
        assert str(graph) == before


@pytest.mark.parametrize(
    ("device", "setting"),
    [
        ("cpu", {}),
        ("cuda", {"max_autotune_gemm_backends": "TRITON"}),
        ("cuda", {"triton.native_matmul": True}),
    ],
)
def test_where_no_kernel_can_it_stays(device: str, setting: dict[str, object]):
    graph = traced(lambda a, b: reduce(to_fp32(a @ b)), device=device)
    with config.patch(setting):
        write_sums_unrounded(graph)
    assert targets(graph) == [*ROUNDED, *START]


def test_it_is_counted_as_the_matmul_that_it_is():
    graph = traced(lambda a, b: reduce(to_fp32(a @ b)))
    rounded = work_of(fx.read(graph, lambda node: None))
    write_sums_unrounded(graph)
    (work,) = work_of(fx.read(graph, lambda node: None)).values()
    assert (work.flops, work.kind, work.dtype, work.kernels) == (
        2 * M * K * N,
        "matmul",
        "bfloat16",
        1,
    )
    assert work.nbytes == 2 * (M * K + K * N) + 4 * M * N
    saved = sum(w.nbytes for w in rounded.values()) - work.nbytes
    assert saved == 2 * (2 * M * N)  # the rounded sum is neither written nor read
    assert sum(w.kernels for w in rounded.values()) == 2


def test_graphs_are_written_so_before_they_are_planned():
    graph = traced(lambda a, b: reduce(to_fp32(a @ b)))
    gm = GraphModule(nn.Module(), graph)
    compilation = Compilation(
        Options(), None, (), grad=True, number=0, limits=SizeLimits(gm), again=set()
    )
    observe(gm, is_backward=True, compilation=compilation)
    assert targets(graph) == [_aten.mm.dtype, *START]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_step_is_traced_as_the_planned_machine_runs_it(fake_mesh, on_cpu: bool):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = simple_fsdp(nn.Linear(K, M, bias=False), fake_mesh(RANKS), mp_policy=policy)
    step = trace(model, torch.ones(N, K), averages=not on_cpu)
    assert (_aten.mm.dtype in targets(step.backward.graph)) is not on_cpu
    assert _aten.mm.dtype not in targets(step.forward.graph)
