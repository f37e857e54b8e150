"""The contract with PyTorch's private parts: when a release moves one, the test here says which."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from simplefsdp import _torch


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


def test_dynamo_names_inputs_and_modules():
    gm = dynamo_graph(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2))
    names = [_torch.input_name(n) for n in gm.graph.nodes if n.op == "placeholder"]
    assert "0.weight" in names
    paths = [_torch.module_path(n) for n in gm.graph.nodes]
    assert any(path and path.endswith("(Linear)") for path in paths)
    weight = next(n for n in gm.graph.nodes if _torch.input_name(n) == "0.weight")
    assert isinstance(weight.meta["example_value"], nn.Parameter)


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
    assert len(_torch.hash_of_files([__file__])) == 64


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
    assert {family + name for name in simple} <= _torch._ORDER_STAYS.keys()
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
