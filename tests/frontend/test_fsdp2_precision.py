"""What FSDP2's own tests of mixed precision ask for, on two ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from beside import (
    DIM,
    EXECUTORS,
    Mlp,
    call_of,
    check_grads,
    compiled,
    mean,
    mesh_of,
    mine,
    numbers,
    wrapped,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from simplefsdp import simple_fsdp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def add_reduced_gradients(plain: nn.Module, compute, reduce, whole: torch.Tensor) -> None:
    """What two ranks that compute in one dtype, and reduce in another, add to the gradients."""
    narrow = copy.deepcopy(plain).to(compute)
    narrow.zero_grad()
    mean(narrow(mine(whole).to(compute))).backward()
    for param, low in zip(plain.parameters(), narrow.parameters(), strict=True):
        grad = low.grad.to(reduce)
        dist.all_reduce(grad)
        grad = (grad / dist.get_world_size()).to(param.dtype)
        param.grad = grad if param.grad is None else param.grad + grad


# param_dtype, reduce_dtype, tolerance: of rounding once more, in the dtype that is reduced in.
DTYPES = [
    (BF16, FP32, 1e-3),
    (FP16, FP16, 5e-3),
    (FP32, BF16, 1e-2),
    (None, BF16, 1e-2),
]


def accumulate(param_dtype, reduce_dtype, tolerance: float, executor: str) -> None:
    plain = nn.Sequential(Mlp(), Mlp())
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = wrapped(plain, mp_policy=policy)
    call = call_of(model, executor)
    for micro in range(3):
        whole = numbers(4, DIM, seed=micro)
        output = call(mine(whole))
        assert output.dtype == (param_dtype or FP32)
        mean(output).backward()
        add_reduced_gradients(plain, param_dtype or FP32, reduce_dtype, whole)
    check_grads(plain, model, tolerance=tolerance)  # their dtype, too: the parameter's own


@pytest.mark.parametrize(("param_dtype", "reduce_dtype", "tolerance"), DTYPES)
def test_dtypes_of_compute_and_reduce(pools, param_dtype, reduce_dtype, tolerance):
    pools(2).run(accumulate, param_dtype, reduce_dtype, tolerance, "eager")


@pytest.mark.slow
def test_dtypes_of_compute_and_reduce_compiled(pools):
    # Compiled, an intermediate may keep its fp32.
    pools(2).run(accumulate, BF16, FP32, 1e-2, "aot_eager")


def test_a_model_that_is_cast_after_the_wrap(fake_mesh):
    layers = nn.Sequential(nn.Linear(DIM, DIM, dtype=BF16), nn.Linear(DIM, DIM, dtype=BF16))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    model = simple_fsdp(layers, fake_mesh(2), mp_policy=policy).to(FP32)
    output = model(numbers(2, DIM))
    output.sum().backward()
    assert output.dtype == BF16
    assert all(p.grad.dtype == p.dtype == FP32 for p in model.parameters())


class Records(nn.Module):
    """Two layers, a value from elsewhere, and the dtypes that they were given."""

    def __init__(self, cast: torch.dtype | None = None) -> None:
        super().__init__()
        self.one, self.other, self.cast = nn.Linear(DIM, DIM), Other(), cast
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        hidden = self.one(x)
        self.seen = [x.dtype, hidden.dtype]
        hidden = hidden if self.cast is None else hidden.to(self.cast)
        output = self.other(hidden, torch.ones(2, DIM))
        self.seen += [*self.other.seen, output.dtype]
        return output


class Other(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x, elsewhere):
        self.seen = [x.dtype, elsewhere.dtype]
        return super().forward(x)


NONE = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(param_dtype=FP16)
UNCAST = MixedPrecisionPolicy(param_dtype=FP16, cast_forward_inputs=False)
HALF_INSIDE = MixedPrecisionPolicy(param_dtype=FP16, output_dtype=FP32)
# Policies of the layers and of the model, a cast of the model's own, and the dtypes: of the model's
# input, of the first layer's output, of both of the second one's inputs, and of the output.
CASTS = [
    (None, HALF, NONE, None, [FP32, FP32, FP16, FP16, FP16]),
    (None, UNCAST, NONE, FP16, [FP32, FP32, FP16, FP32, FP16]),
    (HALF_INSIDE, None, NONE, None, [FP32, FP32, FP32, FP32, FP32]),
    (None, HALF, HALF, None, [FP16, FP16, FP16, FP16, FP16]),
    (None, UNCAST, HALF, None, [FP16, FP16, FP16, FP32, FP16]),
]


@pytest.mark.parametrize(("one", "other", "whole", "cast", "wanted"), CASTS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_policies_of_parts(fake_mesh, one, other, whole, cast, wanted, executor):
    model, mesh = Records(cast), fake_mesh(2)
    for part, policy in ((model.one, one), (model.other, other), (model, whole)):
        if policy is not None:
            simple_fsdp(part, mesh, mp_policy=policy)
    call_of(model, executor)(numbers(2, DIM)).sum().backward()
    assert model.seen == wanted
    assert all(p.grad.dtype == FP32 for p in model.parameters())


class Recomputes(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(DIM, DIM), dtype
        self.seen: list[torch.dtype] = []

    def inner(self, x):
        output = self.layer(x)
        self.seen += [x.dtype, output.dtype]
        return output

    def forward(self, x):
        again = checkpoint(self.inner, x.to(self.dtype), use_reentrant=False, early_stop=False)
        return again.float().sum()


@pytest.mark.parametrize(
    ("policy", "given", "wanted"),
    [
        (MixedPrecisionPolicy(param_dtype=BF16), FP32, [FP32, BF16]),
        (
            MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32, cast_forward_inputs=False),
            BF16,
            [BF16, FP32],
        ),
    ],
    ids=["inputs", "outputs"],
)
def test_casts_are_done_again_when_recomputing(fake_mesh, policy, given, wanted):
    model, mesh = Recomputes(given), fake_mesh(2)
    simple_fsdp(model.layer, mesh, mp_policy=policy)
    simple_fsdp(model, mesh, mp_policy=policy)
    model(numbers(2, DIM)).backward()
    assert model.seen == wanted * 2


NORMS = {
    "layer": (lambda: [nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 3)], (4, DIM)),
    "batch_1d": (lambda: [nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 3)], (4, DIM)),
    "batch_2d": (lambda: [nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)], (3, 1, 9, 9)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("how", ["buffers", "policy"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norms(solo_mesh, norm, how, dtype):
    """With buffers of the low dtype, as torch's CPU kernels want them, or a policy of its own."""
    layers, shape = NORMS[norm][0](), NORMS[norm][1]
    model, mesh = nn.Sequential(*layers), solo_mesh
    if how == "policy":
        simple_fsdp(model[1], mesh, mp_policy=MixedPrecisionPolicy(output_dtype=dtype))
    simple_fsdp(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    for name, buffer in list(model[1].named_buffers()):
        assert buffer.dtype in (FP32, torch.int64)  # no policy casts a buffer
        if how == "buffers" and buffer.is_floating_point():
            setattr(model[1], name, buffer.to(dtype))
    x = numbers(*shape) if how == "buffers" else numbers(*shape).to(dtype)
    output = model(x)
    output.sum().backward()
    assert output.dtype == dtype
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters())


class OddInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(11, DIM), Mlp()

    def forward(self, tokens, *, mask, scale=1.0, name="", extra=None):
        dtypes = {key: value.dtype for key, value in extra.items()}
        hidden = self.mlp(self.embed(tokens)).masked_fill(mask[..., None], 0.0)
        return {"y": hidden * scale, "name": name, "none": None, "ids": tokens, "dtypes": dtypes}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_only_real_floating_point_values_are_cast(fake_mesh, executor):
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float64)
    model = simple_fsdp(OddInputs(), fake_mesh(2), mp_policy=policy)
    tokens = torch.arange(6).view(2, 3)
    extra = {"f64": torch.ones(2, dtype=torch.float64), "c": torch.ones(2, dtype=torch.complex64)}
    call = model if executor == "eager" else compiled(model)
    output = call(tokens, mask=tokens > 3, scale=2.0, name="a", extra=extra)
    assert output["dtypes"] == {"f64": BF16, "c": torch.complex64}
    assert (output["y"].dtype, output["ids"].dtype) == (torch.float64, torch.int64)
    assert (output["name"], output["none"]) == ("a", None)


class WithIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.counts = nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.layers(x) * self.counts.sum()


def unfreeze_after_an_evaluation() -> None:
    plain = WithIntegers()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = wrapped(plain, mp_policy=policy).requires_grad_(False)
    with torch.no_grad():
        model(mine(numbers(4, DIM)))
    model.layers.requires_grad_(True)
    mean(model(mine(numbers(4, DIM)))).backward()
    mean(plain(numbers(4, DIM))).backward()
    check_grads(plain, model, tolerance=3e-2)


def test_unfreezing_after_an_evaluation(pools):
    pools(2).run(unfreeze_after_an_evaluation)


def wrong_dtype(mesh, **policy) -> None:
    simple_fsdp(Mlp(), mesh, mp_policy=MixedPrecisionPolicy(**policy))


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", ["bf16", torch.int32])
def test_a_policy_that_says_no_dtype(fake_mesh, name, dtype):
    message = rf"mp_policy\.{name}: expected a floating-point torch\.dtype or None, got"
    with pytest.raises(TypeError, match=message):
        wrong_dtype(fake_mesh(2), **{name: dtype})


def test_a_policy_whose_casts_nobody_would_do(fake_mesh):
    layers, mesh = nn.ModuleList([Mlp(), Mlp()]), fake_mesh(2)
    for policy in (HALF, MixedPrecisionPolicy(output_dtype=FP32)):
        with pytest.raises(ValueError, match="ModuleList has no forward; wrap the modules in it"):
            simple_fsdp(layers, mesh, mp_policy=policy)
    simple_fsdp(layers, mesh, mp_policy=UNCAST)
    assert layers[0](numbers(2, DIM).half()).dtype == FP16


def train_two_policies() -> None:
    plain = nn.Sequential(Mlp(), Mlp())
    model = copy.deepcopy(plain)
    simple_fsdp(model[0], mesh_of(), mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
    simple_fsdp(model, mesh_of())
    mean(model(mine(numbers(4, DIM)))).backward()
    mean(plain(numbers(4, DIM))).backward()
    check_grads(plain, model, tolerance=2e-2)


def test_two_policies_in_one_model(pools):
    pools(2).run(train_two_policies)
