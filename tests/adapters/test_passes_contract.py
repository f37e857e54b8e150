"""What the passes take for granted of PyTorch's private parts, one test per function of ours."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.adapters import _torch, _torch_lowering
from inductor_passes.adapters._torch_calls import Call, computed, flops_formula, is_size
from inductor_passes.adapters._torch_fusions import fusions_as_planned
from inductor_passes.machine.stored import RepeatLimits
from simplefsdp import _torch as simplefsdp_torch

_ops, _aten = torch.ops._c10d_functional, torch.ops.aten


def trace(function, *inputs, mode: str = "fake") -> Graph:
    return make_fx(function, tracing_mode=mode)(*inputs).graph


def node_of(graph: Graph, target: object) -> Node:
    found = [n for n in graph.nodes if n.target is target]
    assert found, f"{target} is no longer what make_fx traces; the graph has {list(graph.nodes)}"
    return found[0]


def of_every_sort() -> Graph:
    def function(x):
        full = _ops.wait_tensor(_ops.all_gather_into_tensor(x, 4, "dp"))
        halves = x.split(1)
        x.copy_(halves[0] + torch.rand_like(x))
        return full.t(), x * 2, halves[1]

    return trace(function, torch.ones(2, 3))


def test_is_op():
    graph = of_every_sort()
    ops = {n.target: _torch.is_op(n) for n in graph.nodes if n.op == "call_function"}
    assert ops.pop(operator.getitem) is False
    assert all(ops.values()), f"traced nodes no longer call torch._ops.OpOverload: {ops}"
    assert all(hasattr(op, "_schema") and hasattr(op, "tags") for op in ops if op), (
        "torch._ops.OpOverload lost _schema or tags"
    )


def test_is_collective_start():
    graph = of_every_sort()
    starts = [n for n in graph.nodes if n.op == "call_function" and _torch.is_collective_start(n)]
    assert starts == [node_of(graph, _ops.all_gather_into_tensor.default)], (
        "functional collectives left the namespace _c10d_functional, or OpOverload.namespace moved"
    )
    assert node_of(graph, _torch.WAIT).args == (starts[0],), (
        "wait_tensor no longer takes the start's result as its one argument"
    )


def test_is_wait():
    graph = of_every_sort()
    waits = [n for n in graph.nodes if _torch.is_wait(n)]
    assert waits == [node_of(graph, _torch.WAIT)], "is_wait finds something else, too"
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    named = {name for name in names if name.startswith("_c10d_functional::") and "wait" in name}
    known = {op._schema.name for op in _torch._WAITS}
    assert named == known, "there is another wait, which is counted as a launch"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all_gather_into_tensor_coalesced", ["inputs", "group_size", "group_name"]),
        (
            "reduce_scatter_tensor_coalesced",
            ["inputs", "reduce_op", "group_size", "group_name"],
        ),
        ("all_reduce_coalesced", ["inputs", "reduce_op", "group_name"]),
    ],
)
def test_coalesced_collectives_keep_their_schemas(name, arguments):
    schema = getattr(_ops, name).default._schema
    assert [a.name for a in schema.arguments] == arguments, f"_c10d_functional.{name}: {schema}"
    assert [str(r.type) for r in schema.returns] == ["List[Tensor]"], (
        f"_c10d_functional.{name} no longer returns a list, whose getitems are waited for: {schema}"
    )


def test_is_pure_python():
    graph = trace(lambda x: (x.split(1)[0], torch.sym_max(x.shape[0], 7)), torch.ones(2, 3))
    assert _torch.is_pure_python(node_of(graph, operator.getitem)), (
        "operator.getitem.__module__ is no longer '_operator'"
    )
    graph = Graph()
    x = graph.placeholder("x")
    for function in (operator.add, torch.sym_max, torch.sym_int, max):
        assert _torch.is_pure_python(graph.call_function(function, (x, 2))), (
            f"{function} is no longer taken for a function of numbers: __module__ is "
            f"{function.__module__!r}, and torch.sym_* are {sorted(map(str, _torch._OF_NUMBERS))}"
        )
    assert not _torch.is_pure_python(graph.call_function(_aten.add.Tensor, (x, x)))


def test_is_random():
    tag = torch.Tag.nondeterministic_seeded
    for op in (_aten.rand_like, _aten.bernoulli, _aten.native_dropout, _aten.rand, _aten.randperm):
        assert tag in op.default.tags, f"{op} lost torch.Tag.nondeterministic_seeded"
    graph = of_every_sort()
    drawn = [n.target for n in graph.nodes if _torch.is_random(n)]
    assert drawn == [_aten.rand_like.default], "torch.Tag.nondeterministic_seeded moved"


def test_is_view():
    graph = of_every_sort()
    views = {n.target for n in graph.nodes if _torch.is_view(n)}
    assert views == {_aten.t.default, _aten.split.Tensor}, (
        "a schema's returns[0].alias_info no longer tells a view from a copy and from a write"
    )
    written = _aten.copy_.default._schema.returns[0].alias_info
    assert written.is_write, "the result of aten.copy_ is no longer an alias that is_write"


def test_mutated_arguments():
    graph = of_every_sort()
    copy = node_of(graph, _aten.copy_.default)
    (x,) = [n for n in graph.nodes if n.op == "placeholder"]
    assert list(_torch.mutated_arguments(copy)) == [x], (
        "a schema's arguments[i].alias_info.is_write no longer marks what an op writes"
    )
    assert list(_torch.mutated_arguments(node_of(graph, _aten.mul.Tensor))) == []
    assert list(_torch.mutated_arguments(node_of(graph, operator.getitem))) == []
    listed = Graph()
    a, b = listed.placeholder("a"), listed.placeholder("b")
    foreach = listed.call_function(_aten._foreach_add_.List, ([a, b], [b, a]))
    assert list(_torch.mutated_arguments(foreach)) == [a, b], "alias_info of a list moved"


def test_size_hint():
    shapes = {}

    def function(x):
        shapes["traced"] = x.shape[0]
        shapes["unknown"] = x.nonzero().shape[0]
        return x * 2

    trace(function, torch.ones(6), mode="symbolic")
    assert _torch.size_hint(5) == 5
    tripled = _torch.size_hint(shapes["traced"] * 3)
    assert tripled == 18, "SymInt.node.hint is no longer the size"
    assert str(tripled.formula) == f"3*{shapes['traced']}", "SymInt.node.expr is no formula"
    assert _torch.size_hint(shapes["unknown"]) == 0, "SymInt.node.hint of an unknown size moved"


def test_plain_tensors():
    with torch._subclasses.FakeTensorMode(), torch.device("meta"):
        with _torch.plain_tensors():
            real = torch.ones(2)
        assert type(torch.ones(2)) is not type(real), "unset_fake_temporarily leaves it unset"
    assert type(real) is torch.Tensor and real.device.type == "cpu"
    assert real.tolist() == [1, 1], "unset_fake_temporarily no longer leaves fake tensors alone"


def test_computed():
    graph = of_every_sort()
    gather = node_of(graph, _ops.all_gather_into_tensor.default)
    split = node_of(graph, _aten.split.Tensor)
    for call in (
        Call(gather.target, (gather.args[0], 4, "a group that does not exist"), {}),
        Call(operator.getitem, (split, 1), {}),
    ):
        made = computed(call)
        assert isinstance(made, torch._subclasses.FakeTensor), "FakeTensor.fake_mode moved"
        if call.target is gather.target:
            assert made.shape == gather.meta["val"].shape, "a fake collective looks up its group"


# Inductor's scheduler


@pytest.fixture(scope="module")
def snodes() -> dict[str, list[Any]]:
    """Scheduler nodes of a graph with two coalesced gathers and a reduce, as a pass gets them."""
    from torch._inductor import config
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen: list[Any] = []
    origins: list[Any] = []

    def graph_pass(graph: Graph) -> None:
        for node in graph.nodes:
            node.meta["passes contract"] = node.name

    def scheduler_pass(given: list[Any]) -> list[Any]:
        seen.extend(given)
        # Names and dependencies are gone when the compilation is over.
        starts = [snode for snode in given if _torch.is_scheduled_start(snode)]
        launched = {k: v for snode in starts for k, v in _torch.scheduled_mutations(snode).items()}
        for snode in given:
            reads = _torch.scheduled_reads(snode, launched)
            origins.append((snode, reads, _torch.scheduled_writes(snode)))
        return given

    def function(x, a, b):
        group = dist.group.WORLD.group_name
        full = _ops.all_gather_into_tensor_coalesced([a, b], 4, group)
        full = [_ops.wait_tensor(tensor) for tensor in full]
        part = _ops.reduce_scatter_tensor(torch.mm(x, full[0]), "sum", 4, group)
        return torch.mm(_ops.wait_tensor(part), full[1])

    patches = {
        "post_grad_custom_post_pass": graph_pass,
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [scheduler_pass],
        "fx_graph_cache": False,
    }
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with config.patch(patches):
            torch.compile(function, fullgraph=True)(
                torch.ones(8, 8), torch.ones(2, 8), torch.ones(2, 8)
            )
    finally:
        dist.destroy_process_group()
    assert seen, "Inductor no longer calls config.reorder_for_compute_comm_overlap_passes"
    kinds = (_torch.is_scheduled_start, _torch.is_scheduled_wait, _torch.is_scheduled_item)
    sorts = ("start", "wait", "item")
    found: dict[str, list[Any]] = {"start": [], "wait": [], "item": [], "other": []}
    for snode, *names in origins:
        of = [sort for sort, is_kind in zip(sorts, kinds, strict=True) if is_kind(snode)]
        assert len(of) < 2, f"{snode} is at once {of}"
        found[of[0] if of else "other"].append((snode, *names))
    return found


def test_config_names():
    from torch._inductor import config, scheduler

    for name, default in (
        ("post_grad_custom_post_pass", None),
        ("joint_custom_post_pass", None),
        ("reorder_for_compute_comm_overlap", False),
        ("reorder_for_compute_comm_overlap_passes", ...),
    ):
        values = config.get_config_copy()
        assert name in values, f"torch._inductor.config.{name} is gone"
        assert default is ... or values[name] == default, f"config.{name} is now {values[name]}"
    source = inspect.getsource(scheduler)
    assert "reorder_compute_and_comm_for_overlap(" in source, (
        "the scheduler no longer runs the passes of reorder_for_compute_comm_overlap"
    )


def test_is_scheduled_start(snodes):
    assert len(snodes["start"]) == 2, (
        "torch._inductor.utils.is_collective no longer finds a coalesced gather and a reduce"
    )


def test_is_scheduled_wait(snodes):
    assert len(snodes["wait"]) == 3, "torch._inductor.utils.is_wait no longer finds each wait"


def test_is_scheduled_item(snodes):
    assert len(snodes["item"]) == 2, (
        "the results of a coalesced gather are no longer ir.MultiOutput nodes of their own"
    )
    (gather, _, written), _ = snodes["start"]
    for _, reads, _ in snodes["item"]:
        assert reads and set(reads) <= set(written), (
            f"an ir.MultiOutput no longer reads the list of its start {gather.get_name()}: {reads}"
        )


def test_scheduled_reads(snodes):
    (_, reads_of_gather, _), (_, reads_of_reduce, _) = snodes["start"]
    gathered = {name for _, _, writes in snodes["start"][:1] for name in writes}
    assert reads_of_gather == (), f"a gather of two inputs needs {reads_of_gather}"
    assert not gathered & set(reads_of_reduce), (
        "the chain of collectives is no longer marked by WeakDep.is_fake, and counts as data"
    )
    made = {name for _, _, writes in snodes["other"] for name in writes}
    assert set(reads_of_reduce) <= made and reads_of_reduce, (
        "snode.unmet_dependencies no longer names the matmul that the reduce sends"
    )
    items = {name for _, _, writes in snodes["item"] for name in writes}
    waited = {name for _, reads, _ in snodes["wait"] for name in reads}
    assert items <= waited, "a wait no longer depends on the ir.MultiOutput it waits for"


def test_weak_dependencies_say_that_they_are_fake():
    from torch._inductor import comms
    from torch._inductor.dependencies import WeakDep

    assert "is_fake" in inspect.signature(WeakDep).parameters, "WeakDep.is_fake is gone"
    source = inspect.getsource(comms.decide_global_ordering_of_comms)
    assert "is_fake=True" in source, (
        "decide_global_ordering_of_comms no longer marks its dependencies is_fake: the scheduler "
        "pass would take the old sequence of collectives for data"
    )


def test_scheduled_writes(snodes):
    for sort, found in snodes.items():
        for snode, _, writes in found:
            assert writes, f"snode.get_buffer_names() of the {sort} {snode} is empty"
    every = [name for found in snodes.values() for _, _, writes in found for name in writes]
    assert len(every) == len(set(every)), "two scheduler nodes write a buffer of one name"


def test_lowered_at(snodes):
    places = {
        str(s.get_name()): _torch.lowered_at(s) for found in snodes.values() for s, *_ in found
    }
    assert len(set(places.values())) == len(places), f"snode.min_order is not unique: {places}"
    numbered = sorted(places, key=lambda name: int(name.removeprefix("op")))
    assert sorted(places, key=places.__getitem__) == numbered, (
        f"snode.min_order is no longer the place in the order of the graph: {places}"
    )


def test_origins_of(snodes):
    for snode, *_ in snodes["start"]:
        starts = [n for n in _torch.origins_of(snode) if _torch.is_collective_start(n)]
        assert len(starts) == 1, (
            f"snode.node.origins of a start holds {len(starts)} collectives: the marks of the "
            "bucket cannot be found any more"
        )
        assert starts[0].meta.get("passes contract") == starts[0].name, (
            "snode.node.origins are no longer the nodes that post_grad_custom_post_pass was given"
        )


def sizes_asked_for() -> Graph:
    """Of a tensor's size, which is open."""
    return trace(lambda x: x.new_ones(x.shape[0]) * 2, torch.ones(6), mode="symbolic")


def test_limits_of_repeating():
    """Of Inductor's configuration, whose names have changed."""
    from torch._inductor import config

    found = _torch_lowering.limits_of_repeating(torch.device("cuda"))
    assert found == RepeatLimits(), "Inductor stores other results on a GPU now"
    on_cpu = _torch_lowering.limits_of_repeating(torch.device("cpu"))
    assert on_cpu.reads == found.reads and on_cpu.ops >= found.ops
    with config.patch({"realize_opcount_threshold": 7}):
        assert _torch_lowering.limits_of_repeating(torch.device("cpu")).ops == 7


def test_is_saved():
    """Of the names that AOTAutograd gives to the inputs of a backward and of a forward."""
    from graphs import capture

    with capture() as captured:
        x, w = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
        options = {"executor": "aot_eager", "bucketing": "none"}
        torch.compile(lambda x: ((x @ w).sin() @ w).cos(), backend="simplefsdp", options=options)(
            x
        ).sum().backward()
    inputs = [
        {n.name for n in graph.graph.find_nodes(op="placeholder")}
        for (graph,) in (captured.forward, captured.backward)
    ]
    made = {n.name for (graph,) in (captured.forward,) for n in graph.graph.nodes} - inputs[0]
    for names in inputs:
        saved = {name for name in names if _torch.is_saved(name)}
        assert saved == names & made, "AOTAutograd names its arguments otherwise now"
    assert inputs[1] & made


def test_tags_and_flop_formulas():
    from torch.utils.flop_counter import flop_registry

    tags = torch.Tag.pointwise, torch.Tag.reduction
    assert tags[0] in _aten.add.Tensor.tags and tags[0] in _aten.where.self.tags, (
        "torch.Tag.pointwise left the pointwise operators: the roofline sees no fusion"
    )
    assert tags[1] in _aten.sum.dim_IntList.tags and tags[1] in _aten.amax.default.tags, (
        "torch.Tag.reduction left the reductions: the roofline takes them for kernels"
    )
    assert flops_formula(_aten.mm)((2, 3), (3, 4), out_val=(2, 4)) == 48, (
        "torch.utils.flop_counter.flop_registry's formulas moved, or take no shapes any more"
    )
    given_tensors = _aten._flash_attention_forward
    assert not hasattr(flop_registry[given_tensors], "__wrapped__"), "it takes shapes now"
    shape = (2, 8, 4, 16)
    assert flops_formula(given_tensors)(shape, shape, shape, None, None, 8, 8, 0.0, True, False) > 0
    assert flops_formula(_aten.mul) is None
    (size,) = [n for n in sizes_asked_for().nodes if n.target == _aten.sym_size.int]
    assert is_size(size) and not is_size(node_of(of_every_sort(), _aten.mul.Tensor)), (
        "a traced tensor is no longer asked for its size by aten.sym_size"
    )


# The process groups


def test_ranks_of_group(fake_mesh):
    group = fake_mesh(2, 2, names=("replicate", "shard"), rank=3).get_group("replicate")
    assert _torch.ranks_of_group(group.group_name) == [1, 3], (
        "distributed_c10d._resolve_process_group or get_process_group_ranks changed"
    )
    assert _torch.ranks_of_group("no such group") is None, (
        "distributed_c10d._resolve_process_group raises something else for an unknown name"
    )


def test_distributed_c10d_names(fake_mesh):
    from torch.distributed import distributed_c10d as c10d

    mesh = fake_mesh(2, 2, names=("replicate", "shard"))
    group = mesh.get_group("shard")
    assert hasattr(c10d, "_get_default_store"), "distributed_c10d._get_default_store is gone"
    assert c10d._resolve_process_group(group.group_name) is group, (
        "distributed_c10d._resolve_process_group no longer finds a group by its name"
    )
    assert c10d.get_process_group_ranks(group) == [0, 1]
    assert "use_local_synchronization" in inspect.signature(c10d.new_group).parameters, (
        "distributed_c10d.new_group lost use_local_synchronization: a second group would need "
        "the ranks outside it, too"
    )
    name = simplefsdp_torch.second_group(group.group_name)
    second = c10d._resolve_process_group(name)
    assert second is not group and c10d.get_process_group_ranks(second) == [0, 1]
    assert simplefsdp_torch.second_group(group.group_name) == name  # one, however often


def shared_store_on_ranks():
    store = simplefsdp_torch.shared_store("passes contract")
    me = dist.get_rank()
    count = store.add(f"count/{me}", 1)
    store.set(f"{count}/{me}", f"from {me}")
    found = store.multi_get([f"{count}/{rank}" for rank in range(dist.get_world_size())])
    dist.barrier()
    deleted = store.delete_key(f"{count}/{me}")
    store.add(f"count/{me}", -1)
    return [value.decode() for value in found], deleted


def test_shared_store(pools):
    answers = pools(2).run(shared_store_on_ranks)
    assert answers == [(["from 0", "from 1"], True)] * 2, (
        "the default store lost one of add, set, multi_get and delete_key, or is not shared"
    )


def scheduled(function, inputs: int, pass_of: str, asked: bool = True) -> list[Any]:
    """What Inductor's scheduler gives to the pass of that name, for a function of so many matrices,
    as one of four ranks; ``asked``: by :func:`fusions_as_planned`."""
    from contextlib import nullcontext

    from torch._inductor import config
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: list[Any] = []

    def note(given: list[Any]) -> list[Any]:
        found.extend(given)
        return given

    patches = {pass_of: note, "fx_graph_cache": False}
    if pass_of == _OF_ORDER:
        patches |= {pass_of: [note], "reorder_for_compute_comm_overlap": True}
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with config.patch(patches), fusions_as_planned() if asked else nullcontext():
            torch.compile(function, fullgraph=True)(*torch.ones(inputs, 64, 64))
    finally:
        dist.destroy_process_group()
    return found


_OF_ORDER = "reorder_for_compute_comm_overlap_passes"
_OF_FUSION = "_post_fusion_custom_pass"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_fusions_in_time(asked, needs, scaled):
    """Two sums over the same tensors; the first is sent, as it is or after another loop, before the
    second is there, if that needs a product."""

    def function(x, y, w):
        group = dist.group.WORLD.group_name
        product = torch.mm(x, w)
        first = (x * y).sum(0)
        first = first * product[0] if scaled else first
        sent = _ops.reduce_scatter_tensor(first, "sum", 4, group)
        product = torch.mm(product, w)
        second = (x * y * (product[0] if needs else 2)).sum(0)
        return _ops.wait_tensor(sent), product, second

    given = scheduled(function, 3, _OF_ORDER, asked)
    kernels = [s for s in given if s.is_reduction()]
    assert len(kernels) == (2 if asked and needs else 1), (
        "V.choices.can_fuse is no longer asked, or ancestors have moved"
        if asked
        else "Inductor no longer fuses such sums: fusions_as_planned has nothing to do"
    )


def test_fusions_with_what_is_one_with_others_by_now():
    """``third`` reads ``first``, which is one with ``second``, which needs a product: as one with
    what is sent it would hold the launch back until the product is there."""

    def function(x, y, w):
        first, ours = (x * 2).sum(0), y * 2
        sent = _ops.reduce_scatter_tensor(ours, "sum", 4, dist.group.WORLD.group_name)
        product = torch.mm(w, w)
        second, third = (x * product[0]).sum(0), y * first
        return _ops.wait_tensor(sent), second, third

    order: list[str] = []
    for s in scheduled(function, 3, _OF_ORDER):
        kinds = {_torch.is_scheduled_start: "launch", _torch.is_scheduled_wait: "wait"}
        kind = next((kind for test, kind in kinds.items() if test(s)), None)
        order.append(kind or ("product" if s.is_extern() else "loop"))
    assert order.index("launch") < order.index("product")


@pytest.mark.slow(quick=["False-False", "True-False", "True-True"])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("frees", [False, True])
def test_fusions_that_hold_more(asked, frees):
    """Two loops read the same, two products apart. What the second one makes would be there early;
    unless it is the last to read as much."""

    def function(x, y, w):
        x, y = x @ w, y @ w
        product = torch.mm(torch.mm(x + y, w), w)
        ahead = torch.mm(product, x * y)
        return ahead if frees else (ahead, torch.mm(x, y))

    given = scheduled(function, 3, _OF_FUSION, asked)
    kernels = [len(s.get_nodes()) for s in given if not s.is_extern()]
    assert kernels == ([1, 1] if asked and not frees else [2]), (
        "V.choices.can_fuse is no longer asked, or read_writes have moved"
        if asked
        else "Inductor no longer fuses such loops: fusions_as_planned has less to do"
    )


@pytest.mark.slow(quick=["False"])
@pytest.mark.parametrize("frees", [False, True])
def test_fusions_that_come_later(frees):
    """Two loops read the same, the second a product, too: as one, what the first is the last to
    read would live on."""

    def function(x, y, z, w):
        x, y, z = x @ w, y @ w, z @ w
        ahead = x * y * z
        behind = (x @ w) * x
        return (ahead, behind) if frees else (ahead, behind, y @ z)

    given = scheduled(function, 4, _OF_FUSION)
    kernels = [len(s.get_nodes()) for s in given if not s.is_extern()]
    assert kernels == ([1, 1] if frees else [2]), (
        "V.choices.can_fuse is no longer asked, or read_writes have moved"
    )


@pytest.mark.parametrize("is_stored", [False, True])
def test_store(is_stored):
    """Rows of a table that loops read before and behind products."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import run_and_get_code

    def function(table, i, w):
        rows = torch.ops.aten.embedding(table, i)
        return (torch.mm(torch.mm(rows.sin(), w) * rows, w),)

    inputs = torch.ones(9, 4), torch.zeros(3, dtype=torch.long), torch.ones(4, 4)
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    if is_stored:
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
        _torch.store(node)
    _, (code,) = run_and_get_code(lambda: compile_fx_inner(gm, list(inputs)))
    body = code[code.rindex("def call(") :]
    reads = [line for line in body.splitlines() if "cpp_fused" in line and "table" in line]
    assert len(reads) == (1 if is_stored else 2), (
        "Inductor no longer asks for inductor_realize_to_strides"
        if is_stored
        else "Inductor stores such rows by itself: store has nothing to do"
    )


def test_one_hot_is_compared():
    """A loop to `inductor_passes.adapters.loops`: a number in each row of a constant."""
    from torch._inductor.utils import run_and_get_code

    def function(i):
        return torch.full([8, 16], 0.0).scatter(1, i, -1.0) * 2

    _, (code,) = run_and_get_code(
        torch.compile(function, fullgraph=True), torch.ones(8, 1, dtype=torch.int64)
    )
    assert code.count("= empty_strided") == 1 and "scatter(" not in code, (
        "Inductor writes such rows into zeros now"
    )


@pytest.mark.parametrize("at_once", [False, True])
def test_reuse_at_once(at_once):
    """A small buffer dies, and three kernels later another of its size is needed; the peak was
    before."""
    from contextlib import nullcontext

    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    def function(x, wide, narrow):
        small = (x @ wide) @ wide.T
        other = (small @ x) @ narrow
        return ((other @ narrow.T) @ x) @ narrow

    torch._dynamo.reset()
    lowering = _torch_lowering.reuse_at_once() if at_once else nullcontext()
    with config.patch(fx_graph_cache=False), lowering, torch.no_grad():
        inputs = torch.ones(64, 64), torch.ones(64, 4096), torch.ones(64, 32)
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    assert code.count("# reuse") == (1 if at_once else 3), (
        "AllocateLine.should_reuse_buffer is no longer asked"
        if at_once
        else "Inductor keeps less of what is dead: reuse_at_once may have nothing to do"
    )


def test_code_that_reuses_at_once_is_another_in_the_cache(tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compiled() -> None:
        torch._dynamo.reset()
        torch.compile(torch.sin, fullgraph=True)(torch.ones(7))

    counters.clear()
    compiled()
    with _torch_lowering.reuse_at_once():
        compiled()
    compiled()
    found = counters["inductor"]
    assert (found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]) == (2, 1)


def test_module_path():
    """Of Dynamo's stacks, in every form that they have had."""
    node = Graph().placeholder("x")
    assert _torch.module_path(node) is None
    for path in (
        "L['self'].layers.3.up",
        "L['self']._modules['layers']._modules['3']._modules['up']",
        "L['self'].layers[3].__dict__['_modules']['up']",
    ):
        node.meta = {"nn_module_stack": {"a": ("L['self']", int), "b": (path, int)}}
        assert _torch.module_path(node) == "L.self.layers.3.up"
    node.meta = {"fwd_nn_module_stack": {"a": ("L['model'].layers[3].up", int)}}
    assert _torch.module_path(node) == "L.model.layers.3.up"


def test_stacks_of_modules_reach_the_backward(fake_mesh):
    from graphs import capture

    from simplefsdp import simple_fsdp

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    simple_fsdp(model, fake_mesh(2))
    options = {"executor": "aot_eager", "bucketing": "none"}
    with capture() as captured:
        torch.compile(model, backend="simplefsdp", options=options)(
            torch.ones(2, 4)
        ).sum().backward()
    for (graph,) in (captured.forward, captured.backward):
        matmuls = [n for n in graph.graph.nodes if "mm" in str(n.target)]
        paths = {str(_torch.module_path(n)).rpartition(".")[2] for n in matmuls}
        assert paths == {"0", "1"}, "nn_module_stack or fwd_nn_module_stack has moved"


def test_multiplies_matrices():
    graph = trace(lambda a: ((a @ a) + 1).relu().conj(), torch.ones(3, 3))
    found = [n.name for n in graph.nodes if _torch.multiplies_matrices(n)]
    assert found == ["mm"]
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for target in (fused, torch.ops.higher_order.flex_attention):
        node = Graph().call_function(target)
        node.meta["val"] = (torch.empty(1, 2, 3, 4, dtype=torch.bfloat16, device="meta"),)
        assert _torch.multiplies_matrices(node)
    # Of another library's, such as an index.
    for shape, dtype in (((1, 2, 3), torch.int64), ((2,), torch.float32)):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        assert not _torch.multiplies_matrices(node)


def test_is_lookup_of_seed():
    from torch._inductor import inductor_prims

    graph = trace(lambda s: inductor_prims.lookup_seed(s, 1) + 1, torch.ones(3, dtype=torch.int64))
    found = [_torch.is_lookup_of_seed(n) for n in graph.nodes if n.op == "call_function"]
    assert found == [True, False]


def test_draws_from_seed():
    """Run as it is, it takes no notice of its seed; if that changes, it need not be compiled."""
    from torch._inductor import inductor_prims

    graph = trace(lambda s: inductor_prims.random([2], s, "rand"), torch.tensor(3))
    assert any(_torch.draws_from_seed(n) for n in graph.nodes)
    one, other = (inductor_prims.random([8], torch.tensor(3), "rand") for _ in range(2))
    assert not torch.equal(one, other)


def test_no_autocast():
    with torch.autocast("cpu", torch.bfloat16), _torch.no_autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_has_symbols():
    assert not _torch.has_symbols([torch.ones(2), 3, None])
    graph = trace(lambda x: x + 1, torch.ones(2, 3), mode="symbolic")
    assert any(_torch.has_symbols(n.meta.get("val")) for n in graph.nodes)


def test_compile_region():
    """A graph is compiled by itself: boxed, with the strides that it was traced with."""
    from torch._guards import TracingContext

    graph = make_fx(lambda a, b: ((a @ b).permute(1, 0), (a + 1).relu()), tracing_mode="fake")(
        torch.rand(3, 3), torch.rand(3, 3)
    )
    values = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = [0, 1]
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    wanted = graph(a, b)
    run = _torch_lowering.compile_region(graph, values, is_backward=False)
    args = [a, b]
    made = run(args)
    assert args == [], "compiled code does not empty its list of arguments any more"
    for one, other in zip(made, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)
    assert TracingContext.try_get() is None


def test_report_output_strides():
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(None)):
        context = TracingContext.get()
        context.output_strides = []
        _torch.report_output_strides([torch.ones(2, 3).t(), None, 3])
        assert context.output_strides == [(1, 3), None, None]


def test_has_wide_matmul():
    from torch._inductor import config
    from torch._inductor.kernel import bmm, mm  # they register what they lower
    from torch._inductor.lowering import lowerings

    device, here = torch.device("cuda"), torch.version.hip is None
    assert _torch.has_wide_matmul(device) is here
    assert not _torch.has_wide_matmul(torch.device("cpu"))
    for backends, expected in (("TRITON, CPP", False), ("triton, aten", here)):
        with config.patch({"max_autotune_gemm_backends": backends}):
            assert _torch.has_wide_matmul(device) is expected
    narrow = torch.ones(2, 2, 2, dtype=torch.bfloat16)
    ops = {_aten.mm.dtype: (mm.tuned_mm, narrow[0]), _aten.bmm.dtype: (bmm.tuned_bmm, narrow)}
    for op, (lowering, operand) in ops.items():
        names = [argument.name for argument in op._schema.arguments]
        assert names == ["self", "mat2", "out_dtype"], f"{op} takes {names} now"
        assert op in lowerings, f"Inductor no longer lowers {op}"
        taken = inspect.signature(inspect.unwrap(lowering)).parameters
        assert "out_dtype" in taken, f"{op} is lowered without out_dtype"
        with pytest.raises(NotImplementedError):
            op(operand, operand, torch.float32)  # else the CPU need not round either
