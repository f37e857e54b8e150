"""The backend: options, early and clear errors, settings left alone, a warm cache, one log line."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from graphs import capture, gathers
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint
from zoo import Zoo, batch, loss_of

from simplefsdp import simple_fsdp
from simplefsdp._torch import backends
from simplefsdp.compiler import backend
from simplefsdp.compiler.options import Options, parse_options

EAGER = {"executor": "aot_eager"}


def test_options():
    assert parse_options(None) == parse_options({}) == Options()
    assert parse_options({"executor": "aot_eager"}).executor == "aot_eager"
    message = r"unknown key 'excutor'; did you mean 'executor'\? \(valid"
    with pytest.raises(ValueError, match=message):
        parse_options({"excutor": "aot_eager"})
    with pytest.raises(
        ValueError, match=r"options\['executor'\]: expected one of 'auto', 'inductor', "
    ):
        parse_options({"executor": "eager"})
    with pytest.raises(TypeError, match="options: expected a dict, got str"):
        parse_options("none")


def test_a_model_of_torchs_own_modules_is_one_graph(fake_mesh):
    """Dynamo does not start at a forward in torch.nn, and would take each parameter's read."""
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fake_mesh(2))
    model.compile(backend="simplefsdp", options=EAGER)
    with capture() as captured:
        model(torch.ones(2, 4)).sum().backward()
    assert len(captured.forward) == len(captured.backward) == 1
    assert len(gathers(captured.forward[0])) == 4


def test_an_unknown_option_is_told_plainly(fake_mesh):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    compiled = torch.compile(model, backend="simplefsdp", options={"bucketing": "manuel"})
    with pytest.raises(
        ValueError, match=r"options\['bucketing'\]: expected one of 'none', 'manual'"
    ):
        compiled(torch.ones(2, 4))


def test_errors_of_ours_are_told_without_advice_on_the_compiler(fake_mesh, monkeypatch):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))

    def error_of(**options) -> Exception:
        torch._dynamo.reset()
        try:
            torch.compile(model, backend="simplefsdp", options=options)(torch.ones(2, 4))
        except (ValueError, BackendCompilerFailed) as error:
            return error
        pytest.fail("no error")

    error = error_of(bucketing="manuel")
    assert str(error).startswith("options['bucketing']: expected one of 'none', 'manual', 'auto'")
    assert str(error).endswith("got 'manuel'")
    assert type(error).__name__ == "ValueError" and "Dynamo" not in str(error)
    assert type(pickle.loads(pickle.dumps(error))) is ValueError
    frames = traceback.extract_tb(error.__traceback__)
    assert not [f for f in frames if "output_graph.py" in f.filename]

    def bug(*args: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(backend, "decide_resharding", bug)
    assert isinstance(error_of(executor="aot_eager"), BackendCompilerFailed)
    monkeypatch.setattr(backend, "decide_resharding", lambda *args: torch.device("no device"))
    assert isinstance(error_of(executor="aot_eager"), BackendCompilerFailed)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        torch._dynamo.graph_break()
        return x + 1


def test_unwrapped_model_is_named(fake_mesh):
    fake_mesh(2)
    compiled = torch.compile(nn.Sequential(Broken()), backend="simplefsdp", options=EAGER)
    with pytest.raises(ValueError, match=r"inner\.weight") as caught:
        compiled(torch.ones(2, 4))
    # the break comes later: what is wrong first is said first
    message = str(caught.value)
    assert "parameter inner.weight of module inner (Linear)" in message
    assert "test_backend.py" in message and "x = self.inner(x)" in message
    assert "is not sharded: call simplefsdp.simple_fsdp(model, mesh) before" in message


@pytest.mark.parametrize("wraps", [False, True], ids=["never", "after compile"])
def test_an_unwrapped_model_of_torchs_own_class_is_named(fake_mesh, wraps):
    mesh = fake_mesh(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="simplefsdp", options=EAGER)
    if wraps:
        simple_fsdp(model, mesh)
        with capture() as captured:
            model(torch.ones(2, 4)).sum().backward()
        assert gathers(captured.forward[0]) == ["0.weight", "0.bias"]
    else:
        with pytest.raises(ValueError, match=r"^parameter 0\.weight of module 0 \(Linear\) is"):
            model(torch.ones(2, 4))


FIRST_CONTACT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
assert "simplefsdp" in torch.compiler.list_backends() and "simplefsdp" not in sys.modules
for model in models:
    model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
optimize = torch._dynamo.optimize
for model in models:
    try:
        model(torch.ones(2, 4))
    except ValueError as error:
        print(error)
assert optimize is torch._dynamo.optimize and "_dynamo" in optimize.__module__
"""


@pytest.mark.slow
def test_the_very_first_compile_imports_this_package():
    command = [sys.executable, "-c", FIRST_CONTACT]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    # Before 2.14 a module of torch's own is compiled by this package alone, so the first is not.
    expected = 2 if torch.__version__ >= "2.14" else 1
    assert run.stdout.count("parameter 0.weight of module 0 (Linear) is not sharded") == expected


def test_other_backends_compile_as_ever(fake_mesh):
    fake_mesh(2)
    graphs = []

    def mine(gm, inputs):
        graphs.append(gm)
        return gm

    model = nn.Sequential(nn.Linear(4, 4), Broken().inner)
    model.compile(backend=mine)
    model(torch.ones(2, 4))
    if torch.__version__ < "2.14":
        assert graphs == []  # Dynamo starts at no function of torch's own


def test_values_that_lie_otherwise_than_torch_has_foretold(solo_mesh):
    """Of what `softplus_backward` makes, torch's own `aot_eager` takes a view that there is not."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x):
            steps = nn.functional.softplus(self.inner(x).transpose(1, 2))
            return steps.cumsum(-1).square().mean()

    model = simple_fsdp(Steps(), solo_mesh)
    x = torch.rand(2, 3, 4)
    model(x).backward()
    wanted = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="simplefsdp", options=EAGER)(x).backward()
    for param, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)


def test_a_frozen_module_in_a_list_is_whole(solo_mesh):
    """A teacher, say, that is not to be in the model's state dict."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.teacher = nn.Linear(4, 4), [nn.Linear(4, 4).requires_grad_(False)]

        def forward(self, x):
            return (self.own(x) - self.teacher[0](x)).square().mean()

    model = simple_fsdp(Student(), solo_mesh)
    x = torch.ones(2, 4)
    wanted = model(x)
    found = torch.compile(model, backend="simplefsdp", options=EAGER)(x)
    found.backward()
    assert torch.equal(found, wanted) and model.own.weight.grad is not None


def test_parameter_registered_after_the_wrap_is_named(fake_mesh):
    model = simple_fsdp(Broken(), fake_mesh(2))
    model.late = nn.Parameter(torch.ones(4))
    model.__class__.forward = lambda self, x: self.inner(x) * self.late
    compiled = torch.compile(model, backend="simplefsdp", options=EAGER)
    with pytest.raises(ValueError, match=r"late.*is not sharded"):
        compiled(torch.ones(2, 4))


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_write_to_a_parameter_is_refused(fake_mesh, recompute):
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return checkpoint(self.clamp, x, use_reentrant=False) if recompute else self.clamp(x)

        def clamp(self, x):
            with torch.no_grad():
                self.weight.clamp_(max=0.5)
            return x @ self.weight

    model = simple_fsdp(Clamped(), fake_mesh(2))
    compiled = torch.compile(model, backend="simplefsdp", options=EAGER)
    with pytest.raises(ValueError, match=r"weight: clamp_\(\) in forward .*test_backend"):
        compiled(torch.ones(2, 4))


def test_a_function_without_parameters_compiles(fake_mesh):
    fake_mesh(2)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="simplefsdp", options=EAGER)
    x = torch.ones(3)
    assert torch.equal(compiled(x), x.sin() + 1)


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_inductor_settings_are_patched_for_the_compilation_only(fake_mesh, executor):
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    before = (inductor_config.get_config_copy(), functorch_config.get_config_copy())
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    compiled = torch.compile(model, backend="simplefsdp", options={"executor": executor})
    loss = compiled(torch.ones(2, 4)).sum()
    between = (inductor_config.get_config_copy(), functorch_config.get_config_copy())
    loss.backward()  # compiled lazily, now
    after = (inductor_config.get_config_copy(), functorch_config.get_config_copy())
    assert before == between == after


class UsersPass(CustomGraphPass):
    """A pass that the user has set for Inductor, which ours must not displace."""

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, graph):
        starts = [n for n in graph.nodes if "all_gather" in str(n.target)]
        self.seen.append(len(starts))

    def uuid(self):
        return "the user's"


def test_the_users_own_passes_run_and_torchs_bucketing_does_not(fake_mesh):
    model = simple_fsdp(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), fake_mesh(2))
    options = {"bucketing": "manual", "buckets": ["*"]}
    joint, post_grad = UsersPass(), UsersPass()
    with inductor_config.patch(
        joint_custom_post_pass=joint,
        post_grad_custom_post_pass=post_grad,
        bucket_all_gathers_fx="all",
        fx_graph_cache=False,
    ):
        compiled = torch.compile(model, backend="simplefsdp", options=options)
        _, code = run_and_get_code(compiled, torch.ones(2, 4))
    assert joint.seen == [8]
    assert post_grad.seen == [8]  # before ours, which makes buckets of them
    assert code[0].count("= torch.ops._c10d_functional.all_gather_into_tensor_coalesced") == 4
    assert "all_gather_into_tensor_out" not in code[0]  # what torch's bucketing would write


def test_a_users_pass_may_leave_the_graph_unsorted(solo_mesh):
    doubled = []

    def double(graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            with graph.inserting_before(graph.output_node()):  # after its users
                twice = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
            twice.meta.update(node.meta)
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, of=twice: user is not of)
            doubled.append(node.name)

    plain = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    options = {"bucketing": "manual", "buckets": ["*"], "executor": "inductor"}
    with inductor_config.patch(post_grad_custom_post_pass=double, fx_graph_cache=False):
        out = torch.compile(model, backend="simplefsdp", options=options)(torch.ones(2, 4))
    assert len(doubled) == 2
    torch.testing.assert_close(out, 4 * plain(torch.ones(2, 4)))


def test_torchs_budget_of_activations_is_met(solo_mesh):
    plain = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.GELU())])
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    x = torch.randn(16, 8)
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    def step(run):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(x).sum().backward()
        return sum(saved)

    options = {**EAGER, "bucketing": "none"}
    whole = step(torch.compile(model, backend="simplefsdp", options=options))
    torch._dynamo.reset()
    model.zero_grad()
    with functorch_config.patch(activation_memory_budget=0.3):
        less = step(torch.compile(model, backend="simplefsdp", options=options))
    assert less < whole
    plain(x).sum().backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad)


def test_settings_of_torch_that_cannot_work_are_refused_by_name(fake_mesh, monkeypatch):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    run = torch.compile(model, backend="simplefsdp")
    with (
        torch._dynamo.config.patch(caching_precompile=True),
        pytest.raises(ValueError, match=r"caching_precompile is set.*save_cache_artifacts"),
    ):
        run(torch.ones(2, 4))
    monkeypatch.setattr(backends, "_LOSES_MESHES", True)
    with (
        inductor_config.patch(cpp_wrapper=True),
        pytest.raises(ValueError, match=r"cpp_wrapper is set.*'executor': 'regions'"),
    ):
        run(torch.ones(2, 4))


def test_a_budget_that_nothing_meets_says_which_graph_and_how_much(fake_mesh):
    model = simple_fsdp(nn.Linear(64, 64), fake_mesh(2))
    options = {**EAGER, "bucketing": "auto", "memory_budget_gb": 1e-6}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    with pytest.raises(ValueError, match=r"forward graph: memory budget: no schedule"):
        compiled(torch.ones(8, 64))


def test_two_models_two_options_in_one_process(fake_mesh):
    mesh = fake_mesh(2)
    outputs = []
    for executor in ("aot_eager", "inductor"):
        torch.manual_seed(0)
        model = simple_fsdp(nn.Linear(4, 4, bias=False), mesh, mode="replicate")
        compiled = torch.compile(model, backend="simplefsdp", options={"executor": executor})
        outputs.append(compiled(torch.ones(2, 4)))
    torch.testing.assert_close(*outputs)


def test_cuda_graphs_need_cuda(fake_mesh):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    run = torch.compile(model, backend="simplefsdp", options={"cudagraphs": True})
    with pytest.raises(ValueError, match=r"\['cudagraphs'\]: expected parameters on cuda, got cpu"):
        run(torch.ones(2, 4))


@pytest.mark.slow
def test_one_log_line_per_graph(fake_mesh, caplog):
    model = simple_fsdp(Zoo(), fake_mesh(4))
    compiled = torch.compile(model, backend="simplefsdp", options={**EAGER, "bucketing": "none"})
    with caplog.at_level(logging.INFO, logger="simplefsdp"):
        loss_of(compiled, *batch(0, 1)).backward()
    lines = [r.getMessage() for r in caplog.records if r.name == "simplefsdp"]
    assert lines == [
        "forward: 19 gathers (2.609 KiB; 19 freed after forward, 0 kept), 0 reduces (0 B)",
        "backward: 13 gathers (2.297 KiB, recomputed), 18 reduces (2.332 KiB)",
    ]


CACHED_RUN = """
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from simplefsdp import simple_fsdp
from simplefsdp.compiler import backend

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
hash(mesh)  # as everybody does who keeps it in a dict; each process has other hashes of strings
model = simple_fsdp(torch.nn.Linear(8, 8), mesh["shard"])
compiled = torch.compile(model, backend="simplefsdp")
compiled(torch.ones(2, 8, requires_grad=True)).sum().backward()
found = counters["inductor"]
print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], found["fxgraph_cache_bypass"])
"""


def cached_run(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CACHED_RUN],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **more},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_another_process_starts_warm_and_a_file_cut_short_is_made_anew(tmp_path: Path):
    """As a compiler leaves it that is killed."""
    first = cached_run(
        tmp_path, TORCHINDUCTOR_AUTOGRAD_CACHE="0"
    )  # no code is kept, but Inductor's
    assert first.stdout.split() == ["0", "2", "0"]  # forward and backward
    sources = [path for path in tmp_path.rglob("*.main.cpp") if "switch" in path.read_text()]
    cut = sources[0].with_suffix(".so")
    cut.write_bytes(cut.read_bytes()[:100])
    refused, again = cached_run(tmp_path), cached_run(tmp_path)
    assert refused.returncode != 0 and again.returncode == 0, refused.stderr + again.stderr
    last = refused.stderr.strip().splitlines()[-1]
    assert f"ValueError: {cut}" in last and "start again" in last
    assert again.stdout.split() == ["2", "0", "0"]
    assert "leaked" not in again.stderr  # as triton's bindings say at exit, of what is held


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucketing": "manual", "cluster": "h100"}, "'cluster'.*no meaning.*bucketing='auto'"),
        ({"bucketing": "none", "memory_budget_gb": 1.0}, "'memory_budget_gb'.*bucketing='none'"),
        ({"planner": "greedy"}, "unknown key 'planner': leave it out; `simplefsdp inspect"),
        ({"rank_guard": False}, "'rank_guard': rank_guard_timeout_s=0 turns"),
        ({"reshard_after_forward": True}, r"is an argument of simple_fsdp\(model, mesh"),
        ({"rank_guard_timeout_s": -1}, "a number of seconds, or 0 for no guard"),
        ({"cudagraphs": True, "executor": "regions"}, "'regions' runs what is not captured"),
        ({"mode": "reduce-overhead"}, "for torch.compile's mode='reduce-overhead' there is"),
        ({"buckets": ["*"]}, "'buckets'.*bucketing='auto'.*'manual'"),
        ({"reorder": False}, "'reorder'.*bucketing='auto' plans when"),
        ({"max_inflight_gathers": 3}, "'max_inflight_gathers': bucketing='auto' plans it"),
        ({"bucketing": "auto", "cluster": "h10"}, "h100.*JSON"),
        ({"bucketing": "auto", "memory_budget_gb": -1}, "1e9 bytes, a number above 0"),
    ],
)
def test_options_that_would_be_ignored_or_make_no_sense(options, says):
    with pytest.raises(ValueError, match=says):
        parse_options(options)


def test_a_mode_of_torch_compile_is_told_what_to_use_instead(fake_mesh):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    run = torch.compile(model, backend="simplefsdp", mode="reduce-overhead")
    with pytest.raises(ValueError, match="mode='reduce-overhead' there is cudagraphs=True"):
        run(torch.ones(2, 4))
