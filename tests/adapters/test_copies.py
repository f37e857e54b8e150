"""Buckets whose members are packed: the nodes that are written, and that the numbers stay.

On the CPU, the kernels' plain twins compute.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from fx_graphs import RANKS, copied, same_numbers
from test_fx_adapter import ours
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from inductor_passes import passes
from inductor_passes.adapters import copies, fx, packs
from inductor_passes.adapters.copies import source_of
from inductor_passes.adapters.layouts import BucketLayout, write_buckets
from inductor_passes.adapters.packs import PACK, UNPACK
from inductor_passes.adapters.roofline import work_of
from inductor_passes.ir.buckets import Assignment
from inductor_passes.ir.program import Bucket
from inductor_passes.ir.verify import verify_unchanged
from inductor_passes.machine.presets import preset
from inductor_passes.passes import bucket_and_reorder
from inductor_passes.rehearsal import Auto, Settings
from inductor_passes.transform.merge import merge
from inductor_passes.transform.portable import Member, PortableBucket

_aten, _ops, _prims = torch.ops.aten, torch.ops._c10d_functional, torch.ops.prims
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "has_kernel", lambda device: True)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _prims.convert_element_type(x, dtype)


def gather(x: Tensor) -> Tensor:
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x, RANKS, "dp"))


def reduce(x: Tensor) -> Tensor:
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", RANKS, "dp"))


def gathers(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    """Cast, cast and padded, padded by a whole shard, and as it is."""
    padded = pad(cast(b, BF16), (0, 0, 0, 1))
    of_none = pad(cast(c, BF16), (0, 2))
    fulls = [gather(cast(a, BF16)), gather(padded)[:10], gather(of_none)[:6], gather(d)]
    return [full * 2 for full in fulls]


GATHERS = (torch.ones(6, 5), torch.ones(2, 3), torch.ones(0), torch.ones(7, dtype=BF16))


def reduces(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    """Cast; padded; cast and padded; transposed, cast and copied."""
    grads = [cast(a * 2, FP32), pad(b * 2, (0, 0, 0, 2)), pad(cast(c * 2, FP32), (0, 1))]
    grads.append(cast((d * 2).t(), FP32).clone(memory_format=torch.contiguous_format))
    return [reduce(grad) / RANKS for grad in grads]


REDUCES = (
    torch.ones(8, 3, dtype=BF16),
    torch.ones(6, 5),
    torch.ones(7, dtype=BF16),
    torch.ones(5, 4, dtype=BF16),
)


def all_reduces(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    grads = (cast(a * 2, FP32), cast(b * 2, FP32), c * 2)
    return [_ops.wait_tensor(_ops.all_reduce(grad, "sum", "dp")) * 2 for grad in grads]


ALL_REDUCES = (torch.ones(3, dtype=BF16), torch.ones((), dtype=BF16), torch.ones(2, 2))
GRAPHS = {
    "gathers": (gathers, GATHERS),
    "reduces": (reduces, REDUCES),
    "all-reduces": (all_reduces, ALL_REDUCES),
}


def traced(function: Callable[..., object], inputs: tuple[Tensor, ...]) -> Graph:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    graph.eliminate_dead_code()
    return graph


def write(graph: Graph, layout: BucketLayout, together: tuple[int, ...] = ()) -> None:
    """All collectives of the graph as one bucket."""
    reading = fx.read(graph, ours)
    buckets = (Bucket("all", tuple(op.name for _, op in reading.program.starts())),)
    merged = merge(reading.program, buckets)
    write_buckets(graph, reading, merged, buckets, layout, lambda members: together)
    graph.lint()
    verify_unchanged(reading.program, fx.read(graph, ours).program)


def targets(graph: Graph) -> list[object]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def sent(graph: Graph) -> list[Node]:
    (start,) = (n for n in graph.nodes if n.target in fx.KIND_OF)
    return start.all_input_nodes


@pytest.mark.parametrize("together", [(), (0, 1), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("layout", get_args(BucketLayout))
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.usefixtures("kernels")
def test_the_numbers_stay(name: str, layout: BucketLayout, together: tuple[int, ...]):
    graph = traced(*GRAPHS[name])
    before = copied(graph)
    write(graph, layout, tuple(i for i in together if i < len(GRAPHS[name][1])))
    assert same_numbers(before, graph)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("reorder", [True, False])
@pytest.mark.parametrize("rows", [8, 7])
def test_a_bucket_is_copied_out_where_it_is_used(reorder: bool, rows: int):
    """A checkpointed block gathers all of its parameters where it begins, and cuts what ranks have
    padded off there."""

    def block(x: Tensor, *shards: Tensor) -> Tensor:
        first, second, third = [gather(shard)[:rows] for shard in shards]
        return ((x[:, :rows] @ first).sin()[:, :rows] @ second)[:, :rows] @ third

    shards = [torch.randn(8 // RANKS, 8) for _ in range(3)]
    graph = traced(block, (torch.randn(5, 8), *shards))
    before = copied(graph)
    names = [n.name for n in graph.nodes if n.target in fx.KIND_OF]
    of = Assignment(dict.fromkeys(names[1:], "rest"))
    bucket_and_reorder(graph, Settings(of, layout="flat", reorder=reorder), ours)
    order = targets(graph)
    assert order.index(UNPACK) > order.index(torch.ops.aten.sin.default)
    assert same_numbers(before, graph)


def test_what_is_sent_is_not_written_before_it_has_arrived():
    def block(x: Tensor, *shards: Tensor) -> Tensor:
        first, second = [gather(shard) for shard in shards]
        shards[1].mul_(2)
        return (x @ first) @ second

    graph = traced(block, (torch.randn(5, 8), *(torch.randn(8 // RANKS, 8) for _ in range(2))))
    write(graph, "coalesced")
    order = targets(graph)
    last_wait = len(order) - 1 - order[::-1].index(_ops.wait_tensor.default)
    assert last_wait < next(i for i, target in enumerate(order) if "mul" in str(target))


@pytest.mark.parametrize("together", [(0, 1), (1, 2)])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_numbers_stay_without_kernels(name: str, together: tuple[int, ...]):
    graph = traced(*GRAPHS[name])
    before = copied(graph)
    write(graph, "coalesced", together)
    assert same_numbers(before, graph)
    assert {PACK, UNPACK}.isdisjoint(targets(graph))
    assert len(sent(graph)) == len(GRAPHS[name][1]) - 1


@pytest.mark.usefixtures("kernels")
def test_shards_of_a_coalesced_bucket_are_cast_and_padded_by_one_kernel():
    graph = traced(*GRAPHS["gathers"])
    write(graph, "coalesced")
    found = targets(graph)
    assert found.count(PACK) == 1
    assert {_prims.convert_element_type.default, _aten.constant_pad_nd.default}.isdisjoint(found)
    assert UNPACK not in found  # each arrives in a buffer of its own
    (pack,) = (n for n in graph.nodes if n.target is PACK)
    members, rows, widths, dtype = pack.args
    assert [n.op for n in members] == ["placeholder"] * 3  # what is bf16 already is sent as it is
    assert (rows, widths, dtype) == (1, [64, 64, 64], BF16)  # of 30, 9 and 2: each begins aligned
    assert len(sent(graph)) == 4
    work = work_of(fx.read(graph, lambda node: None))[pack.name]
    assert (work.nbytes, work.kernels) == (4 * (30 + 6) + 2 * 3 * 64, 1)


@pytest.mark.usefixtures("kernels")
def test_a_gather_with_a_shared_buffer_takes_one_kernel_before():
    graph = traced(*GRAPHS["gathers"])
    write(graph, "coalesced", (1, 3))
    (pack,) = (n for n in graph.nodes if n.target is PACK)
    members, rows, widths, _ = pack.args
    assert [n.meta["val"].shape for n in members] == [
        GRAPHS["gathers"][1][i].shape for i in (0, 2, 1, 3)
    ]
    assert (rows, widths) == (1, [64, 64, 9, 7])  # the last two share a tensor of 16
    buffer, *rest = sent(graph)
    assert buffer.meta["val"].shape == (16,)
    assert [n.meta["val"].shape for n in rest] == [(6, 5), (2,)]
    assert buffer.meta["val"].storage_offset() == 128


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "out"), [("gathers", UNPACK), ("reduces", _aten.slice.Tensor)])
def test_a_flat_bucket_is_one_copy_in_and_one_out_at_most(name: str, out: object):
    graph = traced(*GRAPHS[name])
    write(graph, "flat")
    found = targets(graph)
    assert found.count(PACK) == 1
    assert out in found
    assert {_aten.cat.default, _aten.constant_pad_nd.default}.isdisjoint(found)
    assert found.count(_aten.clone.default) == (name == "reduces")  # of what lies transposed
    (buffer,) = sent(graph)
    assert buffer.target is PACK
    work = work_of(fx.read(graph, lambda node: None))
    copying = [w for op, w in work.items() if op.startswith(("pack", "unpack"))]
    assert sum(w.kernels for w in copying) == 1 + (out is UNPACK)


@pytest.mark.usefixtures("kernels")
def test_one_cast_needs_no_kernel_of_ours():
    graph = traced(lambda a, b: [gather(cast(a, BF16)), gather(b)], (GATHERS[0], GATHERS[3]))
    before = str(graph)
    write(graph, "coalesced")
    assert PACK not in targets(graph)
    assert _prims.convert_element_type.default in targets(graph), before


@pytest.mark.usefixtures("kernels")
def test_members_that_are_packed_share_one_tensor_of_the_call():
    graph = traced(*GRAPHS["reduces"])
    write(graph, "coalesced", (1, 2))
    buffer, *rest = sent(graph)
    assert buffer.target is PACK
    assert len(rest) == 2
    items = [n for n in graph.nodes if n.target is operator.getitem]
    assert len(items) == 3
    # Its shards are views of what arrived.
    assert UNPACK not in targets(graph)


SOURCES = {
    "a cast": (lambda x: cast(x, BF16), True),
    "a cast of a view": (lambda x: cast(x.view(-1), BF16), True),
    "a pad": (lambda x: pad(x, (0, 0, 0, 3)), True),
    "a cast, padded, viewed": (lambda x: pad(cast(x, BF16), (0, 0, 0, 3)).view(-1), True),
    "a copy": (lambda x: x.clone(), True),
    "a view": (lambda x: x.view(-1), False),
    "a pad of columns": (lambda x: pad(x, (0, 2)), False),
    "a pad before": (lambda x: pad(x, (0, 0, 3, 0)), False),
    "a pad by ones": (lambda x: pad(x, (0, 0, 0, 3), value=1.0), False),
    "a pad that cuts": (lambda x: pad(x, (0, 0, 0, -1)), False),
    "a cast of what is transposed": (lambda x: cast(x.t(), BF16), False),
    "a cast of what a loop computes": (lambda x: cast(x * 2, BF16), False),
    "a cast to integers": (lambda x: cast(x, torch.int32), False),
    "a cast from 64 bits": (lambda x: cast(cast(x, torch.float64), FP32), False),
}


@pytest.mark.parametrize("name", SOURCES)
def test_where_a_member_comes_from(name: str):
    function, found = SOURCES[name]
    graph = traced(lambda x: gather(function(x).contiguous()), (torch.ones(4, 6),))
    (node,) = sent(graph)
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    assert source_of(node) is (x if found else node)


def test_a_pad_by_a_symbol_may_be_a_cut():
    graph = make_fx(lambda x, y: gather(pad(x, (0, 0, 0, y.shape[0]))), tracing_mode="symbolic")(
        torch.ones(4, 6), torch.ones(3)
    ).graph
    (node,) = sent(graph)
    assert source_of(node) is node


def test_what_is_needed_elsewhere_or_rounded_twice_is_where_a_member_comes_from():
    for function in (
        lambda x: (gather(y := cast(x, BF16)), y * 2),
        lambda x: gather(cast(cast(x, BF16), FP32)),
    ):
        graph = traced(function, (torch.ones(4),))
        assert source_of(sent(graph)[0]) is sent(graph)[0]


@pytest.mark.parametrize(("device", "packed"), [("cuda", True), ("cpu", False)])
def test_the_pass_packs_what_the_cluster_makes_worth_it(device: str, packed: bool, monkeypatch):
    monkeypatch.setattr(passes, "members_to_pack", lambda members, *_: range(len(members)))
    monkeypatch.setattr(packs, "_has_triton", lambda: True)
    with FakeTensorMode():
        shards = [torch.empty(4, 4, device=device) for _ in range(3)]
        graph = make_fx(lambda *shards: [gather(x) * 2 for x in shards], tracing_mode="fake")(
            *shards
        ).graph
    names = tuple(op.name for _, op in fx.read(graph, ours).program.starts())
    assignment = Assignment(dict.fromkeys(names, "all"))
    cluster = preset("h100")
    settings = Settings(assignment, Auto(cluster))
    planned = [PortableBucket("all", "gather", tuple(Member(name, 0) for name in names))]
    bucket_and_reorder(graph, settings, ours, planned)
    found = targets(graph)
    assert (PACK in found, UNPACK in found) == (packed, packed)
    assert len(sent(graph)) == (1 if packed else 3)
