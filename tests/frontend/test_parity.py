"""Same losses and gradients as one process on the whole batch, and as FSDP2, on real ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from graphs import capture, gathers, reduces
from parity import POLICIES, compare_gradients, global_loss, local, mesh_for, relative_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from zoo import Small, Zoo, batch, loss_of

from simplefsdp import clip_grad_norm_, simple_fsdp

STEPS = 3
# fp32: summation order only. bf16: 8 bits of mantissa, over a few matmuls.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}


def compile_for(model: nn.Module, executor: str) -> nn.Module:
    if executor == "eager":
        return model
    # The default is "auto".
    options = {"executor": executor} | ({"bucketing": "manual"} if executor == "aot_eager" else {})
    return torch.compile(model, backend="simplefsdp", fullgraph=True, options=options)


def compare_with_one_process(mode, precision, reshard, executor, build=Zoo, **kind):
    torch.manual_seed(1)
    plain = build(**{"mixed": False, **kind})
    model = copy.deepcopy(plain)
    policy = POLICIES[precision]
    simple_fsdp(model, mesh_for(mode), mode=mode, mp_policy=policy, reshard_after_forward=reshard)
    with capture() as captured:
        run = compile_for(model, executor)
        train_side_by_side(plain, model, run, 1e-2 if plain.mixed else TOLERANCE[precision])
    if executor != "eager":  # what was compared really is what the passes made
        (forward,), (backward,) = captured.forward, captured.backward
        assert bool(gathers(forward)) == (mode != "replicate")
        assert bool(gathers(backward)) == (reshard and mode != "replicate")
        assert reduces(backward)


def train_side_by_side(plain, model, run, tolerance):
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(STEPS):
        tokens, targets = batch(step, dist.get_world_size())
        wanted = loss_of(plain, tokens, targets)
        wanted.backward()
        loss = loss_of(run, local(tokens), local(targets))
        loss.backward()
        assert global_loss(loss) == pytest.approx(wanted.item(), rel=tolerance)
        if step == 0:
            compare_gradients(plain, model, tolerance)
        norms = [clip_grad_norm_(m, 0.5) for m in (plain, model)]
        assert relative_error(norms[1], norms[0]) < tolerance, step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


MODES = ["fully_shard", "hybrid_shard", "replicate"]
# hybrid_shard needs 4 ranks to be what it says; the others run on 2, and once on 4
RANKS_MODE_PRECISION = [
    (2, "fully_shard", "fp32"),
    (2, "fully_shard", "bf16"),
    (2, "replicate", "fp32"),
    (4, "fully_shard", "fp32"),
    (4, "hybrid_shard", "bf16"),
]


@pytest.mark.parametrize(("ranks", "mode", "precision"), RANKS_MODE_PRECISION)
def test_eager_equals_one_process(pools, ranks, mode, precision):
    pools(ranks).run(compare_with_one_process, mode, precision, True, "eager")


@pytest.mark.slow(quick=["2-replicate-fp32"])
@pytest.mark.parametrize(("ranks", "mode", "precision"), RANKS_MODE_PRECISION)
def test_compiled_graphs_equal_one_process(pools, ranks, mode, precision):
    pools(ranks).run(compare_with_one_process, mode, precision, True, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_kept_from_forward_to_backward_equals_one_process(pools, ranks):
    """In fp32: see the generated code below."""
    pools(ranks).run(compare_with_one_process, "fully_shard", "bf16", False, "aot_eager")


@pytest.mark.slow(quick=["2-fully_shard-fp32-False-Zoo-inductor"])
@pytest.mark.parametrize(
    ("ranks", "mode", "precision", "reshard", "build", "executor"),
    [
        (2, "fully_shard", "fp32", False, Zoo, "inductor"),
        (2, "fully_shard", "fp32", True, Zoo, "regions"),
        (4, "hybrid_shard", "bf16", True, Small, "inductor"),
        (4, "hybrid_shard", "bf16", False, Small, "regions"),
    ],
)
def test_generated_code_equals_one_process(pools, ranks, mode, precision, reshard, build, executor):
    arguments = (mode, precision, reshard, executor, build)
    pools(ranks).run(compare_with_one_process, *arguments, timeout=300)


def compare_resharding_by_plan():
    torch.manual_seed(1)
    plain = Zoo(mixed=False)
    model = simple_fsdp(copy.deepcopy(plain), mesh_for("fully_shard"), reshard_after_forward="auto")
    options = {"executor": "aot_eager", "memory_budget_gb": 1.0}
    with capture() as captured:
        run = torch.compile(model, backend="simplefsdp", fullgraph=True, options=options)
        train_side_by_side(plain, model, run, TOLERANCE["fp32"])
    assert gathers(captured.forward[0]) and not gathers(captured.backward[0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_resharding_by_plan(pools, ranks):
    pools(ranks).run(compare_resharding_by_plan)


def compare_variant(executor, kind):
    compare_with_one_process("fully_shard", "fp32", True, executor, **kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [{"mixed": True}, {"recompute": True}], ids=["mixed_dtypes", "checkpointed"]
)
@pytest.mark.parametrize("ranks", [2])
def test_variants_of_the_model(pools, kind, ranks):
    pools(ranks).run(compare_variant, "aot_eager", kind)


# --- against FSDP2 ------------------------------------------------------------------------------


def compare_with_fsdp2(mode, precision, executor):
    torch.manual_seed(1)
    theirs = Zoo(scalars=False, mixed=False)  # FSDP2 shards no scalars, and groups by dtype
    ours = copy.deepcopy(theirs)
    mesh, policy = mesh_for(mode), POLICIES[precision]
    # one group for all: FSDP2 cannot read a block's parameters from outside, as Zoo does
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    simple_fsdp(ours, mesh, mode=mode, mp_policy=policy)
    run = compile_for(ours, executor)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (theirs, ours)]
    tolerance = TOLERANCE[precision]
    for step in range(STEPS):
        tokens, targets = map(local, batch(step, dist.get_world_size()))
        losses = [loss_of(m, tokens, targets) for m in (theirs, run)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=tolerance)
        for loss in losses:
            loss.backward()
        for (fqn, a), (_, b) in zip(
            theirs.named_parameters(), ours.named_parameters(), strict=True
        ):
            assert (a.grad is None) == (b.grad is None), fqn
            if a.grad is not None and step == 0:
                error = relative_error(b.grad.full_tensor(), a.grad.full_tensor())
                assert error < tolerance, fqn
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow(
    quick=["4-hybrid_shard-fp32-eager", "4-hybrid_shard-bf16-eager", "2-fully_shard-fp32-aot_eager"]
)
@pytest.mark.parametrize(
    ("ranks", "mode", "precision", "executor"),
    [
        (2, "fully_shard", "fp32", "aot_eager"),
        (2, "fully_shard", "bf16", "aot_eager"),
        (4, "hybrid_shard", "fp32", "eager"),
        (4, "hybrid_shard", "bf16", "eager"),
    ],
)
def test_equals_fsdp2(pools, ranks, mode, precision, executor):
    pools(ranks).run(compare_with_fsdp2, mode, precision, executor)


# --- with tensor parallelism --------------------------------------------------------------------


class Mlp(nn.Module):
    """``up`` has 5 rows on each tensor rank, ``out`` 5 and 4: uneven on 2 data ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(7, 9)

    def forward(self, x):
        return self.out(self.norm(self.down(torch.tanh(self.up(x)))))


def compare_tensor_parallel(executor):
    torch.manual_seed(1)
    plain = Mlp()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    simple_fsdp(model, mesh["dp"])
    run = compile_for(model, executor)
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    plain(inputs).square().mean().backward()
    mine = inputs.tensor_split(2)[mesh["dp"].get_local_rank()]
    run(mine).square().mean().backward()
    for fqn, param in plain.named_parameters():
        got = model.get_parameter(fqn)
        assert got.shape == param.shape and got.stride() == param.stride(), fqn
        assert torch.equal(got.full_tensor(), param), fqn
        assert relative_error(got.grad.full_tensor(), param.grad) < 1e-5, fqn
    wanted = clip_grad_norm_(plain, 1e-3)
    total = clip_grad_norm_(model, 1e-3)  # 2-D (up, down) and 1-D (norm) meshes in one norm
    assert not isinstance(total, DTensor)
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    grad = model.get_parameter("up.weight").grad.full_tensor()
    assert relative_error(grad, plain.up.weight.grad) < 1e-5


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_tensor_parallel_2_by_data_parallel_2(pools, executor):
    pools(4).run(compare_tensor_parallel, executor)


# --- the gradient norm --------------------------------------------------------------------------


def compare_norms():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 7))
    model = copy.deepcopy(plain)
    simple_fsdp(model[0], mesh, mode="hybrid_shard")
    simple_fsdp(model[1], mesh["shard"])
    sharded = dict(model.named_parameters())
    for fqn, param in plain.named_parameters():
        param.grad = torch.randn_like(param)
        ours = sharded[fqn]
        if isinstance(ours, DTensor):
            ours.grad = distribute_tensor(param.grad, ours.device_mesh, ours.placements)
        else:  # model[2] is left plain
            ours.grad = param.grad.clone()
    for norm_type in (2.0, 1.0, float("inf")):
        wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        total = clip_grad_norm_(model.parameters(), 1e9, norm_type)
        assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert clip_grad_norm_(model, 0.1).item() == pytest.approx(wanted.item(), rel=1e-5)
    for fqn, param in plain.named_parameters():
        grad = sharded[fqn].grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert relative_error(grad, param.grad) < 1e-5, fqn
    model[0].get_parameter("weight").grad.mul_(float("nan"))
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 is nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def test_norm_over_several_meshes(pools):
    pools(4).run(compare_norms)


# --- the wrap makes one model of many -----------------------------------------------------------


def check_rank_0_speaks_for_all(mode):
    torch.manual_seed(dist.get_rank())  # every rank starts elsewhere
    model = simple_fsdp(Zoo(), mesh_for(mode), mode=mode)
    torch.manual_seed(0)
    wanted = Zoo()
    for fqn, param in wanted.named_parameters():
        assert torch.equal(model.get_parameter(fqn).full_tensor(), param), fqn


@pytest.mark.parametrize("mode", MODES)
def test_rank_0_speaks_for_all(pools, mode):
    pools(4).run(check_rank_0_speaks_for_all, mode)
