"""What FSDP2's own tests of state dicts and of clipping ask for."""

from __future__ import annotations

import copy
import io
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import (
    DIM,
    Mlp,
    check_grads,
    mean,
    mesh_of,
    meta,
    mine,
    numbers,
    rows,
    train_beside,
    whole_of,
    wrapped,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simplefsdp import clip_grad_norm_, compile_step, simple_fsdp, unsharded


def two() -> nn.Module:
    return nn.Sequential(Mlp(), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM))


def save_and_load(model: nn.Module, value: float) -> None:
    """A state dict shares the parameters' memory; loading one writes into it."""
    memory = {fqn: p.to_local().data_ptr() for fqn, p in model.named_parameters()}
    state = dict(model.state_dict())
    for fqn, address in memory.items():
        assert isinstance(state[fqn], DTensor) and state[fqn].to_local().data_ptr() == address
    params = dict(model.named_parameters())
    loaded = {fqn: t.detach().clone().fill_(value) for fqn, t in state.items()}
    model.load_state_dict(loaded)
    for fqn, param in model.named_parameters():
        assert param is params[fqn] and param.to_local().eq(value).all()
        assert param.to_local().data_ptr() == memory[fqn]


@pytest.mark.parametrize("mode", ["fully_shard", "replicate", "hybrid_shard"])
@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_a_state_dict_shares_memory(fake_mesh, mode, dim):
    mesh = fake_mesh(2, 2, rank=3) if mode == "hybrid_shard" else fake_mesh(4, rank=3)
    model = simple_fsdp(nn.Sequential(Mlp(dim), nn.Linear(dim, dim)), mesh, mode=mode)
    save_and_load(model, 1.0)
    optimizer, state = torch.optim.AdamW(model.parameters()), model.state_dict()
    mean(model(numbers(2, dim))).backward()
    optimizer.step()
    save_and_load(model, 2.0)
    assert all(t.to_local().eq(2.0).all() for t in state.values())  # taken before


def assign_in_pieces(kind: str) -> None:
    plain = nn.Sequential(Mlp(), nn.Linear(DIM, DIM))
    model = simple_fsdp(meta(lambda: nn.Sequential(Mlp(), nn.Linear(DIM, DIM))), mesh_of())
    for fqn, param in list(model.named_parameters()):
        value = plain.get_parameter(fqn).detach().clone()
        if kind == "sharded":
            dist.broadcast(value, 0)
            value = nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements))
        model.load_state_dict({fqn: value}, assign=True, strict=False)
    train_beside(plain, model, model, rows)


@pytest.mark.parametrize("kind", ["sharded", "plain"])
def test_a_meta_model_takes_values_piece_by_piece(pools, kind):
    pools(2).run(assign_in_pieces, kind)


def through_torch_and_dcp() -> None:
    plain = two()
    model = wrapped(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    assert list(state) == (list(plain.state_dict()) if dist.get_rank() == 0 else [])
    assert all(torch.equal(value, plain.state_dict()[fqn]) for fqn, value in state.items())
    mean(model(mine(numbers(4, DIM)))).backward()
    optimizer.step()
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    other = wrapped(two())
    other.load_state_dict(torch.load(memory, weights_only=True))
    others = torch.optim.AdamW(other.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    moments = get_optimizer_state_dict(model, optimizer, options=full)
    set_optimizer_state_dict(other, others, moments, options=options)
    for one, two_ in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        same = (t.full_tensor() if isinstance(t, DTensor) else t for t in (one, two_))
        assert torch.equal(*same)
    for ours, theirs in zip(optimizer.state.values(), others.state.values(), strict=True):
        assert torch.equal(ours["exp_avg"].to_local(), theirs["exp_avg"].to_local())


def test_through_torch_save_and_full_state_dicts(pools):
    pools(2).run(through_torch_and_dcp)


def through_one_ranks_file(mode: str) -> None:
    """``torch.save(model.state_dict())`` on rank 0, which others load: rows that rank 0 had."""
    model = wrapped(two(), mode)
    optimizer = torch.optim.AdamW(model.parameters())
    mean(model(mine(numbers(4, DIM)))).backward()
    optimizer.step()
    saved = [{"model": model.state_dict(), "optimizer": optimizer.state_dict()}]
    own = copy.deepcopy(saved[0])
    dist.broadcast_object_list(saved)
    has_own_rows = dist.get_rank() == 0 or mode == "replicate"
    loads = {
        r"0\.row: expected this rank's rows.*full_state_dict=True": lambda: model.load_state_dict(
            saved[0]["model"]
        ),
        r"exp_avg of 0\.row: expected this rank's rows": lambda: optimizer.load_state_dict(
            saved[0]["optimizer"]
        ),
    }
    for told, load in loads.items():
        with nullcontext() if has_own_rows else pytest.raises(ValueError, match=told):
            load()
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_what_one_rank_has_pickled_is_not_loaded_by_another(pools, mode):
    pools(2).run(through_one_ranks_file, mode)


def over_tensor_parallelism(dim: int) -> None:
    """5 and 7 rows: uneven over both; the halves of 7 are 4 and 3."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(dim, 7), nn.Linear(7, dim))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    made = [nn.Sequential(nn.Linear(dim, 7), nn.Linear(7, dim)) for _ in range(2)]
    made.append(meta(lambda: nn.Sequential(nn.Linear(dim, 7), nn.Linear(7, dim))))
    made[0].load_state_dict(plain.state_dict())
    one, other, third = (
        simple_fsdp(parallelize_module(model, mesh["tp"], plan), mesh["dp"]) for model in made
    )
    third.to_empty(device="cpu")
    torch.manual_seed(2)
    for layer in third:
        layer.reset_parameters()
    torch.manual_seed(2)
    for layer in plain if dim == 5 else ():
        layer.reset_parameters()
    for fqn, value in plain.state_dict().items() if dim == 5 else ():
        assert torch.equal(third.get_parameter(fqn).detach().full_tensor(), value), fqn
    other.load_state_dict(one.state_dict())
    for fqn, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[fqn].full_tensor(), value.full_tensor()), fqn
    with unsharded(one):
        full = {fqn: value.clone() for fqn, value in one.state_dict().items()}
    for fqn, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), full[fqn]), fqn


def test_over_tensor_parallelism(pools):
    pools(4).run(over_tensor_parallelism, 5)


# --- what cannot be loaded ----------------------------------------------------------------------


def placed(kind: str, param: DTensor) -> torch.Tensor:
    whole = torch.ones(param.shape)
    if kind == "replicated":
        return distribute_tensor(whole, param.device_mesh, [Replicate()])
    if kind == "by_columns":
        return distribute_tensor(whole, param.device_mesh, [Shard(1)])
    return distribute_tensor(torch.ones(3, *param.shape[1:]), param.device_mesh, [Shard(0)])


@pytest.mark.parametrize("kind", ["replicated", "by_columns", "other_shape"])
def test_a_tensor_that_is_placed_otherwise(fake_mesh, kind):
    layer = simple_fsdp(nn.Linear(DIM, 7, bias=False), fake_mesh(2))
    param = layer.weight
    value = placed(kind, param)
    message = r"weight: expected a DTensor of shape \(7, 6\) placed \(Shard\(dim=0\),\)"
    with pytest.raises(ValueError, match=message):
        layer.weight = nn.Parameter(value)
    if kind != "other_shape":
        message_of_load = r'named "weight", .*placed \(Shard\(dim=0\),\)'
        with pytest.raises(RuntimeError, match=message_of_load):
            layer.load_state_dict({"weight": value}, assign=True)
    assert layer.weight is param
    del layer.weight
    with pytest.raises(ValueError, match=message):
        layer.register_parameter("weight", nn.Parameter(value))


def test_keys_and_shapes_that_do_not_fit_are_named(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    state, plain = dict(model.state_dict()), nn.Sequential(Mlp()).state_dict()
    missing = {fqn: value for fqn, value in state.items() if fqn != "0.row"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.row"'):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        model.load_state_dict({**state, "more": torch.ones(1)})
    for assign in (True, False):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.up\.weight"):
            model.load_state_dict({**plain, "0.up.weight": torch.ones(3, 3)}, assign=assign)
    shards = {fqn: value.to_local() for fqn, value in state.items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.up\.weight"):
        model.load_state_dict(shards)


def test_a_wrapped_module_is_copied_but_not_pickled(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    with pytest.raises(TypeError, match=r"cannot be pickled; save model\.state_dict"):
        torch.save(model, io.BytesIO())


# --- clipping --------------------------------------------------------------------------------


def clip(by_torch: bool) -> None:
    # torch cannot take the largest entry of a rank's empty shard.
    for norm_type in (2, 1, 3) if by_torch else (2, 1, 3, math.inf):
        plain = nn.Sequential(Mlp(), Mlp())
        model = wrapped(plain)
        (1e3 * mean(plain(numbers(4, DIM)))).backward()
        (1e3 * mean(model(mine(numbers(4, DIM))))).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        with CommDebugMode() as sent:
            if by_torch:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=True)
                norm = norm.full_tensor()
            else:
                norm = clip_grad_norm_(model, 0.1, norm_type)
        assert wanted > 0.1 and torch.allclose(norm, wanted, rtol=1e-5)
        assert sent.get_total_counts() == 1  # one all-reduce per dimension of the mesh
        check_grads(plain, model)


@pytest.mark.parametrize("by_torch", [True, False])
def test_clipping(pools, by_torch):
    pools(2).run(clip, by_torch)


def resume_in_new_objects(folder: str) -> None:
    """A new optimizer has no state to load into, unless ``get_state_dict`` makes it."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        simple_fsdp(model, init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def steps(model, optimizer, seed: int) -> list[float]:
        torch.manual_seed(seed)
        losses = []
        for _ in range(3):
            loss = model(torch.rand(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model, optimizer = make()
    steps(model, optimizer, 1)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    wanted = steps(model, optimizer, 2)
    model, optimizer = make()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert steps(model, optimizer, 2) == wanted


def test_a_new_model_and_optimizer_resume_exactly(pools, tmp_path):
    pools(2).run(resume_in_new_objects, str(tmp_path))


# --- state of a plain model's optimizer -----------------------------------------------------------


class Scaled(nn.Module):
    """Its state has the shape of a parameter, or of the count of steps, or of both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = Mlp(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.body(x)


def goes_on_with_plain_state(kind, options, mode, whole_step) -> None:
    plain = Scaled()
    before = kind(plain.parameters(), lr=1e-2, **options)
    for step in range(2):
        mean(plain(*rows(step))).backward()
        before.step()
        before.zero_grad()
    model = wrapped(plain, mode)
    after = kind(model.parameters(), lr=1e-2, **options)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    step_of = compile_step(lambda *x: mean(model(*x)), after) if whole_step else None
    for step in range(2, 4):
        mean(plain(*rows(step))).backward()
        before.step()
        before.zero_grad()
        if step_of is None:
            mean(model(*mine(rows(step)))).backward()
            after.step()
            after.zero_grad()
        else:
            step_of(*mine(rows(step)))
        for (fqn, got), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(got.full_tensor(), wanted, rtol=1e-5, atol=1e-6), fqn
    after.load_state_dict(copy.deepcopy(before.state_dict()))  # once more: now at once
    for param, state in after.state.items():
        sharded = {name for name, value in state.items() if isinstance(value, DTensor)}
        assert sharded == {name for name, value in state.items() if value is not None} - {"step"}
        for value in (state[name] for name in sharded):
            assert value.placements == param.placements
            local = value.to_local()
            assert local.untyped_storage().nbytes() <= max(local.nbytes, 1)


class Gathering(torch.optim.Optimizer):
    """Keeps full momentum, as a Muon that needs whole matrices may do."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            grad, state = whole_of(param.grad), self.state[param]
            momentum = state.setdefault("momentum", torch.zeros_like(grad))
            momentum.mul_(0.9).add_(grad)
            update = momentum
            if isinstance(param, DTensor):
                update = distribute_tensor(
                    momentum, param.device_mesh, param.placements, src_data_rank=None
                )
            param.sub_(update, alpha=0.1)


def resumes_with_full_state() -> None:
    plain = Scaled()
    both = [plain, wrapped(plain)]
    optimizers = [Gathering(m.parameters()) for m in both]
    for step in range(4):
        if step == 2:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            optimizers = [Gathering(m.parameters()) for m in both]
        for optimizer, state in zip(optimizers, states, strict=True) if step > 1 else ():
            optimizer.load_state_dict(state if step == 2 else optimizer.state_dict())
        mean(plain(*rows(step))).backward()
        mean(both[1](*mine(rows(step)))).backward()
        check_grads(*both)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_that_keeps_full_tensors_resumes(pools):
    pools(2).run(resumes_with_full_state)


class Local(torch.optim.SGD):
    """Its state has the shape of this rank's rows, which may be that of the whole."""

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            own = isinstance(param, DTensor)
            local, grad = (t.to_local() if own else t for t in (param, param.grad))
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(local))
            local.sub_(momentum.mul_(0.9).add_(grad), alpha=0.1)


def resumes_with_local_state() -> None:
    plain = nn.Sequential(Scaled(), nn.Linear(DIM, 1))
    model = wrapped(plain)
    optimizers = [Local(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        mean(plain(*rows(step))).backward()
        mean(model(*mine(rows(step)))).backward()
        check_grads(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_subclass_of_torchs_that_keeps_local_tensors_resumes(pools):
    pools(2).run(resumes_with_local_state)


class Warm(torch.optim.AdamW):
    def step(self, closure=None):
        self.param_groups[0]["lr"] = 1e-2
        return super().step(closure)


class OneTensor(torch.optim.Optimizer):
    """Its state of a parameter is no dictionary."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            self.state[param] = torch.zeros_like(param)

    def step(self):
        for param in self.param_groups[0]["params"]:
            assert not self.state[param].to_local().any()


class Around(torch.optim.Optimizer):
    """As timm's Lookahead: it has of torch's hooks those of steps alone."""

    def __init__(self, inner) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, {}

    def step(self):
        self.inner.step()


def test_an_optimizer_around_another(solo_mesh):
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    optimizer, before = Around(torch.optim.SGD(model.parameters())), model.bias.detach().clone()
    for _ in range(2):  # zero_grad() gives it torch's hooks
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.bias, before)


def test_an_optimizer_whose_state_is_no_dictionary(solo_mesh):
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    optimizer = OneTensor(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options", "mode", "whole_step"),
    [
        pytest.param(torch.optim.AdamW, {"amsgrad": True}, "fully_shard", False, id="amsgrad"),
        pytest.param(torch.optim.AdamW, {"fused": True}, "fully_shard", False, id="fused"),
        pytest.param(torch.optim.SGD, {"momentum": 0.9}, "fully_shard", False, id="momentum"),
        pytest.param(Warm, {}, "fully_shard", False, id="subclass"),
        pytest.param(torch.optim.AdamW, {}, "replicate", False, id="replicate"),
        pytest.param(torch.optim.AdamW, {}, "fully_shard", True, id="whole-step"),
    ],
)
@pytest.mark.slow(quick=["amsgrad", "momentum"])
def test_state_of_a_plain_optimizer(pools, kind, options, mode, whole_step):
    pools(2).run(goes_on_with_plain_state, kind, options, mode, whole_step)
