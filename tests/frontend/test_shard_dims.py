"""Parameters that ``shard_placement_fn`` has sharded along another dimension than the first."""

from __future__ import annotations

import copy
import logging
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from beside import (
    DIM,
    OPTIONS,
    call_of,
    check_grads,
    mean,
    mesh_of,
    meta,
    mine,
    numbers,
    train_beside,
)
from graphs import capture, gathers, reduces
from sent import Sent
from tensor_classes import LEVELS, SentAsInt8
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simplefsdp import (
    clip_grad_norm_,
    compile_step,
    init_weights,
    load_pretrained,
    microbatch,
    save_pretrained,
    simple_fsdp,
    unsharded,
)
from simplefsdp.pretrained import send

EXPERTS, HIDDEN = 3, 5  # neither is even on 2 ranks; on 4 ranks one has no expert


class Experts(nn.Module):
    """A stack of experts, all of which see all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Parameter(numbers(EXPERTS, HIDDEN, DIM, seed=1) / 3)
        self.down = nn.Parameter(numbers(EXPERTS, DIM, HIDDEN, seed=2) / 3)
        self.out = nn.Linear(DIM, DIM)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up)
        nn.init.uniform_(self.down)

    def forward(self, x):
        flat = self.up.view(EXPERTS * HIDDEN, DIM)  # as a plain parameter, it can be viewed
        hidden = torch.tanh(self.norm(x) @ flat.T).view(-1, EXPERTS, HIDDEN)
        return x + self.out(torch.einsum("teh,edh->td", hidden, self.down))


def placed(param: nn.Parameter) -> Shard | None:
    """Stacks along their second dimension, matrices along their last, the rest as ever."""
    if param.dim() == 3:
        return Shard(1)
    return Shard(-1) if param.dim() == 2 else None


def layers(count: int = 2) -> nn.Module:
    return nn.Sequential(*(Experts() for _ in range(count)))


def batch(step: int) -> tuple[torch.Tensor]:
    return (numbers(8, DIM, seed=step),)


def wrapped(plain: nn.Module, mode: str = "fully_shard", **options) -> nn.Module:
    model = copy.deepcopy(plain)
    return simple_fsdp(model, mesh_of(mode), mode=mode, shard_placement_fn=placed, **options)


# --- training ---------------------------------------------------------------------------------


def trains_as_one_process(mode, options, reshard=True) -> None:
    plain = layers()
    model = wrapped(plain, mode, reshard_after_forward=reshard)
    placements = model[0].up.placements
    assert placements[-1] == Shard(1) and model[0].out.weight.placements[-1] == Shard(1)
    assert model[0].norm.weight.placements[-1] == Shard(0)
    if options is None:
        train_beside(plain, model, model, batch)
    else:
        sent = Sent()
        with capture() as captured:
            call = torch.compile(model, backend="simplefsdp", fullgraph=True, options=options)
            train_beside(plain, model, call, batch)
        (forward,), (backward,) = captured.forward, captured.backward
        assert bool(gathers(backward)) == reshard and reduces(backward)
        sent.start()
        mean(call(*mine(batch(2)))).backward()
        launches = sum(n for name, n in sent.stop().items() if "gather" in name)
        model.zero_grad()
        assert 0 < launches < len(gathers(forward)) * (1 + reshard)  # in buckets
    norms = []
    for m, rows in ((plain, batch(3)), (model, mine(batch(3)))):
        mean(m(*rows)).backward()
        norms.append(clip_grad_norm_(m, 0.5))
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-5)
    for param in model.parameters():
        assert param.grad.to_local().is_contiguous() and param.grad.placements == param.placements


@pytest.mark.parametrize("options", [None, OPTIONS], ids=["eager", "manual"])
def test_training(pools, options):
    pools(2).run(trains_as_one_process, "fully_shard", options)


@pytest.mark.parametrize("executor", ["regions", "inductor"])
@pytest.mark.parametrize("bucketing", ["manual", "auto"])
@pytest.mark.slow(quick=("auto-regions",))
def test_training_by_generated_code(pools, bucketing, executor):
    options = {"bucketing": bucketing, "executor": executor}
    pools(2).run(trains_as_one_process, "fully_shard", options)


@pytest.mark.slow
def test_full_parameters_that_stay_until_backward(pools):
    pools(2).run(trains_as_one_process, "fully_shard", OPTIONS, False)


@pytest.mark.parametrize("options", [None, OPTIONS], ids=["eager", "manual"])
@pytest.mark.slow(quick=["eager"])
def test_training_with_copies(pools, options):
    pools(4).run(trains_as_one_process, "hybrid_shard", options)


def buckets_have_the_same_bits() -> None:
    plain = layers()
    grads = []
    for bucketing in ("none", "manual"):
        model = wrapped(plain)
        call = torch.compile(
            model, backend="simplefsdp", options=OPTIONS | {"bucketing": bucketing}
        )
        for step in range(2):
            mean(call(*mine(batch(step)))).backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_buckets_have_the_same_bits(pools):
    pools(2).run(buckets_have_the_same_bits)


def as_fsdp2_does() -> None:
    """In bf16, where dimensions are even, as FSDP2 asks; losses are equal to the last bit."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    model, theirs = wrapped(plain, mp_policy=policy), copy.deepcopy(plain)
    fully_shard(theirs, mesh=mesh_of(), mp_policy=policy, shard_placement_fn=placed)
    for step in range(2):
        losses = []
        for m in (model, theirs):
            loss = mean(m(*mine(batch(step))))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for own, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert own.placements == other.placements
        assert torch.allclose(own.grad.to_local(), other.grad.to_local(), rtol=1e-6)


def test_as_fsdp2_does(pools):
    pools(2).run(as_fsdp2_does)


def accumulates(executor) -> None:
    plain = layers()
    model = wrapped(plain)
    call = call_of(model, executor)
    whole = [batch(step) for step in range(3)]
    for number, rows in enumerate(whole):
        mean(plain(*rows)).backward()
        with microbatch(model, is_last=number == len(whole) - 1):
            mean(call(*mine(rows))).backward()
    check_grads(plain, model)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_accumulation(pools, executor):
    pools(2).run(accumulates, executor)


def sums_within_copies() -> None:
    """Reduced over shards at each micro-batch, over copies at the last."""
    plain = layers()
    model = wrapped(plain, "hybrid_shard")
    for number in range(3):
        mean(plain(*batch(number))).backward()
        model.set_requires_all_reduce(number == 2)
        mean(model(*mine(batch(number)))).backward()
    check_grads(plain, model)


def test_accumulation_over_copies(pools):
    pools(4).run(sums_within_copies)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def beside_tensor_parallelism(executor) -> None:
    """Both split the same dimension of one matrix, and different ones of the other."""
    plain = TwoLinears()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    simple_fsdp(model, mesh["dp"], shard_placement_fn=placed)
    assert model.up.weight.placements == (Shard(0), Shard(1))
    assert model.down.weight.placements == (Shard(1), Shard(1))
    call = call_of(model, executor)
    own = mesh["dp"].get_local_rank()
    for step in range(2):
        (x,) = batch(step)
        mean(plain(x)).backward()
        mean(call(x.tensor_split(2)[own])).backward()
    check_grads(plain, model)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_tensor_parallelism(pools, executor):
    pools(4).run(beside_tensor_parallelism, executor)


class Odd(nn.Module):
    """What is odd: complex numbers, an uneven last dimension, a dimension of size 0, a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.complex(numbers(DIM, 3), numbers(DIM, 3, seed=1)))
        self.none = nn.Parameter(torch.zeros(DIM, 0))
        self.conv = nn.Conv1d(2, 3, 1)

    def forward(self, x):
        turned = torch.view_as_real(x.to(torch.complex64) @ self.phases).flatten(1)
        y = self.conv(turned.view(len(x), 2, 3)).flatten(1)
        return y + (x @ self.none).sum()


def odd_placed(param: nn.Parameter) -> Shard | None:
    return None if param.dim() == 1 else Shard(1)


def trains_what_is_odd(executor) -> None:
    plain = Odd()
    model = simple_fsdp(copy.deepcopy(plain), mesh_of(), shard_placement_fn=odd_placed)
    call = call_of(model, executor)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model)]
    for step in range(3):
        for number in range(2):
            mean(plain(*batch(2 * step + number))).backward()
            with microbatch(model, is_last=number == 1):
                mean(call(*mine(batch(2 * step + number)))).backward()
        check_grads(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for own, param in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.full_tensor(), param, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_what_is_odd(pools, executor):
    pools(2).run(trains_what_is_odd, executor)


def whole_steps() -> None:
    plain = layers()
    model = wrapped(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model)]
    step = compile_step(lambda x: mean(model(x)), optimizers[1], max_norm=1.0, options=OPTIONS)
    for number in range(3):
        mean(plain(*batch(number))).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(*mine(batch(number)))
    for (fqn, own), param in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.full_tensor(), param, rtol=1e-5, atol=1e-6), fqn


def test_whole_steps(pools):
    pools(2).run(whole_steps)


# --- values -----------------------------------------------------------------------------------


def same_values(folder) -> None:
    plain = layers()
    model = wrapped(plain)
    rows = simple_fsdp(copy.deepcopy(plain), mesh_of())
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1.0)
    model.load_state_dict(plain.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": rows.state_dict()}, checkpoint_id=folder)
    for fqn, wanted in plain.named_parameters():
        for m in (model, rows):
            assert torch.equal(m.get_parameter(fqn).full_tensor(), wanted), fqn
    with unsharded(model):
        model[1].up.data[1, 2] = 7.0
    assert model[1].up.full_tensor()[1, 2].tolist() == [7.0] * DIM
    model.unshard()  # and what is kept is the new value
    with torch.no_grad():
        plain[1].up[1, 2] = 7.0
        assert torch.allclose(model(*batch(0)), plain(*batch(0)), rtol=1e-5)
    model.reshard()


def test_values_come_and_go(pools, tmp_path):
    pools(2).run(same_values, str(tmp_path))


def sent_in_pieces(folder) -> None:
    """A row of 5 columns on 4 ranks: two, two, one and none; 3 rows, 2 at a time."""
    plain = nn.Linear(5, 3)
    model = wrapped(plain)
    with patch.object(send, "_PIECE_NBYTES", 64):
        save_pretrained(model, folder)
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_pretrained(model, folder)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), wanted[name])


def test_safetensors(pools, tmp_path):
    pools(4).run(sent_in_pieces, str(tmp_path / "saved"))


def initialised_alike() -> None:
    whole = []
    for placement_fn in (None, placed):
        model = meta(layers)
        simple_fsdp(model, mesh_of(), shard_placement_fn=placement_fn)
        init_weights(model)
        whole.append([param.full_tensor() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*whole, strict=True))


def test_init_weights_draws_the_same_numbers(pools):
    pools(2).run(initialised_alike)


# --- on paper ---------------------------------------------------------------------------------


def test_parts_without_data(fake_mesh):
    """Rank 2 of 4 has one of five rows, for each has ceil(5 / 4) at most; and two of six."""
    with torch.device("meta"):
        model = layers(1)
    simple_fsdp(model, fake_mesh(4, rank=2), shard_placement_fn=placed)
    assert model[0].up.to_local().shape == (EXPERTS, 1, DIM)
    assert model[0].down.to_local().shape == (EXPERTS, 2, HIDDEN)
    assert model[0].up.shape == (EXPERTS, HIDDEN, DIM)


def test_where_nothing_is_sharded(fake_mesh):
    model = simple_fsdp(layers(1), fake_mesh(2), mode="replicate", shard_placement_fn=placed)
    assert all(p.placements == (Replicate(),) for p in model.parameters())


def test_what_cannot_be_sharded_so(fake_mesh):
    mesh, model = fake_mesh(2), layers(1)
    with pytest.raises(TypeError, match=r"0\.up: shard_placement_fn: expected None or .* got 1"):
        simple_fsdp(model, mesh, shard_placement_fn=lambda _: 1)
    with pytest.raises(ValueError, match=r"0\.norm\.weight: .* got Shard\(dim=1\) for a parameter"):
        simple_fsdp(model, mesh, shard_placement_fn=lambda p: Shard(1))
    quantized = nn.Linear(4, 4, bias=False)
    quantized.weight = nn.Parameter(SentAsInt8(quantized.weight.detach(), LEVELS))
    with pytest.raises(ValueError, match=r"weight: .* for a SentAsInt8, whose class says how its"):
        simple_fsdp(quantized, mesh, shard_placement_fn=placed)
    assert not any(isinstance(p, DTensor) for p in model.parameters())  # nothing was changed


def test_much_padding_is_told(fake_mesh, caplog):
    mesh = fake_mesh(64)
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": nn.Module(), "norm": nn.LayerNorm(100)})
        model["experts"].up = nn.Parameter(torch.empty(8, 512, 512))
    other = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        simple_fsdp(other, mesh, shard_placement_fn=placed)
        assert not caplog.records
        simple_fsdp(model, mesh)
    assert "gathers send 8.0 times the bytes" in caplog.text
    assert "64 ranks cannot evenly share the dimension along which experts.up, norm" in caplog.text
    assert "Shard(1) if param.dim() == 3 else None" in caplog.text


@pytest.mark.parametrize(
    ("shape", "advice"),
    [((8, 8, 64, 4096), "Shard(2) if"), ((3, 65, 6400), "Shard(2) if"), ((65, 70, 69, 3), "")],
)
def test_advice_on_padding(fake_mesh, caplog, shape, advice):
    """Another dimension is named only if it has less padding, and of those the one with least."""
    with torch.device("meta"):
        model = nn.Module()
        model.w = nn.Parameter(torch.empty(shape))
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        simple_fsdp(model, fake_mesh(64), shard_placement_fn=lambda _: Shard(0 if advice else 1))
    assert "gathers send" in caplog.text
    assert ("Shard along another one" in caplog.text) == bool(advice)
    assert advice in caplog.text
