"""What FSDP2's own tests of construction ask for: meta models, meshes, errors."""

from __future__ import annotations

import copy
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from beside import (
    DIM,
    EXECUTORS,
    Mlp,
    call_of,
    check_close,
    mean,
    mesh_of,
    meta,
    mine,
    numbers,
    rows,
    train_beside,
    wrapped,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor, Shard

from simplefsdp import simple_fsdp, unsharded
from simplefsdp.frontend.wrapped import layouts_of

# --- made on rank 0 alone -------------------------------------------------------------------------


def two_parts() -> nn.Module:
    return nn.Sequential(Mlp(), Mlp())


def made_on_rank_0(mode: str) -> None:
    """As verl has it: the others get memory, and then rank 0's values."""
    torch.manual_seed(dist.get_rank())
    is_first = dist.get_rank() == 0
    made = two_parts() if is_first else meta(two_parts)
    state = copy.deepcopy(made.state_dict())
    model = simple_fsdp(made, mesh_of(mode), mode=mode)
    assert all(param.is_meta != is_first for param in model.parameters())
    for param in model.parameters() if is_first else ():  # a view would keep all of it in memory
        assert param.to_local().untyped_storage().nbytes() == param.to_local().nbytes
    model = model.to("cpu") if is_first else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    torch.manual_seed(0)
    train_beside(two_parts(), model, call_of(model, "aot_eager"), rows)


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_made_on_rank_0_alone(pools, mode):
    pools(2).run(made_on_rank_0, mode)


def left_on_meta() -> str:
    """The ranks that never got values say so."""
    is_first = dist.get_rank() == 0
    model = simple_fsdp(Mlp() if is_first else meta(Mlp), mesh_of())
    if is_first:
        return ""
    with pytest.raises((ValueError, RuntimeError), match="meta") as told:
        model(numbers(2, DIM))
    return str(told.value)


def test_ranks_without_values_say_so(own_ranks):
    _, text = own_ranks.run(left_on_meta)
    assert "row: is on the meta device, without values" in text


# --- to_empty, and values by hand -----------------------------------------------------------------


def empty_fill_reset(dim: int) -> None:
    """On 2 ranks, one of 1 row has an empty shard, which can neither have nor lack values."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim))
        for part in (*model, model):
            simple_fsdp(part, mesh_of(), mp_policy=policy)
    assert all(param.is_meta for param in model.parameters())
    optimizer = torch.optim.Adam(model.to_empty(device="cpu").parameters())
    for param in model.parameters():
        param.detach().fill_(1337.0)
    for layer in model:
        layer.reset_parameters()
    for fqn, param in model.named_parameters():
        assert param.to_local().lt(2).all(), fqn
    mean(model(numbers(4, dim))).backward()
    optimizer.step()


@pytest.mark.parametrize("dim", [8, 3, 1])
def test_a_model_filled_by_hand_may_be_reset(pools, dim):
    pools(2).run(empty_fill_reset, dim)


class InTurns(nn.Module):
    """Writes a part of a parameter, then to another one, then the rest: on 2 ranks, rank 0 has
    all of its rows after the first turn, and rank 1 none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.first[:2] = 1.0
            self.other.fill_(2.0)
            self.first[2:] = 3.0

    def forward(self, x):
        return x * self.first.sum() + self.other.sum()


def initialise_in_turns() -> None:
    model = simple_fsdp(meta(InTurns), mesh_of()).to_empty(device="cpu")
    model.reset_parameters()
    assert model.first.detach().full_tensor().tolist() == [1.0, 1.0, 3.0, 3.0]
    assert model(torch.ones(1)).item() == 14.0


def test_an_initialiser_that_comes_back_to_a_parameter(pools):
    pools(2).run(initialise_in_turns)


class KeepsOnOneRank(InTurns):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            kept = [self.first.fill_(1.0)]
            if dist.get_rank() == 0:
                kept.clear()
            self.other.fill_(2.0)


def keep_on_one_rank() -> None:
    model = simple_fsdp(meta(KeepsOnOneRank), mesh_of()).to_empty(device="cpu")
    model.reset_parameters()
    assert model(torch.ones(1)).item() == 10.0


def test_a_full_parameter_that_one_rank_holds_on_to(pools):
    """As ranks do by chance, until their garbage collectors run."""
    pools(2).run(keep_on_one_rank)


def values_by_hand(mesh) -> nn.Module:
    model = simple_fsdp(meta(lambda: nn.Linear(DIM, DIM)), mesh).to_empty(device="cpu")
    for param in model.parameters():
        param.detach().fill_(2.0)
    return model


def test_values_given_by_hand_stay_when_the_model_is_cast(fake_mesh):
    model = values_by_hand(fake_mesh(2)).to(torch.float64)
    assert all(param.to_local().eq(2.0).all() for param in model.parameters())
    assert model(torch.ones(1, DIM, dtype=torch.float64)).shape == (1, DIM)


def test_an_empty_model_that_is_cast_still_does_not_train(fake_mesh):
    model = simple_fsdp(meta(lambda: nn.Linear(DIM, DIM)), fake_mesh(2)).to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"weight: to_empty\(\) gave memory but nothing gave"):
        model.to(torch.float64)(torch.ones(1, DIM, dtype=torch.float64))


def scale_by_apply() -> None:
    model = values_by_hand(mesh_of())

    def halve(module: nn.Module) -> None:
        if getattr(module, "bias", None) is not None:  # reads it, and writes nothing to it
            module.weight.data.mul_(0.5)

    model.apply(halve)
    assert model.weight.to_local().eq(1.0).all() and model.bias.to_local().eq(2.0).all()


def test_values_given_by_hand_stay_when_an_initialiser_reads_them(pools):
    pools(2).run(scale_by_apply)


# --- parameters that are replaced, meshes --------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.norm = nn.Parameter(torch.empty(5))

    def take_norms(self) -> None:
        with torch.no_grad():
            norms = [torch.linalg.norm(layer.weight, dim=1) for layer in (self.one, self.other)]
        self.norm = nn.Parameter(sum(norms))

    def forward(self, x):
        return self.other(self.one(x)) * self.norm


def replace_by_computed() -> None:
    """A parameter that is made of the shards of others."""
    model = simple_fsdp(meta(Normed), mesh_of())
    plain = Normed()
    for name in ("one", "other"):
        getattr(model, name).to_empty(device="cpu")
        getattr(model, name).load_state_dict(getattr(plain, name).state_dict())
    for m in (plain, model):
        m.take_norms()
    train_beside(plain, model, model, lambda step: (numbers(4, 5, seed=step),))


def test_a_parameter_made_of_others(pools):
    pools(2).run(replace_by_computed)


def train_on_groups() -> None:
    ranks = dist.get_world_size()
    if ranks == 2:
        group = dist.new_group([0, 1])
        mesh, mode = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), "fully_shard"
    else:
        known = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        names = known.mesh_dim_names
        groups = [known.get_group(name) for name in names]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=known.mesh, mesh_dim_names=names)
        mode = "hybrid_shard"
    for executor in EXECUTORS if ranks == 2 else ("eager",):
        plain = nn.Sequential(Mlp(), Mlp())
        model = simple_fsdp(copy.deepcopy(plain), mesh, mode=mode)
        train_beside(plain, model, call_of(model, executor), rows)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mesh_made_of_groups(pools, ranks):
    pools(ranks).run(train_on_groups)


def accumulate_hybrid() -> None:
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain, "hybrid_shard")
    replicas = model[0].row.device_mesh.get_group("replicate")
    for param in model.parameters():  # as users do, to bring copies together
        dist.broadcast(param.to_local(), dist.get_process_group_ranks(replicas)[0], replicas)
    for step in range(2):
        mean(plain(numbers(4, DIM, seed=step))).backward()
        mean(model(mine(numbers(4, DIM, seed=step)))).backward()
    train_beside(plain, model, model, rows)


def test_accumulation_over_copies(pools):
    pools(4).run(accumulate_hybrid)


# --- errors ---------------------------------------------------------------------------------------


def test_a_list_of_modules(fake_mesh):
    with pytest.raises(TypeError, match=r"got a list; wrap its modules one by one, or the module"):
        simple_fsdp([Mlp(), Mlp()], fake_mesh(2))


def test_other_arguments_of_fsdp2(fake_mesh):
    mesh = fake_mesh(2)
    with pytest.raises(TypeError, match=r"'auto' or a number of ranks, got 1\.5"):
        simple_fsdp(Mlp(), mesh, reshard_after_forward=1.5)
    with pytest.raises(ValueError, match="does not offload to the CPU"):
        simple_fsdp(Mlp(), mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(TypeError, match="OffloadPolicy or None, got bool"):
        simple_fsdp(Mlp(), mesh, offload_policy=True)
    model = Mlp()
    with pytest.raises(TypeError, match=r"ignored_params: expected a set .* got Linear"):
        simple_fsdp(model, mesh, ignored_params=model.up)
    assert not any(isinstance(p, DTensor) for p in model.parameters())  # nothing was changed
    simple_fsdp(model, mesh, offload_policy=OffloadPolicy(), shard_placement_fn=lambda _: Shard(0))
    assert all(isinstance(p, DTensor) for p in model.parameters())


def ignored():
    """Its gradient is that of this rank's rows; those of the others are averaged, as ever."""
    plain = nn.Sequential(Mlp(), Mlp())
    (x,) = rows(0)
    mean(plain(x)).backward()
    wanted = {fqn: param.grad for fqn, param in plain.named_parameters()}
    alone = copy.deepcopy(plain)
    alone.zero_grad()
    mean(alone(mine(x))).backward()
    wanted["1.row"] = alone[1].row.grad
    for executor in EXECUTORS:
        model = copy.deepcopy(plain)
        model.zero_grad()
        simple_fsdp(model, mesh_of(), ignored_params={model[1].row})
        assert type(model[1].row) is nn.Parameter
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mean(call_of(model, executor)(mine(x))).backward()
        for fqn, param in model.named_parameters():
            check_close(param.grad, wanted[fqn], 1e-5, fqn)
        optimizer.step()
        mean(call_of(copy.deepcopy(model), executor)(mine(x))).backward()


def test_one_set_of_ignored_parameters_for_blocks_and_root(fake_mesh):
    model = nn.Sequential(Mlp(), Mlp())
    ignored, mesh = {model[0].row, model[1].row}, fake_mesh(2)
    for part in (*model, model):
        simple_fsdp(part, mesh, ignored_params=ignored)
    sharded = {fqn for fqn, param in model.named_parameters() if isinstance(param, DTensor)}
    assert {fqn for fqn, _ in model.named_parameters()} - sharded == {"0.row", "1.row"}


def test_ignored_parameters_are_left_alone(pools):
    pools(2).run(ignored)


METHODS = {
    "set_manual_backward_finalization": r"then call finalize_backward\(\)",
    "set_custom_all_gather": "the compiler makes, merges and orders the collectives",
    "clip_grad_norm_": r"use simplefsdp\.clip_grad_norm_\(model, max_norm\)",
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_fsdp2(fake_mesh, name):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    message = rf"{name}: a module wrapped by simple_fsdp has no such method; .*{METHODS[name]}"
    for part in (model, model[0]):
        with pytest.raises(AttributeError, match=message):
            getattr(part, name)(False)


def test_hints_for_fsdp2s_runtime(fake_mesh, caplog):
    """They change no number, so they are taken; a script for FSDP2 runs as it is."""
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    event = unittest.mock.Mock(torch.Event)
    with caplog.at_level("INFO", "simplefsdp"):
        for part in (model, model[0]):
            part.set_modules_to_forward_prefetch([model[0]])
            part.set_modules_to_backward_prefetch([model[0]])
            part.set_unshard_in_backward(False)
            part.set_allocate_memory_from_process_group_for_comm(True)
            part.set_reduce_scatter_max_input_buffers(2, recurse=False)
            part.set_symm_mem_for_comm()
            part.set_post_optim_event(event)
    assert "Mlp.set_unshard_in_backward does nothing: backward gathers only" in caplog.text
    assert event.wait.call_count == 2
    model.set_reduce_scatter_divide_factor(2.0)
    factors = {v.spec.divide_factor for m in model.modules() for v in layouts_of(m).values()}
    assert factors == {2.0}


def test_all_methods_of_fsdp2_are_answered(fake_mesh):
    """Each either does its work, or is a hint, or raises with what to do instead."""
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    names = [name for name in vars(FSDPModule) if name.islower() and not name.startswith("_")]
    assert [name for name in names if not hasattr(model, name)] == []


def test_a_method_of_the_users_own_is_left_alone(fake_mesh):
    class Own(Mlp):
        def reshard(self):
            return "own"

    assert simple_fsdp(Own(), fake_mesh(2)).reshard() == "own"


def test_a_gradient_is_not_differentiated_again(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    params = list(model.parameters())
    grads = torch.autograd.grad(mean(model(numbers(2, DIM))), params, create_graph=True)
    assert all(isinstance(grad, DTensor) for grad in grads)
    with pytest.raises(ValueError, match=r"0\.\w+.*: its gradient cannot be differentiated once"):
        sum(grad.to_local().square().sum() for grad in grads).backward()
    with unsharded(model, writeback=False):
        loss = mean(model(numbers(2, DIM)))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        twice = torch.autograd.grad(grads[1].square().sum(), list(model.parameters())[1])
    assert twice[0].shape == (7, DIM)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_transforms_of_functions(fake_mesh, executor):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    call, x = call_of(model, executor), numbers(2, DIM)
    for transformed in (torch.func.grad(lambda v: call(v).sum()), torch.func.vmap(call)):
        with pytest.raises(ValueError, match=r"0\.row: .* inside a transform of torch\.func"):
            transformed(x)
    with unsharded(model, writeback=False):
        assert torch.func.grad(lambda v: model(v).sum())(x).shape == x.shape


class Transforms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        weight, bias = self.linear.weight, self.linear.bias
        rows = torch.vmap(lambda row: nn.functional.linear(row, weight, bias))(x)
        value, tangent = torch.func.jvp(lambda v: v @ weight.T, (x,), (x,))
        return rows + value * tangent + torch.func.grad(lambda v: (v @ weight).sin().sum())(x)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_transforms_of_functions_that_use_a_weight(solo_mesh, executor):
    plain = Transforms()
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    for run in (plain, call_of(model, executor)):
        mean(run(numbers(2, DIM))).backward()
    for wanted, got in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)


def test_a_module_of_torch_jit_is_named(fake_mesh):
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"0: was made by torch\.jit"):
        simple_fsdp(model, fake_mesh(2))


def assign_data(module) -> None:
    module.row.data = torch.zeros(1, DIM)


def assign_grad(module) -> None:
    module.row.requires_grad = False


@pytest.mark.parametrize(("write", "name"), [(assign_data, "data"), (assign_grad, "requires_grad")])
def test_an_assignment_to_a_gathered_parameter_is_refused(fake_mesh, write, name):
    model = nn.Sequential(Mlp(), nn.Linear(DIM, DIM))
    model[0].up.register_forward_pre_hook(lambda *_: write(model[0]))
    simple_fsdp(model, fake_mesh(2))
    with pytest.raises(ValueError, match=rf"0\.row: assigning to \.{name} in forward changed"):
        model(numbers(2, DIM))


def test_a_write_in_inference_mode_is_refused(fake_mesh):
    model = nn.Sequential(Mlp(), nn.Linear(DIM, DIM))
    model[0].up.register_forward_pre_hook(lambda *_: model[0].row.zero_() and None)
    simple_fsdp(model, fake_mesh(2))
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"0\.row: zero_\(\) in forward changed"),
    ):
        model(numbers(2, DIM))
