"""FX graph <-> Program: what is read, that writes are its inverse, and that the numbers stay."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from fx_graphs import RANKS, Recorder, copied, same_numbers
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import Zoo, batch, loss_of

import simplefsdp.compiler.compilation
import simplefsdp.provenance
from inductor_passes import passes
from inductor_passes.adapters import _torch, fx
from inductor_passes.adapters.layouts import BucketLayout, write_buckets
from inductor_passes.ir.buckets import Assignment, plan_buckets
from inductor_passes.ir.program import Program, ProgramError
from inductor_passes.ir.text import parse
from inductor_passes.ir.verify import verify_unchanged
from inductor_passes.passes import PassError, bucket_and_reorder
from inductor_passes.rehearsal import Settings
from inductor_passes.transform.merge import in_one_piece, merge
from simplefsdp import simple_fsdp

_ops, _aten = torch.ops._c10d_functional, torch.ops.aten
WIDTH = 8


def gather(x, group="dp"):
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x, RANKS, group))


def reduce(x, group="dp"):
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", RANKS, group))


def all_reduce(x, group):
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", group))


def forward(x, *shards):
    for weight, bias in zip(shards[::2], shards[1::2], strict=True):
        x = all_reduce(torch.addmm(gather(bias), x, gather(weight).t()), "tp").tanh()
    return x


def backward(grad, x, *shards):
    reduced = []
    for weight in shards[::2][::-1]:
        reduced += [reduce(grad.t() @ x), all_reduce(reduce(grad.sum(0)), "copies")]
        grad = all_reduce(grad @ gather(weight), "tp").cos()
    return grad, *[shard / RANKS for shard in reduced]


def inputs_of(function, layers: int = 3, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, WIDTH)] * (1 if function is forward else 2)
    shapes += [(WIDTH // RANKS, WIDTH), (WIDTH // RANKS,)] * layers
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trace(function, *inputs, mode: str = "fake") -> Graph:
    """The graph of ``function`` as Inductor has it after autograd; its module owns it."""
    return make_fx(function, tracing_mode=mode)(*inputs or inputs_of(function)).graph


def ours(node: Node) -> str | None:
    return None if "tp" in node.args else node.name


def by_twos(program: Program) -> Assignment:
    """A bucket per two gathers, and per two reduces, in their sequence."""
    counts: dict[str, int] = {}
    label_of = {}
    for _, op in program.starts():
        if op.collective.fqns:
            counts[op.collective.kind] = at = counts.get(op.collective.kind, -1) + 1
            label_of[op.collective.fqns[0]] = f"bucket{at // 2}"
    return Assignment(label_of)


_zoo: list[Graph] = []


@pytest.fixture(params=["forward", "backward", "zoo forward", "zoo backward"])
def graph(request, fake_mesh, monkeypatch) -> tuple[Graph, fx.FqnOf]:
    """Two graphs written here, and the two of a model with every kind of parameter."""
    if not request.param.startswith("zoo"):
        return trace({"forward": forward, "backward": backward}[request.param]), ours
    if not _zoo:
        recorder = Recorder(monkeypatch)
        model = simple_fsdp(Zoo(), fake_mesh(RANKS))
        options = {"executor": "aot_eager", "bucketing": "none", "reorder": True}
        loss_of(
            torch.compile(model, backend="simplefsdp", options=options), *batch(0, 1)
        ).backward()
        _zoo.extend(recorder.before)
    return copied(_zoo[request.param == "zoo backward"]), simplefsdp.provenance.carried_fqn


def read(graph: Graph, fqn_of: fx.FqnOf = ours) -> Program:
    return fx.read(graph, fqn_of).program


def ops_of(program: Program) -> dict[str, Any]:
    return {op.name: op for op in program.ops}


# What is read


def test_a_gather_into_a_buffer_that_it_is_given_has_no_memory_of_its_own():
    """As PyTorch's own bucketing passes write them."""

    def function(x):
        out = torch.empty(RANKS * len(x), WIDTH)
        part = out[: len(x)]
        part.copy_(x)
        return _ops.wait_tensor(_ops.all_gather_into_tensor_out(part, RANKS, "dp", out=out)) * 2

    program = fx.read(trace(function, torch.ones(4, WIDTH)), ours).program
    ((_, start),) = program.starts()
    empty = next(op for op in program.ops if op.name.startswith("empty"))
    assert start.collective.kind == "gather"
    assert start.collective.nbytes == RANKS * 4 * WIDTH * 4
    assert {program.buffers[name].storage for name in start.writes} == set(empty.writes)


def test_kinds_storages_and_residents():
    def function(shard, x):
        full = gather(shard * 2)
        transposed = full.t()
        halves = x.split(4, 1)
        return transposed.relu(), halves[1] * 2, full[0]

    program = read(trace(function, torch.ones(2, WIDTH), torch.ones(5, WIDTH)))
    kinds = [op.kind for op in program.ops]
    assert kinds == [
        *("compute", "start", "wait"),
        *("view", "view", "view", "view"),  # t, split, and its items
        *("compute", "compute", "view"),
    ]
    (at, start), *_ = program.starts()
    c = start.collective
    assert (c.kind, c.group, c.ranks, c.dtype, c.reduce_op) == ("gather", "dp", 4, "float32", "")
    assert c.nbytes == 4 * WIDTH * WIDTH and c.fqns == (start.name,)
    (wait,) = program.waits_of[at]
    transposed = program.ops[wait + 1]
    # A wait and the views behind it are the memory that the start fills.
    assert {program.buffers[n].storage for n in transposed.writes} == {start.writes[0]}
    assert (
        program.buffers["getitem"].storage == program.buffers["split"].storage == program.inputs[1]
    )
    assert program.resident == {program.inputs[0]}  # seen through the multiplication
    assert [program.buffers[n].nbytes for n in program.inputs] == [4 * 16, 4 * 40]


def test_every_collective_and_its_size():
    def function(x):
        full, part = gather(x), reduce(x)
        total, other = all_reduce(x.bfloat16(), "copies"), gather(x, "tp")
        return full, part, total, other

    program = read(trace(function, torch.ones(WIDTH, 2)))
    found = [op.collective for _, op in program.starts()]
    assert [(c.kind, c.group, c.ranks, c.nbytes, c.dtype, c.reduce_op) for c in found] == [
        ("gather", "dp", 4, 4 * 64, "float32", ""),
        ("reduce", "dp", 4, 64, "float32", "sum"),
        ("all_reduce", "copies", 0, 32, "bfloat16", "sum"),
        ("other", "tp", 4, 4 * 64, "float32", ""),
    ]
    assert [bool(c.fqns) for c in found] == [True, True, True, False]


def test_a_coalesced_start_owns_its_items():
    def function(a, b):
        full = _ops.all_gather_into_tensor_coalesced([a, b], RANKS, "dp")
        return [_ops.wait_tensor(tensor) for tensor in full]

    graph = trace(function, torch.ones(2, 3), torch.ones(5))
    reading = fx.read(graph, ours)
    start, *waits = reading.program.ops
    assert [op.kind for op in reading.program.ops] == ["start", "wait", "wait"]
    assert start.writes == ("getitem", "getitem_1") and start.collective.nbytes == 4 * (24 + 20)
    assert [n.name for n in reading.nodes[start.name]] == [start.name, "getitem", "getitem_1"]
    assert [wait.reads for wait in waits] == [("getitem",), ("getitem_1",)]


def test_writes_in_place_keep_their_order():
    def function(x, y):
        before = x + 1
        x.copy_(y)
        return before, x * 2

    program = read(trace(function, torch.ones(3), torch.ones(3)))
    add, copy, mul = program.ops
    assert copy.kind == "compute" and program.inputs[0] in copy.writes
    for order in ([copy, add, mul], [add, mul, copy]):
        with pytest.raises(ProgramError, match="which it needs"):
            program.reorder([op.name for op in order])


def test_random_ops_and_unknown_calls_keep_their_order():
    graph = trace(lambda x: (torch.rand_like(x), x.sin(), torch.bernoulli(x)), torch.ones(3))
    rand, sin, bernoulli = read(graph).ops
    program = read(graph)
    program.reorder([sin.name, rand.name, bernoulli.name])
    with pytest.raises(ProgramError, match="bernoulli is placed before rand_like"):
        program.reorder([bernoulli.name, sin.name, rand.name])

    x = next(iter(graph.nodes))
    with graph.inserting_after(x):
        calls = [graph.call_function(lambda x: None, (x,)) for _ in range(2)]
    for call in calls:
        call.meta["val"] = None
    program = read(graph)
    names = [op.name for op in program.ops]
    assert all(program.inputs[0] in ops_of(program)[call.name].writes for call in calls)
    with pytest.raises(ProgramError, match="which it needs"):
        program.reorder([names[1], names[0], *names[2:]])


def test_symbolic_sizes_count_as_they_were_traced():
    def function(shard, x):
        rows = max(x.shape[0], 2)
        return gather(shard) @ x.new_ones(WIDTH, rows), x.view(-1)

    program = read(trace(function, torch.ones(2, WIDTH), torch.ones(6, 3), mode="symbolic"))
    assert {"compute", "view", "start", "wait"} == {op.kind for op in program.ops}
    assert program.buffers["view"].nbytes == 4 * 18
    sizes = [op for op in program.ops if op.name.startswith("sym_size")]
    assert sizes and all(program.buffers[op.name].nbytes == 0 for op in sizes)
    assert next(program.starts())[1].collective.nbytes == 4 * 64

    # nobody knows this size before it runs
    program = read(trace(lambda x: x.nonzero() + 1, torch.ones(3), mode="symbolic"))
    assert program.buffers["add"].nbytes == 0


@pytest.mark.parametrize("use", ["dropped", "unwaited", "waited twice"])
def test_a_start_that_nobody_waits_for_once_is_left_alone(use):
    graph = trace(lambda x, y: (gather(x), gather(y), y * 2), torch.ones(2, 3), torch.ones(2, 3))
    start = next(n for n in graph.nodes if _torch.is_collective_start(n))
    (wait,) = start.users
    if use == "waited twice":
        with graph.inserting_after(wait):
            again = graph.call_function(_torch.WAIT, (start,))
        again.meta["val"] = wait.meta["val"]
        next(n for n in graph.nodes if n.op == "output").args = ((again, wait),)
    else:
        wait.replace_all_uses_with(start if use == "unwaited" else start.args[0])
        graph.erase_node(wait)
    program = read(graph)
    op = ops_of(program)[start.name]
    assert op.kind == "compute" and "effects" in op.writes
    before = {n: n.args for n in graph.nodes if _torch.is_collective_start(n)}
    bucket_and_reorder(graph, Settings(Assignment({n.name: "one" for n in before})), ours)
    assert {n: n.args for n in graph.nodes if _torch.is_collective_start(n)} == before


def test_use_before_the_wait_is_an_error():
    graph = trace(functools.partial(gather, group="dp"), torch.ones(2, 3))
    start = next(n for n in graph.nodes if _torch.is_collective_start(n))
    (wait,) = start.users
    with graph.inserting_after(wait):
        graph.call_function(operator.getitem, (start, 0))
    assert ops_of(read(graph))[start.name].kind == "compute"  # used otherwise: not to be moved
    settings = Settings(Assignment({}))
    graph.output_node().prepend(start)  # and now after its wait
    with pytest.raises(PassError, match=f"bucket_and_reorder: .*{start.name}"):
        bucket_and_reorder(graph, settings, ours)


# What is written


def legal_order(program: Program, seed: int) -> list[str]:
    """A random order in which every op comes after what it needs."""
    rng = random.Random(seed)
    left = {i: set(before) for i, before in enumerate(program.predecessors)}
    order = []
    while left:
        chosen = rng.choice([i for i, needs in left.items() if not needs & left.keys()])
        del left[chosen]
        order.append(program.ops[chosen].name)
    return order


@pytest.mark.parametrize("seed", range(3))
def test_a_written_order_reads_as_the_reordered_program(graph, seed):
    graph, fqn_of = graph
    before, reading = copied(graph), fx.read(graph, fqn_of)
    order = legal_order(reading.program, seed)
    fx.write_order(graph, reading, order)
    graph.lint()
    assert read(graph, fqn_of) == reading.program.reorder(order)
    assert same_numbers(before, graph)


def plan(graph: Graph, fqn_of: fx.FqnOf):
    reading = fx.read(graph, fqn_of)
    buckets = plan_buckets(reading.program, by_twos(reading.program))
    assert any(len(bucket.starts) > 1 for bucket in buckets)
    return reading, buckets, merge(reading.program, buckets)


def renamed(program: Program, ops: Mapping[str, str], buffers: Mapping[str, str]) -> Program:
    """``program`` with other names for some ops and some (result) buffers."""

    def new(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(buffers.get(name, name) for name in names)

    return replace(
        program,
        ops=tuple(
            replace(op, name=ops.get(op.name, op.name), reads=new(op.reads), writes=new(op.writes))
            for op in program.ops
        ),
        buffers={
            b.name: b
            for old in program.buffers.values()
            for b in [replace(old, name=new([old.name])[0], storage=new([old.storage])[0])]
        },
        outputs=new(program.outputs),
    )


def test_coalesced_buckets_read_as_the_merged_program(graph):
    graph, fqn_of = graph
    before = copied(graph)
    reading, buckets, merged = plan(graph, fqn_of)
    write_buckets(graph, reading, merged, buckets, "coalesced")
    graph.lint()
    after = read(graph, fqn_of)
    pairs = [(was, now) for (_, was), (_, now) in zip(merged.starts(), after.starts(), strict=True)]
    ops = {was.name: now.name for was, now in pairs}
    buffers = dict(n for was, now in pairs for n in zip(was.writes, now.writes, strict=True))
    # Waits of a bucket stand together, where it is used.
    assert after == renamed(merged, ops, buffers).reorder([op.name for op in after.ops])
    assert same_numbers(before, graph)


def test_flat_buckets_carry_the_same_bytes(graph):
    graph, fqn_of = graph
    before = copied(graph)
    reading, buckets, merged = plan(graph, fqn_of)
    write_buckets(graph, reading, merged, buckets, "flat")
    graph.lint()
    after = read(graph, fqn_of)
    verify_unchanged(reading.program, after)
    sent = [op.collective for _, op in in_one_piece(merged).starts()]
    assert [op.collective for _, op in after.starts()] == sent
    assert all(len(op.writes) == 1 for _, op in after.starts())
    assert same_numbers(before, graph)


@pytest.mark.parametrize("layout", get_args(BucketLayout))
@pytest.mark.parametrize("merges", [True, False], ids=["merge", "move"])
def test_the_whole_pass_keeps_the_numbers(graph, layout, merges):
    graph, fqn_of = graph
    before = copied(graph)
    was = read(graph, fqn_of)
    settings = Settings(by_twos(was), merge=merges, layout=layout)
    bucket_and_reorder(graph, settings, fqn_of)
    now = read(graph, fqn_of)
    launches = [len(list(program.starts())) for program in (was, now)]
    assert launches[0] > launches[1] if merges else launches[0] == launches[1]
    assert same_numbers(before, graph)


@pytest.mark.parametrize("function", [forward, backward])
@pytest.mark.parametrize("layout", get_args(BucketLayout))
def test_collectives_of_tensor_parallelism_stay(function, layout):
    graph = trace(function)
    theirs = [n for n in graph.nodes if _torch.is_collective_start(n) and ours(n) is None]
    assert len(theirs) == 3
    everything = Assignment({n.name: "one" for n in graph.nodes})
    bucket_and_reorder(graph, Settings(everything, layout=layout), ours)
    assert [n for n in graph.nodes if n in theirs] == theirs  # the same nodes, in their order
    assert all(n.target is _ops.all_reduce.default for n in theirs)


def test_independent_collectives_of_others_keep_their_order():
    """The bucket is launched after the cast of its last member, and `other` does not need it."""

    def function(x, weight, bias):
        first = all_reduce(x @ gather(weight), "tp")
        other = all_reduce(x.sum(0), "tp")
        return first + gather(bias.float()), other

    shards = torch.ones(2, WIDTH), torch.ones(2, dtype=torch.bfloat16)
    graph = trace(function, torch.ones(5, WIDTH), *shards)
    before = copied(graph)
    theirs = [n for n in graph.nodes if _torch.is_collective_start(n) and ours(n) is None]
    bucket_and_reorder(graph, Settings(Assignment({n.name: "one" for n in graph.nodes})), ours)
    assert [n for n in graph.nodes if n in theirs] == theirs
    assert same_numbers(before, graph)


# What is refused

BEFORE = """
resident p: 16
input x: 64
start a(p) -> fa: 64 | gather group=dp ranks=4 nbytes=64 dtype=f32 fqns=a
wait wa(fa) -> ga: 64 @fa
start t(x) -> ft: 64 | other group=tp ranks=2 nbytes=64 dtype=f32
wait wt(ft) -> gt: 64 @ft
start u(x) -> fu: 64 | other group=tp ranks=2 nbytes=64 dtype=f32
wait wu(fu) -> gu: 64 @fu
compute c(ga, gt, gu) -> y: 64
output y
output gu
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nbytes=64 dtype=f32 fqns", "nbytes=60 dtype=f32 fqns", "bytes per kind, group.*64.*60"),
        ("nbytes=64 dtype=f32 fqns=a", "nbytes=64 dtype=f32 fqns=b", "parameters per kind.*'a'"),
        ("fqns=a", "fqns=a, a", "parameters per kind"),
        ("group=dp", "group=rep", "bytes per kind, group"),
        ("gather group=dp", "all_reduce group=dp", "bytes per kind"),
        ("start t(x)", "start v(x)", "sequence of other collectives.*'t', 'u'.*'v', 'u'"),
        ("input x: 64\n", "input x: 64\ninput z: 8\n", "inputs: .*'z'"),
        ("output gu\n", "", "number of outputs: was 2, became 1"),
    ],
)
def test_verify_refuses(old, new, message):
    before, after = parse(BEFORE), parse(BEFORE.replace(old, new))
    verify_unchanged(before, before)
    with pytest.raises(ProgramError, match=message):
        verify_unchanged(before, after)


def test_verify_allows_constants_to_change_places():
    """A graph lists a constant where it is first used, which a new order changes."""
    declared = "input c: 8\nresident d: 4\n"
    before, after = parse(declared + BEFORE), parse(BEFORE + "resident d: 4\ninput c: 8\n")
    assert before.inputs != after.inputs
    verify_unchanged(before, after)


def test_verify_refuses_another_order_of_other_collectives():
    before = parse(BEFORE)
    ops = before.ops
    swapped = replace(before, ops=(*ops[:2], *ops[4:6], *ops[2:4], *ops[6:])).verify()
    with pytest.raises(ProgramError, match="sequence of other collectives"):
        verify_unchanged(before, swapped)


def losing_a_bucket(graph, *how):
    write_buckets(graph, *how)
    start = next(n for n in graph.nodes if _torch.is_collective_start(n))
    start.meta.clear()  # with its mark: no longer ours
    start.meta["val"] = torch.empty(1)


def failing_half_way(graph, *how):
    write_buckets(graph, *how)
    raise RuntimeError("all_gather_7: out of luck")


FAILURES: dict[Callable[..., None], str] = {
    losing_a_bucket: "bucket_and_reorder: bytes per kind",
    failing_half_way: "bucket_and_reorder: all_gather_7: out of luck",
}


@pytest.mark.parametrize(("failure", "message"), FAILURES.items())
def test_a_failing_pass_says_which(monkeypatch, failure, message):
    monkeypatch.setattr(passes, "write_buckets", failure)
    graph = trace(forward)
    with pytest.raises(PassError, match=message):
        bucket_and_reorder(graph, Settings(by_twos(read(graph))), ours)
