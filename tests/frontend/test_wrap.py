"""The wrapped module behaves as the plain one does, but for its sharded parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from zoo import Zoo, batch, loss_of

from simplefsdp import init_weights, simple_fsdp
from simplefsdp.frontend import after_wrap, gather
from simplefsdp.frontend.wrapped import LAYOUTS
from simplefsdp.rank_guard import RankMismatchError


@pytest.fixture
def no_collectives(monkeypatch):
    """Any gather from here on fails the test."""

    def refuse(*args):
        raise AssertionError("gathered")

    monkeypatch.setattr("simplefsdp.frontend.parametrization.gather", refuse)


def test_names_shapes_and_classes_are_those_of_the_plain_model(fake_mesh):
    plain = Zoo()
    model = simple_fsdp(copy.deepcopy(plain), fake_mesh(4))
    wanted, got = dict(plain.named_parameters()), dict(model.named_parameters())
    assert list(got) == list(wanted)
    for fqn, param in got.items():
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor)
        assert (param.shape, param.dtype) == (wanted[fqn].shape, wanted[fqn].dtype)
        assert param.requires_grad == wanted[fqn].requires_grad
        expected = Shard(0) if param.dim() else Replicate()
        assert param.placements == (expected,)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model, Zoo) and isinstance(model.blocks[0].up, nn.Linear)
    assert isinstance(model.listed, nn.ParameterList)
    assert all(type(a) is type(b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))


def test_local_shards_follow_chunk(fake_mesh):
    model = simple_fsdp(Zoo(), fake_mesh(4, rank=3))
    params = dict(model.named_parameters())
    assert params["blocks.0.up.weight"].to_local().shape == (1, 8)  # 10 rows: 3, 3, 3, 1
    assert params["tiny"].to_local().shape == (0, 8)  # 3 rows: 1, 1, 1, 0
    assert params["scale"].to_local().shape == ()


def test_tied_parameters_stay_one_object(fake_mesh):
    model = simple_fsdp(Zoo(), fake_mesh(4))
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    assert model.head.__dict__[LAYOUTS]["weight"] == model.embed.__dict__[LAYOUTS]["weight"]


def test_repr_is_the_plain_models_and_gathers_nothing(fake_mesh, no_collectives):
    plain = Zoo()
    text = repr(plain)
    model = simple_fsdp(plain, fake_mesh(4))
    lines = [line for line in text.splitlines() if "Parameter containing" not in line]
    assert [x for x in repr(model).splitlines() if "Parameter containing" not in x] == lines


def test_get_parameter_gives_the_shard(fake_mesh, no_collectives):
    model = simple_fsdp(Zoo(), fake_mesh(4))
    for fqn, param in model.named_parameters():
        assert model.get_parameter(fqn) is param


def test_deepcopy_is_independent_and_wrapped(fake_mesh):
    model = simple_fsdp(Zoo(), fake_mesh(4))
    model.load_state_dict(Zoo().state_dict())  # the fake scatter of the wrap leaves garbage
    twin = copy.deepcopy(model)
    assert twin.head._parameters["weight"] is twin.embed._parameters["weight"]
    for (fqn, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert a is not b and isinstance(b, DTensor), fqn
        assert torch.equal(a.to_local(), b.to_local())
    with torch.no_grad():
        twin.get_parameter("tiny").zero_()
    assert model.get_parameter("tiny").to_local().abs().sum() > 0
    loss_of(twin, *batch(0, 1)).backward()
    assert twin.get_parameter("tiny").grad is not None
    assert model.get_parameter("tiny").grad is None


def test_one_subclass_per_class_and_state_on_the_instance(fake_mesh):
    mesh = fake_mesh(4)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    first = simple_fsdp(nn.Linear(8, 8), mesh, mp_policy=narrow)
    second = simple_fsdp(nn.Linear(8, 8, bias=False), mesh)
    assert type(first) is type(second) is not nn.Linear
    assert first(torch.ones(2, 8)).dtype == torch.bfloat16
    assert second(torch.ones(2, 8)).dtype == torch.float32
    assert second.bias is None
    assert type(nn.Linear(8, 8)) is nn.Linear


def test_a_name_that_is_a_parameter_on_one_instance_only(fake_mesh):
    class Scale(nn.Module):
        def __init__(self, learned: bool) -> None:
            super().__init__()
            if learned:
                self.gain = nn.Parameter(torch.ones(4))
            else:
                self.register_buffer("gain", torch.full((4,), 2.0))
            self.other = nn.Parameter(torch.ones(4))

    mesh = fake_mesh(2)
    simple_fsdp(Scale(True), mesh)
    fixed = simple_fsdp(Scale(False), mesh)
    assert torch.equal(fixed.gain, torch.full((4,), 2.0))
    fixed.note = "free attributes still work"
    assert fixed.note
    fresh = type(fixed)(True)  # model code may make new instances of its own class
    assert isinstance(fresh.gain, nn.Parameter) and not isinstance(fresh.gain, DTensor)
    with pytest.raises(AttributeError, match="missing"):
        _ = fixed.missing


def test_mixed_precision_casts_inputs_and_outputs(fake_mesh):
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x, *, scale):
            self.seen = (x["x"].dtype, x["ids"].dtype, scale.dtype, self.weight.dtype)
            return {"y": x["x"] @ self.weight}

    def run(**fields):
        policy = MixedPrecisionPolicy(**fields)
        model = simple_fsdp(Probe(), mesh, mp_policy=policy)
        inputs = {"x": torch.ones(2, 4, dtype=model_input), "ids": torch.zeros(2).long()}
        out = model(inputs, scale=torch.ones(()))
        return (*model.seen, out["y"].dtype)

    mesh, model_input = fake_mesh(2), torch.float32
    half, full, ids = torch.bfloat16, torch.float32, torch.int64
    assert run() == (full, ids, full, full, full)
    assert run(param_dtype=half) == (half, ids, half, half, half)
    assert run(param_dtype=half, output_dtype=full) == (half, ids, half, half, full)
    model_input = half
    assert run(param_dtype=half, cast_forward_inputs=False) == (half, ids, full, half, half)


def test_load_state_dict_takes_sharded_and_plain_values(fake_mesh, no_collectives):
    plain, mesh = Zoo(), fake_mesh(4, rank=2)
    model = simple_fsdp(Zoo(), mesh)
    result = model.load_state_dict(plain.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    up = model.get_parameter("blocks.0.up.weight").to_local()
    assert torch.equal(up, plain.blocks[0].up.weight[6:9])
    twin = simple_fsdp(Zoo(), mesh)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.get_parameter("blocks.0.up.weight").to_local(), up)
    wrong = dict(plain.state_dict(), tiny=torch.zeros(4, 8))
    with pytest.raises(RuntimeError, match="size mismatch for tiny"):
        model.load_state_dict(wrong)


def test_marks_that_users_put_on_parameters_survive(fake_mesh):
    layer = nn.Linear(4, 4)
    layer.bias.no_weight_decay = True
    assert simple_fsdp(layer, fake_mesh(2)).get_parameter("bias").no_weight_decay


def test_inner_wrap_keeps_its_own_mesh_and_policy(fake_mesh):
    mesh = fake_mesh(2, 2, names=("replicate", "shard"))
    model = Zoo()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    simple_fsdp(model.blocks[1], mesh, mode="hybrid_shard", mp_policy=policy)
    simple_fsdp(model, mesh["shard"])
    assert model.get_parameter("blocks.1.up.weight").device_mesh == mesh
    assert model.get_parameter("blocks.0.up.weight").device_mesh == mesh["shard"]
    assert model.blocks[1](torch.ones(2, 8)).dtype == torch.bfloat16
    assert model.blocks[1].up.__dict__[LAYOUTS]["weight"].spec.fqn == "blocks.1.up.weight"


# --- errors: each names the thing, what was expected, what came, and the remedy -------------------


def test_wrong_arguments(fake_mesh):
    mesh, line = fake_mesh(2, 2), nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
        simple_fsdp("model", mesh)
    with pytest.raises(TypeError, match=r"mesh: expected .*DeviceMesh, got int; make one with"):
        simple_fsdp(line, 4)
    with pytest.raises(ValueError, match=r"mode: expected one of fully_shard, .* got 'zero3'"):
        simple_fsdp(line, mesh, mode="zero3")
    with pytest.raises(
        ValueError, match=r"'fully_shard' needs a 1-D mesh.* got a 2-D .*mode='hybrid_shard'"
    ):
        simple_fsdp(line, mesh)
    with pytest.raises(TypeError, match=r"mp_policy: expected .*MixedPrecisionPolicy"):
        simple_fsdp(line, mesh, mode="hybrid_shard", mp_policy=torch.bfloat16)
    with pytest.raises(
        TypeError,
        match=r"reshard_after_forward: expected .* 'auto' or a number of ranks, got 'never'",
    ):
        simple_fsdp(line, mesh, mode="hybrid_shard", reshard_after_forward="never")
    assert type(line) is nn.Linear  # a refused wrap leaves the model as it was


def test_hybrid_shard_needs_two_dimensions(fake_mesh):
    with pytest.raises(ValueError, match="'hybrid_shard' needs a 2-D mesh"):
        simple_fsdp(nn.Linear(4, 4), fake_mesh(4), mode="hybrid_shard")


@pytest.mark.parametrize("part", ["", "blocks", "blocks.0", "blocks.0.up"])
def test_second_wrap_is_refused(fake_mesh, part):
    mesh = fake_mesh(2)
    model = simple_fsdp(Zoo(), mesh)
    with pytest.raises(ValueError, match="already wrapped by simple_fsdp"):
        simple_fsdp(model.get_submodule(part), mesh)


def test_parameter_tied_across_two_wraps_is_refused(fake_mesh):
    mesh, model = fake_mesh(2), Zoo()
    simple_fsdp(model.embed, mesh)
    with pytest.raises(ValueError, match=r"head\.weight: is tied to a parameter that an earlier"):
        simple_fsdp(model, mesh)


def test_second_reference_to_a_parameter_is_refused(fake_mesh):
    layer = nn.Linear(4, 4)
    layer.kept = [layer.weight]
    with pytest.raises(ValueError, match=r"weight: module 'root' \(Linear\).*'kept'"):
        simple_fsdp(layer, fake_mesh(2))


@pytest.mark.parametrize("part", ["", "0"])
def test_what_another_fsdp_or_ddp_has_wrapped_is_refused(fake_mesh, part):
    mesh, model = fake_mesh(2), nn.Sequential(nn.Linear(4, 4))
    fully_shard(model.get_submodule(part), mesh=mesh)
    with pytest.raises(ValueError, match=r"is wrapped by fully_shard; simple_fsdp takes its place"):
        simple_fsdp(model, mesh)
    plain = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=mesh.get_group())
    with pytest.raises(ValueError, match=r"is a DistributedDataParallel; .*mode='replicate'"):
        simple_fsdp(plain, mesh)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (nn.Embedding, {"max_norm": 1.0}, r"^0: .*max_norm.* writes to the weight in forward"),
        (nn.EmbeddingBag, {"sparse": True}, r"^0: .*sparse=True.* no dense gradient"),
    ],
)
def test_embeddings_that_write_or_have_sparse_gradients_are_refused(fake_mesh, kind, options, says):
    mesh = fake_mesh(2)
    with pytest.raises(ValueError, match=says):
        simple_fsdp(nn.Sequential(kind(4, 4, **options)), mesh)
    if "sparse" in options:  # a frozen one has no gradient
        simple_fsdp(nn.Sequential(kind(4, 4, **options)).requires_grad_(False), mesh)


def test_lazy_parameter_is_refused(fake_mesh):
    with pytest.raises(ValueError, match="weight: is not initialized"):
        simple_fsdp(nn.LazyLinear(4), fake_mesh(2))


def test_replaced_parameter_is_named_when_read(fake_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    layer.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(TypeError, match="weight: expected the sharded DTensor, got Parameter"):
        nn.Module.__call__(layer.requires_grad_(False), torch.ones(2, 4))


def test_reading_a_meta_parameter_says_what_is_missing(fake_mesh):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    simple_fsdp(model, fake_mesh(2))
    options = {"executor": "aot_eager"}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    for call in (model, compiled):
        with pytest.raises(ValueError, match=r"0\.weight: is on the meta device.*init_weights"):
            call(torch.ones(2, 4))
    whole = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
    with pytest.raises(Unsupported, match=r"is on the meta device.*init_weights"):
        whole(torch.ones(2, 4))


def compiles(model: nn.Module, x: torch.Tensor) -> int:
    """How many graphs a call makes."""
    before = counters["stats"]["unique_graphs"]
    model(x)
    return counters["stats"]["unique_graphs"] - before


def test_a_call_on_meta_is_no_reason_to_run_eagerly_later(fake_mesh):
    torch._dynamo.reset()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    simple_fsdp(model, fake_mesh(2))
    model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    with pytest.raises(ValueError, match="is on the meta device"):
        model(torch.ones(2, 4))
    init_weights(model, seed=0)
    assert compiles(model, torch.ones(2, 4)) == 1


class Refuses(nn.Linear):
    longest = 2

    def forward(self, x):
        if len(x) > self.longest:
            raise ValueError("too long")
        return super().forward(x)


def test_an_exception_in_one_models_forward_leaves_others_compiled(fake_mesh, caplog):
    """Dynamo gives up on code that raises as it is traced; all models shared some of it."""
    torch._dynamo.reset()
    after_wrap._warn_of_skipped.cache_clear()
    mesh, options = fake_mesh(2), {"executor": "aot_eager"}
    model, other = simple_fsdp(Refuses(4, 4), mesh), simple_fsdp(nn.Linear(4, 4), mesh)
    for some in (model, other):
        some.compile(backend="simplefsdp", options=options)
    with pytest.raises(ValueError, match="too long"):
        model(torch.ones(3, 4))
    model.longest = 3
    caplog.clear()
    with caplog.at_level("WARNING", logger="simplefsdp"):
        assert compiles(model, torch.ones(3, 4)) == 0
        assert compiles(other, torch.ones(3, 4)) == 1
    assert caplog.text.count("Refuses was compiled, but runs eagerly") <= 1
    torch.compiler.reset()
    assert compiles(model, torch.ones(3, 4)) == 1


def test_who_asks_for_eager_code_is_not_warned(fake_mesh, caplog):
    torch._dynamo.reset()
    after_wrap._warn_of_skipped.cache_clear()
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    with caplog.at_level("WARNING", logger="simplefsdp"):
        with torch.compiler.set_stance("force_eager"):
            assert compiles(model, torch.ones(2, 4)) == 0
        model.forward(torch.ones(2, 4))
    assert "runs eagerly" not in caplog.text


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_who_forgets_the_backend_is_told(fake_mesh, caplog, backend):
    """`model.compile()`, out of habit, trains as ever, and nothing is bucketed."""
    torch._dynamo.reset()
    gather._warn_of_torchs_backend.cache_clear()
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    model.compile(backend=backend)
    with caplog.at_level("WARNING", logger="simplefsdp"):
        assert compiles(model, torch.ones(2, 4)) == 1
    told = 'call model.compile(backend="simplefsdp")' in caplog.text
    assert told == (backend == "inductor")


def test_hooks_and_gradients_are_refused_rather_than_lost(fake_mesh):
    mesh, layer = fake_mesh(2), nn.Linear(4, 4)
    handle = layer.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(ValueError, match="weight: has hooks, which the sharded parameter would"):
        simple_fsdp(layer, mesh)
    handle.remove()
    layer.bias.grad = torch.ones(4)
    with pytest.raises(ValueError, match="bias: has a gradient, which"):
        simple_fsdp(layer, mesh)


def test_complex_gradient_keeps_its_imaginary_part(fake_mesh):
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x):
            return (self.weight * x).imag.sum()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = simple_fsdp(Turn(), fake_mesh(1), mp_policy=policy)
    model(torch.ones(2)).backward()
    assert model.get_parameter("weight").grad.to_local().imag.abs().min() == 1


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter | float | None) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.eye(4)), scale

    def forward(self, x):
        x = x @ self.weight
        return x if self.scale is None else x * self.scale


@pytest.mark.parametrize("compiled", [False, True])
def test_a_name_may_be_a_parameter_of_one_and_an_attribute_of_another(solo_mesh, compiled):
    # as an optional bias often is
    layers = [Scaled(None), Scaled(nn.Parameter(torch.full((4,), 3.0))), Scaled(5.0)]
    model = simple_fsdp(nn.Sequential(*layers), solo_mesh)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    assert call(torch.ones(2, 4)).eq(15.0).all()
    model[0].scale, model[2].scale = 2.0, None
    assert call(torch.ones(2, 4)).eq(6.0).all()
    del model[2].scale
    with pytest.raises(AttributeError, match="scale"):
        _ = model[2].scale


def wrap_again_and_differ() -> None:
    """Rank 0 has wrapped such a model before, and must wait for the others all the same."""
    mesh = init_device_mesh("cpu", (2,))
    simple_fsdp(nn.Linear(4, 4), mesh)
    width = 4 if torch.distributed.get_rank() == 0 else 6
    with pytest.raises(RankMismatchError, match="the model given to simple_fsdp"):
        simple_fsdp(nn.Linear(4, width), mesh)


def test_ranks_that_differ_the_second_time_are_told(pools):
    pools(2).run(wrap_again_and_differ)


def test_without_a_mesh_all_ranks_share_the_shards(fake_mesh):
    with pytest.raises(ValueError, match="mesh: there is no process group"):
        simple_fsdp(nn.Linear(4, 4))
    fake_mesh(4)
    layer = simple_fsdp(nn.Linear(4, 8))
    assert layer.weight.device_mesh.shape == (4,)
    assert layer.weight.to_local().shape == (2, 4)
    with pytest.raises(ValueError, match="mode 'hybrid_shard' needs a 2-D mesh"):
        simple_fsdp(nn.Linear(4, 4), mode="hybrid_shard")


def wrapped_without_a_mesh_by_one_rank() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMPLEFSDP_TIMEOUT_S", "0.5")
        if torch.distributed.get_rank() == 0:
            told = r"the model given to simple_fsdp.*rank 1 did not get to"
            with pytest.raises(RankMismatchError, match=told):
                simple_fsdp(nn.Linear(4, 4))


def test_the_rank_that_does_not_wrap_is_named(own_ranks):
    own_ranks.run(wrapped_without_a_mesh_by_one_rank)
    own_ranks.stop()


def test_a_parameter_that_was_taken_away_is_not_named_by_an_outer_wrap(fake_mesh):
    mesh = fake_mesh(2)
    inner = nn.Linear(4, 4)
    inner.gone, inner.none = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    simple_fsdp(inner, mesh)
    del inner.gone
    inner.none = None
    outer = simple_fsdp(nn.Sequential(inner), mesh)
    assert outer[0].__dict__[LAYOUTS]["weight"].spec.fqn == "0.weight"
    assert sorted(dict(outer.named_parameters())) == ["0.bias", "0.weight"]
