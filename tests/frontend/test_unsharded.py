"""``unsharded``: the plain model for a while, written back to the shards at its end."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import prune
from zoo import Zoo

from simplefsdp import raw_parameters, simple_fsdp, unsharded
from simplefsdp.rank_guard import RankMismatchError


def prune_first(layer: nn.Linear) -> None:
    prune.random_unstructured(layer, "weight", 0.5)


def tie_first(layer: nn.Linear) -> None:
    layer.second = layer.weight


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: p.detach().full_tensor() for fqn, p in model.named_parameters()}


def write_everything() -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for mode, where in (("fully_shard", flat), ("replicate", flat), ("hybrid_shard", mesh)):
        torch.manual_seed(0)
        plain = Zoo()
        model = simple_fsdp(Zoo(), where, mode=mode, mp_policy=policy)
        before = dict(model.named_parameters())
        with unsharded(model):
            assert list(model.state_dict()) == list(plain.state_dict())
            for param in model.parameters():
                assert type(param) is nn.Parameter
            assert model.head.weight is model.embed.weight
            model.load_state_dict(plain.state_dict())
            nn.init.orthogonal_(model.blocks[0].up.weight)
            model.row.data = torch.full_like(model.row, float(rank))  # rank 0's value counts
            wanted = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
        after = dict(model.named_parameters())
        assert all(after[fqn] is param for fqn, param in before.items())
        wanted["row"].fill_(0.0)
        for fqn, value in values(model).items():
            if not fqn.startswith("blocks.0.up"):
                assert torch.equal(value, wanted[fqn]), (mode, fqn)
        got = values(model)["blocks.0.up.weight"]
        assert torch.allclose(got.t() @ got, torch.eye(8), atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_written_goes_to_all_shards(pools, ranks):
    pools(ranks).run(write_everything)


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    simple_fsdp(model, mesh["dp"])
    wanted = torch.arange(60.0).view(10, 6)
    with unsharded(model):
        assert model[0].weight.shape == (10, 6)
        model[0].weight.data.copy_(wanted)
    assert torch.equal(values(model)["0.weight"], wanted)


def test_tensor_parallelism_is_undone_too(pools):
    pools(4).run(tensor_parallel)


def beside_tensor_parallelism() -> None:
    """Also where a part of the model is wrapped first, and a part alone is made whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.BatchNorm1d(10))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    simple_fsdp(model[1], mesh["dp"])
    simple_fsdp(model, mesh["dp"])
    for number, part in enumerate((model, model[1:]), 2):
        with unsharded(part), torch.no_grad():
            if torch.distributed.get_rank() == 0:
                for tensor in (*part.parameters(), *part.buffers()):
                    tensor.fill_(number)
        found = {**values(part), **dict(part.named_buffers())}
        assert len(found) == (9 if number == 2 else 7)
        assert all((value == number).all() for value in found.values()), found
    rank = torch.distributed.get_rank()  # of a part, too, all ranks learn that one has failed
    error = KeyError if rank == 1 else RankMismatchError
    with pytest.raises(error), unsharded(model[1:]):
        {0: "well"}[int(rank == 1)]


def test_what_tensor_parallelism_left_alone_is_written_on_all_its_ranks(pools):
    pools(4).run(beside_tensor_parallelism)


def buffers_too() -> None:
    rank = torch.distributed.get_rank()
    model = simple_fsdp(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), init_device_mesh("cpu", (2,))
    )
    norm = model[1]
    norm.running_var.fill_(rank + 1)  # each rank's own, as after training
    norm.register_buffer("strided", torch.zeros(8)[::2])
    with unsharded(model), torch.no_grad():
        if rank == 0:
            norm.running_mean.data.add_(3)  # which no version counts
            norm.strided.add_(3)
            norm.num_batches_tracked = torch.tensor(7)
    assert (norm.running_mean == 3).all() and norm.num_batches_tracked == 7
    assert (norm.strided == 3).all()
    assert (norm.running_var == rank + 1).all()  # nobody has written to it
    with unsharded(model, writeback=False), torch.no_grad():
        norm.running_mean.fill_(rank)
    assert (norm.running_mean == rank).all()
    model.register_buffer("cache", torch.zeros(rank + 1), persistent=False)
    with unsharded(model):
        pass
    assert model.cache.shape == (rank + 1,)
    refused = nullcontext() if rank == 0 else pytest.raises(ValueError, match="buffer cache, which")
    with refused, unsharded(model):
        model.cache.add_(1)


def test_buffers_that_are_written_go_to_all_ranks(pools):
    pools(2).run(buffers_too)


def test_nothing_is_written_back_when_it_is_not_wanted_or_fails(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    before = layer.weight.to_local().clone()
    with unsharded(layer, writeback=False):
        nn.init.zeros_(layer.weight)
    with pytest.raises(IndexError), unsharded(layer):
        nn.init.zeros_(layer.weight)[9]
    assert torch.equal(layer.weight.to_local(), before)
    with unsharded(layer):
        nn.init.zeros_(layer.weight)
    assert layer.weight.to_local().eq(0).all()


def test_what_would_be_lost_is_refused(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    with pytest.raises(ValueError, match="weight of Linear got a gradient"), unsharded(layer):
        layer(torch.ones(1, 4)).sum().backward()
    other_shape = r"weight of Linear was \(4, 4\) .* is \(5, 4\)"
    with pytest.raises(ValueError, match=other_shape), unsharded(layer):
        layer.weight = nn.Parameter(torch.ones(5, 4))
    assert isinstance(layer.weight, DTensor) and layer.weight.shape == (4, 4)
    with pytest.raises(ValueError, match="module: expected a module wrapped by simple_fsdp"):
        unsharded(nn.Linear(4, 4)).__enter__()


def test_a_module_that_takes_parts_out(solo_mesh):
    """As ``merge_and_unload`` of PEFT's does: the inner layer takes the place of the adapter."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4, bias=False)
            self.delta = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return self.base(x) + x @ self.delta.t()

    model = simple_fsdp(nn.Sequential(Adapter()), solo_mesh)
    x = torch.randn(2, 4)
    wanted = model(x)
    with unsharded(model):
        model[0].base.weight.data += model[0].delta
        model[0] = model[0].base
    assert isinstance(model[0].weight, DTensor)
    assert torch.allclose(model(x), wanted, atol=1e-6)


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[1]], ids=["all", "part"])
def test_the_model_runs_inside(fake_mesh, part):
    """Its root owns no parameters, or was not made whole."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fake_mesh(1))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4)
    with unsharded(part(model), writeback=False):
        assert torch.allclose(model(x), plain(x), atol=1e-6)
    model(x).sum().backward()


def test_a_parameter_that_became_none_stays_so(solo_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), solo_mesh)
    with unsharded(model):
        model[0].bias = None
    assert model[0].bias is None and list(model.state_dict()) == ["0.weight"]
    x = torch.ones(1, 4)
    assert torch.equal(model(x), x @ model[0].weight.full_tensor().t())
    with unsharded(model):
        assert model[0].bias is None


def test_a_tied_parameter_that_came_apart_is_refused(solo_mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    simple_fsdp(model, solo_mesh)
    before = model[0].weight.full_tensor().clone()
    apart = "unsharded: 0.weight and 1.weight were one parameter, .* tie"
    with pytest.raises(ValueError, match=apart), unsharded(model):
        model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight.full_tensor(), before)
    with unsharded(model):
        model[0].weight = model[1].weight = nn.Parameter(torch.zeros(4, 4))
    assert model[0].weight is model[1].weight and not model[0].weight.full_tensor().any()


@pytest.mark.parametrize("rename", [prune_first, tie_first])
def test_a_full_parameter_under_a_new_name_is_refused(solo_mesh, rename):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), solo_mesh)
    with (
        pytest.raises(ValueError, match=r"0\.\w+ was registered inside, and would"),
        unsharded(model),
    ):
        rename(model[0])


def test_marks_and_requires_grad_go_both_ways(solo_mesh):
    plain = nn.Linear(4, 4)
    plain.weight.no_weight_decay = True
    plain.bias.group = "biases"
    layer = simple_fsdp(plain, solo_mesh)
    weight, bias = layer.weight, layer.bias
    with unsharded(layer):
        assert layer.weight.no_weight_decay and layer.weight.requires_grad
        del layer.weight.no_weight_decay
        layer.weight.rank = 3
        layer.weight.requires_grad_(False)
        layer.bias = nn.Parameter(torch.ones(4))
    assert layer.weight is weight and layer.bias is bias
    assert weight.rank == 3 and not hasattr(weight, "no_weight_decay")
    assert not weight.requires_grad and bias.requires_grad and bias.group == "biases"
    with unsharded(layer, writeback=False):
        assert not layer.weight.requires_grad
        layer.weight.requires_grad_(True)
    assert weight.requires_grad


def test_what_belongs_to_a_full_parameter_alone_is_refused(solo_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    hook = "weight of Linear got a hook, .* register it outside"
    with pytest.raises(ValueError, match=hook), unsharded(layer):
        layer.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ValueError, match=hook), unsharded(layer):
        layer.weight.register_post_accumulate_grad_hook(lambda param: None)
    with unsharded(layer):
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match="SGD: holds weight as it was inside unsharded"):
        optimizer.step()


def fails_on_one_rank() -> None:
    rank = torch.distributed.get_rank()
    layer = simple_fsdp(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    before = values(layer)
    raised = IndexError if rank == 1 else RankMismatchError
    for _ in range(2):
        with pytest.raises(raised), unsharded(layer):
            nn.init.zeros_(layer.weight)[rank * 9]
        with pytest.raises(IndexError), unsharded(layer):
            raise IndexError(f"on rank {rank}")
    for fqn, value in values(layer).items():
        assert torch.equal(value, before[fqn])
    with unsharded(layer):
        nn.init.zeros_(layer.weight)
    assert not layer.weight.full_tensor().any()
    with pytest.raises(RankMismatchError, match="bias"), unsharded(layer):
        layer.bias = None if rank == 1 else layer.bias


def test_an_exception_on_one_rank_stops_all(pools):
    pools(2).run(fails_on_one_rank, timeout=30.0)


def test_a_compiled_model_runs_inside(solo_mesh):
    class Own(nn.Sequential):  # Dynamo starts at no forward of torch's own
        def forward(self, x):
            return super().forward(x)

    plain = Own(nn.Linear(4, 4), nn.Linear(4, 4))
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    x = torch.randn(2, 4)
    with unsharded(model):
        assert torch.allclose(model(x), plain(x), atol=1e-6)
        model[0].weight.data.zero_()
        plain[0].weight.data.zero_()
        assert torch.allclose(model(x), plain(x), atol=1e-6)
    assert torch.allclose(model(x), plain(x), atol=1e-6)
    model.append(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"2.weight.* is not sharded"), unsharded(model):
        model(x)


def test_a_recurrent_module_runs_inside(solo_mesh):
    plain = nn.LSTM(4, 4)
    model = simple_fsdp(nn.Sequential(copy.deepcopy(plain)), solo_mesh)
    x = torch.randn(2, 1, 4)
    for part in (model, model[0]):
        with unsharded(part):
            assert torch.allclose(model[0](x)[0], plain(x)[0], atol=1e-6)
            for one in (model[0], plain):
                one.weight_hh_l0 = nn.Parameter(one.weight_hh_l0.detach() * 2)
            assert torch.allclose(model[0](x)[0], plain(x)[0], atol=1e-6)
        assert "_flat_weights" not in vars(model[0])
        assert torch.allclose(model[0](x)[0], plain(x)[0], atol=1e-6)
    with raw_parameters(model):
        assert model[0]._flat_weights[0] is model[0].weight_ih_l0
    assert "_flat_weights" not in vars(model[0])
    model[0](x)[0].sum().backward()
    assert model[0].weight_ih_l0.grad is not None
