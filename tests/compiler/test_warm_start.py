"""Code of an earlier run: the same as compiling again, for the same and for nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from formulas import formulas_asked
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from simplefsdp import _torch, microbatch, rank_guard, simple_fsdp
from simplefsdp.compiler import cache_key, warm_start
from simplefsdp.compiler.observers import observing
from simplefsdp.rank_guard import decisions

pytestmark = pytest.mark.skipif(not _torch.can_save_code(), reason="torch before 2.15")

WIDTH = 8
USED, NOT_KEPT = "the code of an earlier run is used", "compiled code is not kept"
MANUAL = {"bucketing": "manual"}
REGIONS = {"bucketing": "manual", "executor": "regions"}
AUTO = {"bucketing": "auto", "cluster": "h100", "memory_budget_gb": 1.0}


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.two = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 2, **arguments) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(**arguments) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def files() -> list[Path]:
    return sorted((Path(cache_dir()) / warm_start.FOLDER).glob("*"))


def batch(rows: int = 4) -> torch.Tensor:
    return torch.arange(float(rows * WIDTH)).view(rows, WIDTH) / WIDTH


def trained(
    mesh: DeviceMesh,
    options: dict[str, object] = MANUAL,
    *,
    make: Callable[[], nn.Module] = Model,
    rows: int = 4,
    change: Callable[[nn.Module], object] = lambda model: None,
    then: Callable[[Callable[..., torch.Tensor]], object] = lambda run: None,
    **wrap: object,
) -> list[torch.Tensor]:
    """The output and the gradients of a first step, as a new process would make them; ``then`` is
    given what ran it."""
    torch._dynamo.reset()
    decisions().clear()
    torch.manual_seed(0)
    model = make()
    simple_fsdp(model, mesh, **wrap)
    change(model)
    run = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
    out = run(batch(rows))
    if out.requires_grad:
        out.square().mean().backward()
    grads = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
    then(run)
    return [out.detach(), *grads]


class Watch(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __contains__(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@contextlib.contextmanager
def watching(level: int = logging.DEBUG) -> Iterator[Watch]:
    log, watch = logging.getLogger("simplefsdp"), Watch()
    before = log.level
    log.addHandler(watch)
    log.setLevel(level)
    try:
        yield watch
    finally:
        log.removeHandler(watch)
        log.setLevel(before)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def kept(kernels: Path) -> Iterator[None]:
    """Each test has caches of its own, but for what the C++ compiler made of a source."""
    on = functorch_config.patch(enable_autograd_cache=True)
    with fresh_cache(), on, watching():  # code is kept with the log, if somebody reads it
        shutil.copytree(kernels, cache_dir(), dirs_exist_ok=True)
        yield
        for file in Path(cache_dir()).glob("??/*.main.*"):
            (kernels / file.parent.name).mkdir(exist_ok=True)
            shutil.copy2(file, kernels / file.parent.name)


def again(mesh: DeviceMesh, *arguments, **keywords) -> bool:
    """Whether a step used what an earlier one left."""
    with watching() as log:
        trained(mesh, *arguments, **keywords)
    return USED in log


def named(mesh: DeviceMesh, *arguments, **keywords) -> str | None:
    """The name of a step's file; nothing is compiled."""
    names: list[str | None] = []

    def stop(self: warm_start.WarmStart, *, together: bool) -> None:
        names.append(self._name)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(warm_start.WarmStart, "code", stop)
        trained(mesh, *arguments, **keywords)
    return names[0]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


CASES = [
    MANUAL,
    REGIONS,
    {**AUTO, "executor": "inductor"},
    {**AUTO, "executor": "regions"},
    {"bucketing": "none"},
]


@pytest.mark.slow(quick=[f"{CASES[1]}-9-False"])
@pytest.mark.parametrize(
    ("options", "depth", "grad"),
    [
        *((options, 2, True) for options in CASES),
        *((options, 9, grad) for options in CASES[:2] for grad in (True, False)),
    ],
    ids=str,
)
def test_code_is_used_again_and_gives_the_same(fake_mesh, options, depth, grad):
    """Of nine layers a few are traced; without gradients that is tried, and given up."""
    mesh = fake_mesh(4)
    found, used, asked = [], [], []

    def count(run: Callable[..., torch.Tensor]) -> None:
        with formulas_asked() as formulas:
            out = run(batch())
            if grad:
                out.sum().backward()
        asked.append(len(formulas))

    for _ in range(2):
        with watching() as log, torch.set_grad_enabled(grad):
            found.append(trained(mesh, options, make=lambda: Model(depth), then=count))
        used.append(USED in log)
    assert used == [False, True] and len(files()) == 1
    assert asked == [0, 0]  # what is used again runs below autograd, too
    assert_equal(*found)
    assert len(found[0]) == (1 + 6 * depth if grad else 1)


class Kinds(nn.Module):
    """Statistics that are written to, dropout, a tied weight, an output that is an input's view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.first, self.last = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        h = x + self.first(x.long().clamp(0, 9)[:, 0])
        for layer in self.layers:
            h = self.drop(self.norm(layer(h)))
        return self.last(h), x[1:], h.argmax()


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES[:2], ids=str)
def test_kinds_of_values(fake_mesh, options):
    mesh, found = fake_mesh(4), []
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = simple_fsdp(Kinds(), mesh)
        run = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
        with watching() as log:
            for i in range(3):
                x = batch() + i
                out, view, place = run(x)
                out.square().mean().backward()
                assert view.data_ptr() == x[1:].data_ptr()
        grads = [p.grad.to_local() for p in model.parameters()]
        found.append([out.detach(), view, place, *grads, *model.buffers()])
    assert USED in log
    assert_equal(*found)
    assert model.calls == 3 and out.grad_fn is not None and view.grad_fn is None


@pytest.mark.slow
def test_the_log_says_the_same(fake_mesh):
    mesh, said = fake_mesh(4), []
    for _ in range(2):
        with watching(logging.INFO) as log:
            trained(mesh, AUTO)
        said.append(log.lines)
    assert said[0] == said[1] and len(said[0]) == 2
    for level, lines in ((logging.WARNING, 0), (logging.INFO, 2), (logging.INFO, 2)):
        with watching(level) as log:  # at first nobody wants to read it
            trained(mesh)
        assert len(log.lines) == lines


@pytest.mark.slow
def test_who_observes_sees_each_graph(fake_mesh):
    mesh = fake_mesh(4)
    trained(mesh)
    seen: list[object] = []
    with observing(seen.append):
        assert not again(mesh)
    assert [graph.part for graph in seen] == ["forward", "backward"]
    assert again(mesh)


@pytest.mark.slow
def test_a_broken_file_costs_time_only(fake_mesh):
    mesh = fake_mesh(4)
    first = trained(mesh)
    (file,) = files()
    whole = file.read_bytes()
    texts = [b"", b"(", b"\x80\x04N.", b"garbage"]
    flipped = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
    for content in (*texts, whole[:-100], whole[: len(whole) // 2], flipped):
        file.write_bytes(content)
        with watching() as log:
            assert_equal(trained(mesh), first)
        assert USED not in log, content
        assert again(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["force_disable_caches", "fx_graph_cache"])
def test_a_user_without_caches_has_none(fake_mesh, name):
    mesh = fake_mesh(4)
    with inductor_config.patch({name: name == "force_disable_caches"}):
        trained(mesh)
    with functorch_config.patch(enable_autograd_cache=False):
        trained(mesh)
    assert files() == []


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_costs_time_only(fake_mesh):
    Path(cache_dir(), warm_start.FOLDER).touch()
    mesh = fake_mesh(4)
    assert_equal(trained(mesh), trained(mesh))


@pytest.mark.slow
def test_a_backward_that_is_retained(fake_mesh):
    """By regions, that is; whole graphs of Inductor's write over what the forward has left."""
    mesh = fake_mesh(4)
    trained(mesh, REGIONS)
    torch._dynamo.reset()
    model = simple_fsdp(Model(), mesh)
    with watching() as log:
        out = torch.compile(model, backend="simplefsdp", options=REGIONS)(batch())
    assert USED in log
    out.sum().backward(retain_graph=True)
    out.sum().backward()


@pytest.mark.slow
def test_microbatches(fake_mesh):
    mesh, found = fake_mesh(2, 2, names=("replicate", "shard")), []
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = simple_fsdp(Model(), mesh, mode="hybrid_shard")
        run = torch.compile(model, backend="simplefsdp", options=REGIONS)
        with watching() as log:
            for i in range(3):
                with microbatch(model, is_last=i == 2):
                    run(batch() * (i + 1)).square().mean().backward()
        found.append([p.grad.to_local() for p in model.parameters()])
    assert log.lines.count(USED) == 2  # deferred, and not
    assert_equal(*found)


def frozen(model: nn.Module) -> None:
    model.layers[0].one.weight.requires_grad_(False)


class Uuid(CustomGraphPass):
    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(self, graph):
        pass

    def uuid(self):
        return self.name


def bf16(**more) -> dict[str, object]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, **more)}


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.blocks:
            x = layer(x)
        return x


DIFFERENT = {
    "executor": lambda m: named(m, REGIONS),
    "bucketing": lambda m: named(m, {"bucketing": "none"}),
    "buckets": lambda m: named(m, {**MANUAL, "buckets": ["layers"]}),
    "reorder": lambda m: named(m, {**MANUAL, "reorder": False}),
    "auto": lambda m: named(m, AUTO),
    "cluster": lambda m: [named(m, AUTO), named(m, {**AUTO, "cluster": "a100"})],
    "budget": lambda m: [named(m, AUTO), named(m, {**AUTO, "memory_budget_gb": 2.0})],
    "reduce_group": lambda m: named(m, {**MANUAL, "separate_reduce_group": True}),
    "rows": lambda m: named(m, rows=5),
    "depth": lambda m: named(m, make=lambda: Model(3)),
    "names": lambda m: named(m, make=Renamed),
    "a parameter less": lambda m: named(m, make=lambda: Model(bias=False)),
    "a frozen parameter": lambda m: named(m, change=frozen),
    "policy": lambda m: [named(m, **bf16()), named(m, **bf16(reduce_dtype=torch.bfloat16))],
    "kept": lambda m: named(m, reshard_after_forward=False),
    "replicate": lambda m: named(m, mode="replicate"),
    "deferred": lambda m: named(m, change=lambda x: x.set_requires_gradient_sync(False)),
    "factor": lambda m: named(m, change=lambda x: x.set_gradient_divide_factor(3.0)),
}


@pytest.mark.slow(quick=["buckets", "names", "policy", "factor"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_something_else_has_another_name(fake_mesh, what):
    mesh = fake_mesh(4)
    first, found = named(mesh), DIFFERENT[what](mesh)
    names = [first, *(found if isinstance(found, list) else [found])]
    assert None not in names and len(set(names)) == len(names)
    assert named(mesh) == first


@contextlib.contextmanager
def called(function: Callable[..., object], *now: object, before: object) -> Iterator[None]:
    function(*now)
    try:
        yield
    finally:
        function(*before if isinstance(before, tuple) else (before,))


STATES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "its dtype": lambda: called(
        torch.set_autocast_dtype, "cpu", torch.float16, before=("cpu", torch.bfloat16)
    ),
    "no gradients": torch.no_grad,
    "default dtype": lambda: called(torch.set_default_dtype, torch.float64, before=torch.float32),
    "deterministic": lambda: called(torch.use_deterministic_algorithms, True, before=False),
    "threads": lambda: called(torch.set_num_threads, 3, before=torch.get_num_threads()),
    "precision": lambda: called(torch.set_float32_matmul_precision, "high", before="highest"),
    "kernels of attention": lambda: called(torch.backends.cuda.enable_math_sdp, False, before=True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "inductor's settings": lambda: inductor_config.patch(epilogue_fusion=False),
    "AOTAutograd's": lambda: functorch_config.patch(ban_recompute_long_fusible_chains=False),
    "a pass": lambda: inductor_config.patch(post_grad_custom_pre_pass=Uuid("one")),
    "a joint pass": lambda: inductor_config.patch(joint_custom_post_pass=Uuid("one")),
}


@pytest.mark.slow(quick=["deterministic", "precision", "a pass"])
@pytest.mark.parametrize("what", STATES)
def test_another_state_of_torch_has_another_name(fake_mesh, what):
    torch.set_float32_matmul_precision("highest")  # which is not quite what it is before
    mesh = fake_mesh(4)
    first = named(mesh)
    with STATES[what]():
        names = [named(mesh) for _ in range(2)]
    assert names[0] == names[1] not in (first, None) and named(mesh) == first


def test_other_passes_of_the_users(fake_mesh):
    mesh = fake_mesh(4)
    names = []
    for name in ("one", "two", "one"):
        with inductor_config.patch(post_grad_custom_post_pass=Uuid(name)):
            names.append(named(mesh))
    assert names[0] == names[2] != names[1]


@pytest.mark.slow
def test_other_instructions(fake_mesh, monkeypatch):
    """Of a machine that shares the folder of caches, or is given them."""
    mesh = fake_mesh(4)
    trained(mesh)
    with monkeypatch.context() as patch:
        pick, first = cpu_vec_isa.pick_vec_isa, iter(["avx1024"])
        patch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: next(first, None) or pick())
        assert not again(mesh)
    assert again(mesh)


def test_other_sources(fake_mesh, monkeypatch):
    mesh = fake_mesh(4)
    first = named(mesh)
    monkeypatch.setattr(cache_key, "sources", lambda: "another commit")
    assert named(mesh) != first


@pytest.mark.parametrize("shape", [(8,), (2, 2)], ids=str)
def test_other_meshes(fake_mesh, shape):
    first = named(fake_mesh(4))
    dist.destroy_process_group()
    names = ("replicate", "shard") if len(shape) == 2 else None
    mesh = fake_mesh(*shape, names=names)
    other = named(mesh, mode="hybrid_shard" if names else "fully_shard")
    assert None is not other != first


def test_a_group_of_another_name(fake_mesh):
    mesh = fake_mesh(4)
    first = named(mesh)
    other = named(DeviceMesh.from_group(dist.new_group(list(range(4))), "cpu"))
    assert None is not other != first == named(mesh)


@torch.library.custom_op("simplefsdp_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


@torch.compiler.allow_in_graph
def tripled(x):
    return x * 3


def policy(ctx, op, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.PREFER_RECOMPUTE


def contexts():
    return create_selective_checkpoint_contexts(policy)


def with_policy(block, x):
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class With(Model):
    def __init__(self, last: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.last = last

    def forward(self, x):
        return self.last(self.layers[0], x) + self.layers[1](x)


UNKNOWN = {
    "a custom operator": lambda block, x: doubled(block(x)),
    "somebody's function": lambda block, x: tripled(block(x)),
    "somebody's policy": with_policy,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNKNOWN)
def test_what_no_key_tells_is_not_kept(fake_mesh, what):
    mesh = fake_mesh(4)
    with watching() as log:
        found = [trained(mesh, make=lambda: With(UNKNOWN[what])) for _ in range(2)]
    assert files() == [] and NOT_KEPT in log
    assert_equal(*found)


@pytest.mark.slow
def test_checkpoints_are_kept(fake_mesh):
    mesh = fake_mesh(4)

    def make():
        return With(lambda block, x: checkpoint(block, x, use_reentrant=False))

    first = trained(mesh, REGIONS, make=make)
    assert_equal(trained(mesh, REGIONS, make=make), first)
    assert again(mesh, REGIONS, make=make)


@pytest.mark.parametrize(
    "patch",
    [
        lambda: functorch_config.patch(joint_custom_pass=lambda graph, inputs: graph),
        lambda: inductor_config.patch(post_grad_custom_pre_pass=Uuid(None)),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        lambda: inductor_config.patch({"triton.cudagraphs": True}),
        lambda: inductor_config.patch(cpp_wrapper=True),
    ],
    ids=["joint_custom_pass", "a pass without uuid", "hooks", "cudagraphs", "cpp_wrapper"],
)
def test_settings_that_no_key_tells(fake_mesh, patch):
    with patch():
        assert named(fake_mesh(4), REGIONS) is None


@pytest.mark.slow
def test_open_sizes_and_breaks_are_not_kept(fake_mesh):
    mesh = fake_mesh(4)

    def broken(block, x):
        x = block(x)
        torch._dynamo.graph_break()
        return x

    torch._dynamo.reset()
    model = simple_fsdp(With(broken), mesh)
    torch.compile(model, backend="simplefsdp", options=MANUAL)(batch()).sum().backward()
    torch._dynamo.reset()
    model = simple_fsdp(Model(), mesh)
    run = torch.compile(model, backend="simplefsdp", options=MANUAL, dynamic=True)
    run(batch()).sum().backward()
    assert files() == []


def on_ranks(folder: str, options: dict[str, object], steps: str) -> list[tuple[bool, list]]:
    """On a rank, steps of new processes with a folder of its own: whether each used what is there,
    and what it gave. "lost": the last rank's file is gone; "changed": it has another plan."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    mesh, found = init_device_mesh("cpu", (2,)), []
    last = dist.get_rank() == 1
    with functorch_config.patch(enable_autograd_cache=True), watching():
        for step in steps.split():
            if step == "lost" and last:
                for file in files():
                    file.unlink()
            if step == "changed" and last:
                change_plan(files()[0])
            rank_guard._agreed.clear()
            with watching() as log:
                values = trained(mesh, options)
            found.append((USED in log, [value.tolist() for value in values]))
    return found


def alone_later(folder: str, options: dict[str, object]) -> list[bool]:
    """After steps of which the second used what was there, one rank has another batch."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    mesh, used = init_device_mesh("cpu", (2,)), []
    with functorch_config.patch(enable_autograd_cache=True):
        for _ in range(2):
            rank_guard._agreed.clear()
            decisions().clear()
            torch._dynamo.reset()
            model = simple_fsdp(Model(), mesh)
            options = {**options, "rank_guard_timeout_s": 20}
            run = torch.compile(model, backend="simplefsdp", options=options, dynamic=False)
            for rows in (4, 5 if dist.get_rank() else 4, 4):
                with watching() as log:
                    run(batch(rows)).sum().backward()
                used.append(USED in log)
    return used


@pytest.mark.slow
def test_a_rank_that_compiles_alone_later_waits_for_nobody(own_ranks, tmp_path):
    options = {**AUTO, "executor": "regions"}
    for rank, used in enumerate(own_ranks.run(alone_later, str(tmp_path), options)):
        assert used == [False, False, False, True, False, False], rank


def change_plan(file: Path) -> None:
    """As if another plan had been agreed on."""
    content = _torch.read_kept(warm_start.FOLDER, file.name)
    assert content is not None
    observed, code = pickle.loads(content)
    one = observed[True]
    observed[True] = one._replace(planned=one.planned[::-1], launches=one.launches[::-1])
    _torch.keep(warm_start.FOLDER, file.name, pickle.dumps((observed, code)))


@pytest.mark.slow
def test_all_ranks_use_their_files_or_none(own_ranks, tmp_path):
    answers = own_ranks.run(on_ranks, str(tmp_path), AUTO, "first same lost same changed same")
    for answer in answers:
        assert [used for used, _ in answer] == [False, True, False, True, False, True]
        assert all(values == answer[0][1] for _, values in answer)


def in_a_process(folder: Path, body: str, seed: int = 1, **environment: str) -> list[str]:
    """Lines that ``body`` of this file says in a process of its own."""
    environment |= {"PYTHONHASHSEED": str(seed), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", f"import test_warm_start as t; t.{body}"],
        env={**os.environ, **environment, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout.splitlines()


def steps(artifacts: str = "", load: str = "", ranks: Sequence[int] = (0,)) -> None:
    """A step by each executor: what it gave, and whether it was compiled."""
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if load:
        assert torch.compiler.load_cache_artifacts(Path(load).read_bytes()) is not None
    for rank in ranks:
        debug._clear_sharding_prop_cache()  # as in conftest.py
        debug._clear_fast_path_sharding_prop_cache()
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        hash(mesh)  # as everybody does who keeps it in a dict
        for options in (MANUAL, {**AUTO, "executor": "regions"}):
            with watching() as log:
                found = trained(mesh, options, mode="hybrid_shard")
            print(sum(value.double().abs().sum().item() for value in found), USED in log)
        dist.destroy_process_group()
    if artifacts:
        Path(artifacts).write_bytes(torch.compiler.save_cache_artifacts()[0])


@pytest.mark.slow
def test_another_process_uses_it_and_artifacts_hold_it(tmp_path):
    """Not a process that traces, which is to see each graph."""
    cache, other, file = tmp_path / "one", tmp_path / "two", str(tmp_path / "artifacts")
    first = in_a_process(cache, f"steps(artifacts={file!r})")
    assert [line.split()[1] for line in first] == ["False", "False"]
    used = [line.replace("False", "True") for line in first]
    *again, one, two = in_a_process(cache, "steps(ranks=(0, 1))", seed=2)
    assert again == used
    assert one.endswith("False") and two.endswith("False")  # of another rank
    traces = tmp_path / "traces"
    assert in_a_process(cache, "steps()", TORCH_TRACE=str(traces)) == first
    assert "simplefsdp_backward" in "".join(file.read_text() for file in traces.glob("*"))
    other.mkdir()
    assert in_a_process(other, f"steps(load={file!r})", seed=3) == used
    assert len(list((other / "simplefsdp_plans").glob("*"))) == 2
