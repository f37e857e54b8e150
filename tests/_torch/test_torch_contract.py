"""The contract with PyTorch's private parts: when a release moves one, the test here says which."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.fx.traceback as fx_traceback
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from simplefsdp import _torch, simple_fsdp
from simplefsdp._torch import backends, checkpoints, dtensor_ops, tensors, trace_once
from simplefsdp.checkpoints.metadata import metadata_of, read_metadata
from simplefsdp.frontend import reading, recurrent
from simplefsdp.rank_guard import RankMismatchError


def dynamo_graph(function, *args):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return graphs[0]


def parameters_of(function):
    return set(inspect.signature(function).parameters)


def test_functional_collectives_keep_their_schemas():
    ops = torch.ops._c10d_functional

    def names(op):
        return [argument.name for argument in op.default._schema.arguments]

    assert names(ops.all_gather_into_tensor) == ["input", "group_size", "group_name"]
    scatter = ["input", "reduce_op", "group_size", "group_name"]
    assert names(ops.reduce_scatter_tensor) == scatter
    assert names(ops.all_reduce) == ["input", "reduce_op", "group_name"]
    assert names(ops.wait_tensor) == ["tensor"]


def test_annotate_marks_forward_and_backward_nodes():
    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            with _torch.annotate_backward({"probe_backward": 2}):
                return grad.cos()

    @torch.compiler.allow_in_graph
    def marked(x):
        with fx_traceback.annotate({"probe_forward": 1}):
            return Mark.apply(x)

    def marked_twice(x):
        return marked(x) * 2

    seen = {}

    def observe(gm, is_backward):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                seen[node.target] = dict(node.meta.get("custom") or {})

    gm = dynamo_graph(marked_twice, torch.ones(2, requires_grad=True))
    x = torch.ones(2, requires_grad=True)
    compiled = _torch.compile_with_aot_eager(
        gm, [x], observe=observe, joint_pass=lambda graph: None, graph_pass=None
    )
    compiled(x)[0].sum().backward()
    assert seen[torch.ops.aten.sin.default]["probe_forward"] == 1
    assert seen[torch.ops.aten.cos.default]["probe_backward"] == 2


def test_dynamo_names_checkpointed_regions():
    layer = nn.Linear(2, 2)
    gm = dynamo_graph(lambda x: checkpoint(layer, x, use_reentrant=False), torch.ones(2, 2))
    (region,) = [n for n in gm.graph.nodes if _torch.is_checkpoint_region(n)]
    body = getattr(gm, str(region.args[0].target))
    assert isinstance(body, torch.fx.GraphModule)  # its first argument names the body
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == len(region.args) - 1  # the others are the body's inputs


def test_dynamo_says_why_a_graph_ended():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    cut = _torch.graph_break_of(dynamo_graph(broken, torch.ones(2)))
    assert cut is not None
    assert cut.reason
    assert cut.stack[-1].line == "torch._dynamo.graph_break()"
    assert _torch.graph_break_of(dynamo_graph(lambda x: x + 1, torch.ones(2))) is None


@pytest.mark.parametrize("as_it_is", [False, True])
def test_dynamo_leaves_a_function_alone_that_is_to_run_as_it_is(as_it_is):
    """Of a frame that it cannot take it compiles what the frame calls, but not this one."""

    def called(x):
        return traced(x) + 1

    def traced(x):
        return x.sin()

    def in_a_loop(x):
        for _ in range(2):
            x = called(x)
            torch._dynamo.graph_break()
        return x

    def graphs(function) -> list[str]:
        torch._dynamo.reset()
        found = []

        def backend(gm, inputs):
            found.append(gm.code)
            return gm

        torch.compile(function, backend=backend)(torch.ones(2))
        return found

    _torch.with_own_code(called, "called")  # one of them changes what Dynamo does with it
    if as_it_is:
        _torch.run_as_it_is(called)
    assert len(graphs(in_a_loop)) == (0 if as_it_is else 1)
    (code,) = graphs(lambda x: called(x) * 2)
    assert "sin" in code


@pytest.mark.parametrize("kind", [ValueError, TypeError, RankMismatchError])
def test_dynamo_leaves_some_errors_alone(kind):
    def backend(gm, inputs):
        raise _torch.left_alone_by_dynamo(kind("as it is"), sys._getframe())

    with pytest.raises(kind) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert str(caught.value) == "as it is"
    assert type(caught.value).__name__ == kind.__name__


def test_dynamo_compiles_what_is_behind_a_break_while_the_function_runs():
    def called(x):
        x = inner(x)
        return x.sin()

    def inner(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    found = []

    def backend(gm, inputs):
        found.append((_torch.place_called(), _torch.place_being_compiled()))
        return gm

    torch.compile(called, backend=backend)(torch.ones(2))
    # Nothing of `called` before the break makes a graph.
    outer, middle = called.__code__.co_firstlineno, inner.__code__.co_firstlineno
    assert [(place.line, place.name) for place, _ in found] == [(outer, "called")] * 3
    place, being_compiled = found[0]
    assert being_compiled.line == middle and place.file == __file__
    found.clear()
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    ((place, being_compiled),) = found
    assert place is None and being_compiled.name == "<lambda>"


def test_dynamo_names_inputs_and_modules():
    gm = dynamo_graph(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2))
    names = [_torch.input_name(n) for n in gm.graph.nodes if n.op == "placeholder"]
    assert "0.weight" in names
    paths = [_torch.module_path(n) for n in gm.graph.nodes]
    assert any(path and path.endswith("(Linear)") for path in paths)
    weight = next(n for n in gm.graph.nodes if _torch.input_name(n) == "0.weight")
    assert isinstance(weight.meta["example_value"], nn.Parameter)


def test_dynamo_numbers_code():
    found = []

    def backend(gm, inputs):
        found.append(_torch.code_number())
        return gm

    torch._dynamo.reset()
    one, other = (
        torch.compile(f, backend=backend, dynamic=False) for f in (lambda x: x + 1, lambda x: x + 2)
    )
    for function, rows in ((one, 3), (other, 3), (one, 4)):
        function(torch.ones(rows))
    assert len(found) == 3 and found[0] == found[2] != found[1]
    assert _torch.code_number() is None


def test_the_partitioner_obeys_recompute_tags():
    from torch._functorch import partitioners

    assert parameters_of(partitioners.min_cut_rematerialization_partition) >= {"num_fwd_outputs"}
    source = inspect.getsource(partitioners)
    assert 'meta["recompute"]' in source or 'meta.get("recompute"' in source
    assert "ac_graph_id" in source
    assert {"MUST_SAVE", "MUST_RECOMPUTE"} <= set(CheckpointPolicy.__members__)


def test_inductor_takes_our_pass_and_inner_compile():
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    assert "joint_custom_post_pass" in inductor_config.get_config_copy()
    assert "enable_autograd_cache" in functorch_config.get_config_copy()
    assert parameters_of(compile_fx) >= {"inner_compile", "config_patches"}
    assert set(CustomGraphPass.__abstractmethods__) == {"__call__", "uuid"}


def test_random_cpu_ops_are_tagged_as_such():
    # `recompute.save_cpu_random_ops` looks for this tag
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.native_dropout.default.tags


def test_dispatch_mode_sees_dtensors_before_they_are_taken_apart(fake_mesh):
    class Spy(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.normal_.default:
                seen.append(args[0])
                return args[0]
            return func(*args, **(kwargs or {}))

    seen: list[torch.Tensor] = []
    param = nn.Parameter(distribute_tensor(torch.ones(4), fake_mesh(2)))
    with torch.no_grad(), Spy():
        nn.init.normal_(param)
    assert seen[0] is param


def test_a_mesh_can_be_joined_from_groups(fake_mesh):
    mesh = fake_mesh(2, 2, names=("dp", "tp"))
    groups = [mesh.get_group("tp"), mesh.get_group("dp")]
    ranks = torch.tensor([[0, 2], [1, 3]])
    joined = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("tp", "dp"))
    assert joined.get_group("dp") is mesh.get_group("dp")
    assert list(joined.get_coordinate()) == [0, 0]
    assert isinstance(mesh.get_group("tp").group_name, str)
    assert "cpu:fake" in dist.get_backend_config(mesh.get_group("tp"))
    assert isinstance(distribute_tensor(torch.ones(4), mesh["dp"], src_data_rank=None), DTensor)


def test_inductor_keeps_the_order_of_collectives():
    """Uneven shards give ranks different buffer sizes, and Inductor reorders by size: that it may
    not reorder collectives is what keeps the ranks in step."""
    from torch._inductor import comms, scheduler

    assert "comms.decide_global_ordering_of_comms(" in inspect.getsource(scheduler.Scheduler)
    assert "WeakDep(" in inspect.getsource(comms.decide_global_ordering_of_comms)


def test_what_torch_does_to_collectives_by_default():
    """All that could move or merge them after our passes, on by default, is known and turned off.

    What is on and not turned off serves passes that are off.
    """
    from torch._inductor import comms, config, scheduler

    family, known = "aten_distributed_optimizations.", config.get_config_copy()
    on = {name.removeprefix(family) for name, value in known.items() if value is True}
    on = {name for name in on if family + name in known}
    simple = {"enable_simple_overlap"} if torch.__version__ >= "2.14" else set()
    assert on & {"enable_simple_overlap"} == simple
    serve = {
        "bucket_exposed_first",  # in 2.11
        "enable_fusion_regions",
        "pre_bucketing_fsdp_collectives",
        "prioritize_bucketing_during_scheduling",
        "spmd_check",
    }
    assert on - serve == simple, "torch has another pass of collectives that is on by default"
    assert {family + name for name in simple} <= backends._ORDER_STAYS.keys()
    if simple:
        assert "comms.simple_overlap(" in inspect.getsource(scheduler)
        assert callable(comms.simple_overlap)
    for name in ("all_gathers", "reduce_scatters", "all_reduces"):
        assert known.get(f"bucket_{name}_fx", "none") == "none"
    for name in ("dedup_reduce_scatters", "_micro_pipeline_tp", "_fuse_ddp_communication"):
        assert not known.get(name), f"config.{name} is now {known[name]}"


def test_a_backward_graph_can_be_had_without_running_the_forward():
    """``graphs_of``: the backward is lowered at once, and no generator's state is stashed."""
    from torch._functorch import config, partitioners

    assert config.force_non_lazy_backward_lowering is False
    source = inspect.getsource(partitioners.min_cut_rematerialization_partition)
    assert "has_recomputable_rng_ops(" in source


@pytest.mark.skipif(torch.__version__ < "2.13", reason="inspect says what older ones lack")
def test_torchs_bucketing_passes_take_what_inspect_tells_them():
    """``simplefsdp/inspection/torch_passes.py``: which passes, with what, and what is replaced."""
    from torch._inductor import config
    from torch._inductor.fx_passes import overlap_scheduling
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    manual = {"module_bucket_plans", "insert_overlap_deps", "module_stack_fn"}
    assert parameters_of(manual_overlap_bucketing) >= manual
    assert parameters_of(overlap_scheduling.schedule_overlap_bucketing) >= {
        "collective_bucketing",
        "insert_overlap_deps",
        "custom_runtime_estimation",
        "compute_estimator",
        "pre_bucketing_fsdp_collectives_bucket_cap_mb",
    }
    # The GPU is asked through this name, of a node and nothing else.
    probe = overlap_scheduling.estimate_roofline_runtime_ms
    assert parameters_of(probe) == {"node"}
    assert "estimate_roofline_runtime_ms(" in inspect.getsource(overlap_scheduling.OverlapScheduler)
    names = {f"pre_bucketing_fsdp_collectives_{end}_bucket_cap_mb" for end in ("min", "max")}
    assert all(hasattr(config.aten_distributed_optimizations, name) for name in names)


def test_what_is_fake_has_no_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert _torch.has_no_data(torch.ones(1))
    assert _torch.has_no_data(torch.ones(1, device="meta"))
    assert not _torch.has_no_data(torch.ones(1))


def test_fake_tensors_can_be_made_again_on_other_storages():
    """``deepen`` gives copies of a layer values of their own."""
    with FakeTensorMode():
        whole = torch.empty(4, 6, dtype=torch.bfloat16)
        view = whole[1:].t()
    assert _torch.storage_of(whole) == _torch.storage_of(view) is not None
    assert _torch.storage_of(3) is None and _torch.storage_of(torch.empty(2)) is None
    again = _torch.fake_again(whole, None)
    part = _torch.fake_again(view, again)
    assert _torch.storage_of(again) == _torch.storage_of(part) != _torch.storage_of(whole)
    for new, old in ((again, whole), (part, view)):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert new.device == old.device and new.storage_offset() == old.storage_offset()


def test_rnn_keeps_a_second_list_of_its_parameters():
    """recurrent.py: what of nn.RNNBase reads or makes that list."""
    layer = nn.LSTM(2, 2)
    assert [id(w) for w in layer._flat_weights] == [id(p) for p in layer.parameters()]
    assert layer._flat_weights_names == [name for name, _ in layer.named_parameters()]
    for name in recurrent.MEMBERS:
        assert hasattr(nn.RNNBase, name) or name == "_flat_weights", name
    assert "_flat_weights" in layer.__dict__ and "_flat_weight_refs" in layer.__dict__


def test_to_empty_is_told_by_the_function_that_apply_gets(monkeypatch):
    seen = []
    monkeypatch.setattr(nn.Linear, "_apply", lambda self, fn, *a, **k: seen.append(fn) or self)
    nn.Linear(2, 2).to_empty(device="cpu")
    nn.Linear(2, 2).to(torch.float64)
    assert [_torch.is_to_empty(fn) for fn in seen] == [True, False]


def test_storage_use_count_sees_views():
    tensor = torch.ones(4)
    alone = _torch.storage_use_count(tensor)
    view = tensor.data[1:]
    assert _torch.storage_use_count(tensor) > alone
    del view
    assert _torch.storage_use_count(tensor) == alone


def test_backward_is_seen_from_inside():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(_torch.in_backward()))
    (2 * x).backward()
    assert seen == [True] and not _torch.in_backward()


def test_dispatch_modes_of_users_are_told_from_torchs_own():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode():
        assert _torch.dispatch_mode() is None
        with FlopCounterMode(display=False):
            assert _torch.dispatch_mode() == "FlopCounterMode"


def test_dynamo_starts_at_no_function_of_torchs(monkeypatch):
    """Why ``Module.compile`` is replaced, and what of it the replacement leans on."""
    monkeypatch.setattr(nn.Module, "compile", nn.Module.compile)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend=backend)
    model(torch.ones(1, 2))
    assert len(graphs) == (0 if torch.__version__ < "2.14" else 1)
    graphs.clear()
    torch._dynamo.register_backend(backend, name="contract")
    _torch.compile_modules_of_torch_too("contract")
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.ones(1, 2)
    wanted = model(x)
    model.compile(backend="contract")
    torch.testing.assert_close(model(x), wanted)
    assert len(graphs) == 1


def test_a_reset_of_torchs_reaches_a_backend(monkeypatch):
    """For what was compiled by name, and, since we say so, for what is compiled again after one."""
    from simplefsdp.compiler.backend import simplefsdp

    called = []
    monkeypatch.setattr(simplefsdp, "reset", lambda: called.append(1))
    torch.compile(torch.nn.Linear(2, 2), backend="simplefsdp", options={"executor": "aot_eager"})
    torch._dynamo.reset_code_caches()
    assert not called
    torch.compiler.reset()
    assert called
    called.clear()
    _torch.reset_with_dynamo(simplefsdp)
    torch._dynamo.reset()
    assert called


@pytest.mark.slow
def test_a_backend_is_known_by_name_without_being_installed():
    """In a process that finds no package's metadata, as from a checkout on the path."""
    code = """
import importlib.metadata
importlib.metadata.entry_points = lambda **asked: importlib.metadata.EntryPoints()
import simplefsdp, torch
from simplefsdp import simple_fsdp
torch.compile(torch.nn.Linear(2, 2), backend="simplefsdp", options={"executor": "aot_eager"})
assert "simplefsdp" in torch.compiler.list_backends()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_operator_of_dtensors_can_be_handled(fake_mesh):
    """outside.py: nn.init and ``.data`` reach the handler; without it the operator is torch's."""
    op, seen = torch.ops.aten.normal_.default, []

    def handler(op, args, kwargs):
        seen.append(type(args[0]))
        return _torch.default_dtensor_op(op, args, kwargs)

    before = dtensor_ops._dtensor_handlers().pop(op, None)
    value = distribute_tensor(torch.zeros(4, 2), fake_mesh(2), [Shard(0)], src_data_rank=None)
    try:
        _torch.handle_dtensor_op(op, handler)
        nn.init.normal_(value)
        value.data.normal_()
    finally:
        dtensor_ops._dtensor_handlers().pop(op)
        if before is not None:
            _torch.handle_dtensor_op(op, before)
    assert seen == [DTensor, DTensor]
    assert value.to_local().abs().min() > 0
    assert _torch.local_tensor(value) is value._local_tensor


def test_a_backward_is_compiled_with_its_forward_and_may_be_retained():
    """by_one_rank.py: it is not known then what the first backward does."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    compiled: list[str] = []

    def compiler(part):
        def compile_graph(gm, inputs):
            compiled.append(part)
            return make_boxed_func(gm.forward)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    x = torch.ones(3, requires_grad=True)
    with _torch.backward_compiled_at_once():
        loss = torch.compile(lambda x: (x.sin() * x.cos()).sum(), backend=backend)(x)
    assert compiled == ["forward", "backward"]
    loss.backward(retain_graph=True)
    loss.backward()


def test_writes_to_dtensors_are_seen(fake_mesh):
    """kept.py: writes to ``.data`` and to lists of DTensors give these no new version."""
    before, seen = dict(dtensor_ops._dtensor_handlers()), []
    value = distribute_tensor(torch.zeros(4, 2), fake_mesh(2), [Shard(0)], src_data_rank=None)
    value.add_(1)
    try:
        for (
            op
        ) in dtensor_ops._operators_in_place():  # a test of what is kept may have had them watched
            dtensor_ops._dtensor_handlers().pop(op, None)
        _torch.watch_writes_to_dtensors(seen.append)
        value.add_(1)
        value.data.mul_(2)
        torch._foreach_add_([value], 1)
        nn.init.normal_(value)
        value + value
    finally:
        dtensor_ops._dtensor_handlers().clear()
        dtensor_ops._dtensor_handlers().update(before)
    one, data, (listed,), filled = seen
    where = {_torch.memory_of(tensor)._cdata for tensor in (one, data, listed, filled)}
    assert where == {_torch.memory_of(value)._cdata}
    assert value._version == 3, "torch counts all of them now: kept.py need not"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_gradient_of_a_shard_lies_as_the_parameter(fake_mesh, rank):
    """On every rank, one without rows included, and tied to what it was computed from."""
    mesh, whole = fake_mesh(2, rank=rank), {"shape": (1, 3), "stride": (3, 1)}
    shard = torch.ones(1 - rank, 3)
    param = nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, **whole))
    seen = []
    # The spec alone: 2.11 gathers a gradient that something holds, to copy it.
    hook = param.register_hook(lambda grad: seen.append(grad._spec))
    _torch.local_of(param).sum().backward()  # of strides 0
    hook.remove()
    assert param.grad.placements == (Shard(0),) and param.grad.stride() == param.stride()
    (came,) = seen
    assert came == param._spec and came is not param._spec
    with torch.no_grad():
        assert _torch.local_of(param) is param._local_tensor
    square = _torch.local_of(param).square().sum()
    (grad,) = torch.autograd.grad(square, param, create_graph=True)
    assert grad.grad_fn is not None
    (twice,) = torch.autograd.grad(grad.to_local().sum(), param)
    assert torch.equal(twice.to_local(), 2 * torch.ones_like(shard))


def test_the_backend_is_known_as_a_function_too(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", nn.Module.compile)
    _torch.compile_modules_of_torch_too("contract", f"{__name__}.{_counting.__qualname__}")
    _counted.clear()
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend=_counting)
    model(torch.ones(1, 2))
    assert len(_counted) == 1


_counted = []


def _counting(gm, inputs):
    _counted.append(gm)
    return gm


def test_a_forward_that_is_no_function_is_compiled_as_ever(monkeypatch):
    class Callable:
        def __call__(self, x):
            return x * 2

    class Odd(nn.Module):
        forward = Callable()

    monkeypatch.setattr(nn.Module, "compile", nn.Module.compile)
    torch._dynamo.register_backend(lambda gm, inputs: gm, name="contract_odd")
    _torch.compile_modules_of_torch_too("contract_odd")
    model = Odd()
    model.compile(backend="contract_odd")
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))


def test_a_line_is_never_ours_nor_torchs():
    frames = {
        "user": 'File "/home/me/simplefsdp_models/net.py", line 3, in forward\n    self.fc(x)',
        "ours": f'File "{reading.__file__}", line 37, in forward_of_wrapped\n    return x',
        "torchs": f'File "{nn.__file__}", line 1, in forward\n    return F.linear(x)',
    }
    node = torch.fx.Graph().placeholder("x")
    node.stack_trace = "\n".join(frames.values())
    assert _torch.line_of(node) == f" ({frames['user'].replace(chr(10) + '    ', ': ')})"
    node.stack_trace = frames["ours"]
    assert not _torch.line_of(node)


def test_is_checkpointed_by_hooks():
    from torch.distributed._composable import checkpoint

    model = nn.Sequential(nn.Linear(2, 2))
    assert not _torch.is_checkpointed_by_hooks(model)
    assert _torch.is_checkpointed_by_hooks(checkpoint(model))


def test_is_compiled():
    model = nn.Sequential(nn.Linear(2, 2))
    assert not _torch.is_compiled(model)
    model.compile(backend="eager")
    assert _torch.is_compiled(model)
    assert not _torch.is_compiled(model[0])


def test_options_of_process_groups():
    for make in (dist.init_process_group, dist.new_group):
        assert {"pg_options", "timeout"} <= parameters_of(make)
    assert "device_id" in parameters_of(dist.init_process_group)
    timeout = c10d._get_default_timeout(c10d.Backend("cpu:gloo,cuda:nccl"))
    assert timeout == c10d.default_pg_timeout
    assert "_get_split_source(_get_default_group()" in inspect.getsource(
        c10d._new_process_group_helper
    ), "distributed_c10d finds elsewhere what to split a group from: a second group waits for all"


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build without NCCL")
def test_options_of_nccl():
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    assert options.is_high_priority_stream and hasattr(options, "_timeout")
    # split_group, which makes the groups of a mesh, copies those of the group that it splits.
    assert copy.deepcopy(options).is_high_priority_stream
    assert not dist.ProcessGroupNCCL.Options().is_high_priority_stream


def test_what_decides_which_matmuls_are_padded():
    from torch._inductor import config
    from torch._inductor.fx_passes import pad_mm

    wanted = ["match", "mat1", "mat2", "op", "input"]
    assert list(inspect.signature(pad_mm._should_pad).parameters) == wanted, (
        "pad_mm._should_pad takes something else: ranks would time matmuls to find out what to pad"
    )
    assert "_should_pad(match, mat1, mat2, op, input)" in inspect.getsource(pad_mm.should_pad)
    with config.patch(post_grad_fusion_options={"pad_aten_mm_pass": {}}):
        assert not pad_mm.should_pad_mm_bf16(torch.float32, 8, 8, 8)
    names = ("force_shape_pad", "shape_padding", "deterministic", "post_grad_fusion_options")
    assert all(hasattr(config, name) for name in names)
    assert config.run_autoheuristic("pad_mm") is False


def test_fused_adamw_takes_dtensors(fake_mesh):
    mesh = fake_mesh(2)
    updated = []
    for fused in (False, True):
        torch.manual_seed(0)
        shards = [torch.randn(4, 3), torch.randn(3)]
        params = [nn.Parameter(DTensor.from_local(s, mesh, [Shard(0)])) for s in shards]
        optimizer = torch.optim.AdamW(params, fused=fused, foreach=not fused)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        updated.append([param.to_local() for param in params])
    torch.testing.assert_close(updated[1], updated[0])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_checkpoints_has_the_classes_that_we_know(solo_mesh, tmp_path, protocol):
    """What is read without unpickling is what unpickling gives, but for what no reader uses."""
    sharded = DTensor.from_local(torch.ones(3, 2), solo_mesh, [Shard(0)])
    tensors = {
        str(dtype): torch.zeros(2, 3).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    }
    values = {"sharded": sharded, "groups": [{"lr": 0.1, "betas": (1, 2)}], "n": None}
    values |= {"tensors": tensors, "scalar": torch.tensor(1.0), "empty": torch.empty(0, 3)}
    dcp.save(values, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    wanted = pickle.loads(data)
    found = metadata_of(pickle.dumps(wanted, protocol))
    wanted.planner_data = wanted.storage_meta = wanted.version = found.storage_meta = None
    for entry in wanted.state_dict_metadata.values():
        if hasattr(entry, "properties") and hasattr(entry.properties, "strides"):
            entry.properties.strides = None
    assert metadata_of(data) == metadata_of(pickle.dumps(pickle.loads(data), protocol))
    assert found == wanted


@pytest.mark.parametrize("release", ["2.11", "2.15"])
def test_metadata_of_other_releases(release):
    """2.13 began to write strides, at which older releases fail."""
    folder = Path(__file__).parents[1] / "data"
    found = metadata_of((folder / f"metadata-torch-{release}.pickle").read_bytes())
    weight, lr = (found.state_dict_metadata[key] for key in ("model.w", "groups.0.lr"))
    assert weight.size == (4, 4) and weight.properties.dtype == torch.float32
    assert lr == dcp.metadata.BytesStorageMetadata()
    place = found.storage_data[dcp.metadata.MetadataIndex("model.w", [0, 0])]
    assert place.relative_path == "__0_0.distcp" and place.length > 64


def test_readers_and_planners_of_checkpoints_have_the_methods_that_we_replace(tmp_path):
    """And torch reads a checkpoint's metadata by the reader that it is given, never by itself."""
    assert parameters_of(dcp.FileSystemReader.read_data) == {"self", "plan", "planner"}
    assert parameters_of(dcp.DefaultLoadPlanner.load_bytes) == {"self", "read_item", "value"}
    assert "kwargs" in parameters_of(dcp.FileSystemReader.read_metadata)
    assert parameters_of(dcp.FileSystemWriter.write_data) == {"self", "plan", "planner"}
    assert parameters_of(dcp.FileSystemWriter.finish) == {"self", "metadata", "results"}
    dcp.save({"a": {"b": [1, {"c": 2}], "w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = read_metadata(tmp_path)
    (tmp_path / ".metadata").unlink()
    found = {"a": {"b": [0, {"c": 0}], "w": torch.zeros(2)}}
    checkpoints.load_by(metadata, tmp_path, found, no_dist=True)
    assert found["a"]["b"] == [1, {"c": 2}] and found["a"]["w"].tolist() == [1, 1]
    info = checkpoints.storage_info("name", 1, 2, ["zstd"])
    assert (info.relative_path, info.offset, info.length) == ("name", 1, 2)
    assert info.transform_descriptors == ["zstd"]


def test_the_joint_graph_can_be_cut_by_us():
    """Settings that make Inductor call us around the cut; where they are missing, it is torch's."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

    settings = {"joint_custom_pre_pass", "joint_custom_post_pass", "custom_partitioner_fn"}
    assert settings <= config.get_config_copy().keys() and _torch.can_cut()
    assert issubclass(CustomPartitionerFn, object) and issubclass(CustomGraphPass, object)
    names = parameters_of(min_cut_rematerialization_partition)
    assert {"num_fwd_outputs", "static_lifetime_input_indices", "compiler"} <= names


@pytest.mark.skipif(not _torch.can_save_code(), reason="torch before 2.15")
def test_aotautograd_has_an_entry_of_what_it_compiled():
    from torch._functorch._aot_autograd import aot_autograd_result as result
    from torch._functorch._aot_autograd import autograd_cache, schemas

    cache = autograd_cache.AOTAutogradCache
    assert list(inspect.signature(cache.try_load).parameters)[:3] == ["mod", "args", "aot_config"]
    assert list(inspect.signature(cache.save).parameters) == ["key", "entry", "remote"]
    entry = {field.name for field in fields(result.GenericAOTAutogradResult)}
    assert {"compiled_fw", "compiled_bw", "runtime_metadata", "guards_expr"} <= entry
    assert {"sanitized_aot_config", "serialized_bw_module"} <= entry
    backward = {field.name for field in fields(result.CompiledBackward)}
    assert {"backward_state_indices", "num_symints_saved_for_bw_"} <= backward
    assert "bw_donated_idxs" in {field.name for field in fields(schemas.ViewAndMutationMeta)}
    assert "aot_id" in {field.name for field in fields(schemas.CacheableAOTConfig)}
    assert list(parameters_of(autograd_cache.check_node_safe)) == ["node"]


@pytest.mark.skipif(not _torch.can_save_code(), reason="torch before 2.15")
def test_inductors_key_has_all_settings_and_can_do_without_the_graph():
    from torch._inductor.codecache import FxGraphCache, FxGraphCachePickler, FxGraphHashDetails

    names = list(inspect.signature(FxGraphHashDetails.__init__).parameters)
    assert names == ["self", "gm", "example_inputs", "fx_kwargs", "inputs_to_check"]
    assert {"gm", "example_inputs", "fx_kwargs"} <= parameters_of(FxGraphCache._check_can_cache)
    assert "gm" in parameters_of(FxGraphCachePickler.__init__)
    assert {"graph", "constants"} <= parameters_of(FxGraphCache.cache_hit_post_compile)


def test_our_files_are_among_the_artifacts_of_caches():
    from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

    assert CacheArtifactFactory.create("simplefsdp", "folder/name", b"").key == "folder/name"
    names = list(parameters_of(CacheArtifactManager.record_artifact))
    assert {"artifact_type", "key", "content"} == set(names)


def test_torch_trace_is_told_from_a_handler_without_a_folder(monkeypatch):
    internal = torch._logging._internal
    for folder in (None, "/somewhere"):
        monkeypatch.setattr(internal.trace_log, "handlers", [internal.LazyTraceHandler(folder)])
        assert _torch.is_traced() == (folder is not None)


def test_fake_tensors_are_made_again_outside_of_modes():
    """In a dispatch mode, each call on a fake tensor takes milliseconds."""
    with FakeTensorMode() as mode:
        tensor = torch.empty(4, 6)[:, 1:3]
        again = tensors.fake_again(tensor, None)
    assert again.fake_mode is mode and again.device == tensor.device
    assert (again.shape, again.stride()) == (tensor.shape, tensor.stride())
    assert tensors.storage_of(again) != tensors.storage_of(tensor)
    assert tensors.storage_of(tensors.fake_again(tensor, again)) == tensors.storage_of(again)


def test_a_fake_tensor_made_again_has_all_that_the_constructor_sets():
    with FakeTensorMode() as mode:
        one, made_by_torch = torch.rand(4, 2), torch.rand(4, 2)
    made = _torch.fake_again(one, None)
    assert vars(made).keys() == vars(made_by_torch).keys()
    assert type(made) is type(one) and made.fake_mode is mode and made.device == one.device
    with pytest.raises(RuntimeError, match="data"):
        made.data_ptr()


@pytest.mark.skipif(torch.__version__ < "2.15", reason="this torch follows each call")
def test_dynamo_can_put_a_traced_call_in_a_graph_again():
    assert trace_once.can_trace_once()
    condition = {f.name for f in fields(torch._guards.InvokeSubgraphReuseCondition)}
    assert {"guards", "traced_sources"} <= condition


def test_a_checkpointed_body_says_whether_it_has_a_policy():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def run(x, **options):
        return checkpoint(torch.sin, x, use_reentrant=False, **options)

    for options, expected in (({}, False), ({"context_fn": contexts}, True)):
        graph = dynamo_graph(lambda x, options=options: run(x, **options), torch.ones(2))
        bodies = [m for m in graph.children() if isinstance(m, torch.fx.GraphModule)]
        assert [_torch.has_policy(body) for body in bodies] == [expected]


def test_plain_tensors_and_those_that_hold_others(solo_mesh):
    tensor = torch.ones(2)
    assert _torch.is_plain_tensor(tensor) and not _torch.is_plain_tensor(3)
    assert not _torch.is_plain_tensor(distribute_tensor(tensor, solo_mesh, [Shard(0)]))


def test_which_functions_dynamo_is_in_is_known_as_it_traces():
    found = []

    @torch.compiler.assume_constant_result
    def asked():
        found.append([_torch.inlines(name) for name in ("inner", "out", "nobody")])
        return True

    def inner(x):
        return x + 1 if asked() else x

    def outer(x):
        return inner(x)

    torch._dynamo.reset()
    torch.compile(outer, backend="eager", fullgraph=True)(torch.ones(2))
    assert found == [[True, True, False]] and not _torch.inlines("outer")


def test_the_backend_that_is_traced_for_is_known_as_dynamo_traces():
    found = []

    def named(gm, inputs, **kwargs):
        return gm

    @functools.wraps(named)
    def around(*args, **kwargs):
        return named(*args, **kwargs)

    @torch.compiler.assume_constant_result
    def asked():
        found.append([_torch.traces_for(name) for name in ("named", "eager")])
        return 1

    backends = (named, functools.partial(named, options={}), around, "eager")
    for backend in backends:
        torch._dynamo.reset()
        torch.compile(lambda x: x + asked(), backend=backend, fullgraph=True)(torch.ones(2))
    assert found == [[True, False]] * 3 + [[False, True]] and not _torch.traces_for("eager")
    torch._dynamo.reset()
    mock = MagicMock(side_effect=named)  # it seems to wrap another, and that yet another
    torch.compile(lambda x: x + asked(), backend=mock, fullgraph=True)(torch.ones(2))
    assert mock.called


def test_a_function_is_traced_anew_where_a_question_has_another_answer():
    answers = {"now": True}

    def asked():
        return answers["now"]

    @torch.compiler.assume_constant_result
    def question():
        return _torch.guarded(asked)

    def function(x):
        return x + 1 if question() else x - 1

    torch._dynamo.reset()
    compiled, x = torch.compile(function, backend="eager", fullgraph=True), torch.zeros(())
    for answer in (True, False, True):
        answers["now"] = answer
        assert compiled(x).item() == (1 if answer else -1)


def test_a_backwards_compiler_is_called_again_when_it_could_not_with_the_forward():
    """AOTAutograd calls it with the forward where sizes are kept for backward."""
    in_backward, warned = [], []

    def forward(gm, inputs):
        return make_boxed_func(gm.forward)

    def backward(gm, inputs):
        in_backward.append(_torch.in_backward())
        if not in_backward[-1]:
            _torch.expect_backward_later()
            raise _torch.BackwardLaterError
        return make_boxed_func(gm.forward)

    @torch.compile(
        backend=aot_autograd(fw_compiler=forward, bw_compiler=backward),
        dynamic=True,
        fullgraph=True,
    )
    def function(x):
        return x.sin().reshape(x.shape[0] * x.shape[1])

    x = torch.ones(3, 4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Handler, "handle", lambda self, record: warned.append(record))
        function(x).sum().backward()
    assert in_backward == [False, True]
    assert not any(record.exc_info for record in warned)
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_keys_of_code_for_the_cpu_hash_no_files_of_triton(monkeypatch, solo_mesh):
    """Half a second of each process."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat
    from torch._inductor.utils import fresh_cache

    if not triton_compat.HAS_TRITON:
        pytest.skip("there is no Triton")
    asked, keys, own = [], [], codecache.FxGraphHashDetails.__init__

    def noting(self, *args):
        own(self, *args)
        keys.append(self.system_info["hash"])

    monkeypatch.setattr(codecache.FxGraphHashDetails, "__init__", noting)
    monkeypatch.setattr(triton_compat, "triton_key", lambda: asked.append("files"))
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    torch._dynamo.reset()
    model.compile(backend="simplefsdp", options={"executor": "inductor"})
    codecache.CacheBase.get_system.cache_clear()
    try:
        with fresh_cache():
            model(torch.ones(2, 4)).sum().backward()
        assert asked == []
        assert keys
        assert all(key.startswith("cpu-triton-") for key in keys)
    finally:
        codecache.CacheBase.get_system.cache_clear()  # it knows what is no key


def test_trunc_normal_calls_what_it_fills_tensor():
    """By that name `_torch.initialisers` finds it, in the frame of this function."""
    filled = torch.empty(3)
    found = []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found.append(_torch.filled_by_trunc_normal())
            return function(*args, **(kwargs or {}))

    with Looking():
        nn.init.trunc_normal_(filled)
    assert any(one is filled for one in found)
    assert _torch.filled_by_trunc_normal() is None


def test_dynamo_runs_full_tensor_on_what_stands_for_a_leaf(solo_mesh):
    """`_torch.full_tensor` breaks the graph there; else the call would be a part of it."""
    param = nn.Parameter(distribute_tensor(torch.ones(2), solo_mesh, [Shard(0)]))
    found = []

    def full_tensor(self, *, grad_placements=None):
        found.append((self.is_leaf, _torch.storage_of(self._local_tensor) is not None))
        raise UnsupportedFakeTensorException("as it is")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", full_tensor)
        compiled = torch.compile(lambda p: p.full_tensor() + 1, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="as it is"):
            compiled(param)
    assert found == [(True, True)]


def test_torch_tells_a_value_of_its_own_from_one_that_was_set():
    """Of one that no other test sets: what was patched is no default afterwards."""
    from torch._dynamo import config

    assert config._is_default("fail_on_recompile_limit_hit")
    with config.patch(fail_on_recompile_limit_hit=True):
        assert not config._is_default("fail_on_recompile_limit_hit")


def test_dynamo_asks_whether_it_may_compile_a_code():
    from torch._dynamo import convert_frame

    asked = {"cache_size", "compile_id"}
    assert asked == set(inspect.signature(convert_frame.exceeds_recompile_limit).parameters)
    assert "exceeds_recompile_limit(cache_size, compile_id)" in inspect.getsource(
        convert_frame._compile
    )
    assert "code" in inspect.signature(convert_frame._compile).parameters
