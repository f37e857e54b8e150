"""Operators on sharded parameters outside of forward: random fills, numbers, truth values."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from simplefsdp import simple_fsdp
from simplefsdp.frontend import initialize, outside


def fill(model: nn.Module) -> None:
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            module.bias.data.uniform_(-1, 1)
    for param in model.parameters():
        nn.init.trunc_normal_(param) if param.dim() > 1 else None


def filled(mesh, mode: str) -> dict[str, torch.Tensor]:
    model = simple_fsdp(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7)), mesh, mode=mode)
    fill(model)
    values = {fqn: p.detach().full_tensor() for fqn, p in model.named_parameters()}
    return {**values, "what is drawn next": torch.rand(())}


def compare_meshes() -> None:
    initialize._BLOCK_NUMEL = 16
    ranks = torch.distributed.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    pairs = init_device_mesh("cpu", (2, ranks // 2))
    wanted = filled(flat, "replicate")
    for mesh, mode in ((flat, "fully_shard"), (pairs, "hybrid_shard")):
        for fqn, value in filled(mesh, mode).items():
            assert torch.equal(value, wanted[fqn]), (mode, fqn)
    rows = wanted["0.weight"]
    assert not torch.equal(rows[:5], rows[5:])  # as if every rank had drawn the same


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_fills_do_not_depend_on_the_mesh(pools, ranks):
    pools(ranks).run(compare_meshes)


def test_an_initialiser_that_draws_into_another_tensor_obeys_seeds(solo_mesh):
    values = {}
    for seed in (1, 2, 1):
        model = simple_fsdp(nn.Linear(4, 6), solo_mesh)
        torch.manual_seed(seed)
        nn.init.orthogonal_(model.weight)
        value = model.weight.detach().full_tensor()
        assert torch.equal(values.setdefault(seed, value), value)
    assert not torch.equal(values[1], values[2])


@pytest.mark.parametrize("draw", [torch.Tensor.normal_, nn.init.normal_, nn.init.trunc_normal_])
def test_noise_of_the_shape_of_a_parameter_obeys_seeds(solo_mesh, draw):
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)

    def noise(seed):
        torch.manual_seed(seed)
        return draw(torch.empty_like(model.weight.detach())).full_tensor()

    for fill in (nn.init.normal_, nn.init.trunc_normal_):
        fill(model.weight)
        assert torch.equal(noise(1), noise(1))
        assert not torch.equal(noise(1), noise(2))


def number_of_a_rank() -> None:
    model = simple_fsdp(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for tensor in (model.weight, model.weight.grad):
        for read in (torch.Tensor.item, float, bool):
            with pytest.raises(ValueError, match=r"this rank's part.*full_tensor\(\)\.item\(\)"):
                read(tensor.norm())
        whole = tensor.full_tensor()
        assert tensor.norm().full_tensor().item() == pytest.approx(whole.norm().item())
        assert bool(tensor.norm() > 0)
    one = simple_fsdp(nn.Linear(4, 4), mode="replicate")
    assert one.bias.sum().item() == pytest.approx(one.bias.full_tensor().sum().item())


def test_a_number_that_is_of_one_rank_is_refused(pools):
    pools(2).run(number_of_a_rank)


def collectives_of_shards() -> None:
    model = simple_fsdp(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for tensor in (model.weight.data, model.weight.grad):
        for send in (
            lambda tensor: dist.broadcast(tensor, 0),
            dist.all_reduce,
            lambda tensor: dist.all_gather([tensor, tensor], tensor),
            lambda tensor: dist.reduce_scatter_tensor(tensor, tensor),
            lambda tensor: dist.send(tensor, 1 - dist.get_rank()),
        ):
            with pytest.raises(ValueError, match=r"of a sharded DTensor.*full_tensor\(\)"):
                send(tensor)


def test_a_collective_of_a_shard_is_refused_by_name(pools):
    pools(2).run(collectives_of_shards)


def truth_of_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = simple_fsdp(nn.Linear(3, 8, bias=False), mesh)
    whole = torch.zeros(8, 3)
    whole[7, 2] = 1.0  # of the last rank
    model.load_state_dict({"weight": whole})
    weight = model.weight.detach()
    assert (weight > 0).any().item() and not (weight > 0).all()
    assert (weight < 1).any() and not (weight < 1).all().item()
    assert (weight <= 1).all() and not (weight > 1).any()
    assert (weight > 0).amax().item() and not (weight < 1).amin().item()


def test_whether_any_or_all_are_is_asked_of_all_ranks(pools):
    """Before 2.15 torch gives each rank the answer for its own part."""
    pools(2).run(truth_of_all_ranks)


def test_a_generator_of_the_users_is_drawn_from(fake_mesh):
    def weight(seed: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(seed)
        nn.init.normal_(layer.weight, generator=own)
        return layer.weight.to_local().clone()

    layer = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))


def seeds_differ() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = simple_fsdp(nn.Linear(4, 4), mesh, mode="replicate")
    torch.manual_seed(torch.distributed.get_rank())
    nn.init.normal_(model.weight)
    own = model.weight.to_local().detach()
    theirs = [torch.empty(4, 4) for _ in range(2)]
    torch.distributed.all_gather(theirs, own.clone())
    assert torch.equal(*theirs)


def test_copies_are_filled_with_rank_0s_numbers(pools):
    pools(2).run(seeds_differ)


def copies_are_watched() -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(6, 10)), init_device_mesh("cpu", (2,)))
    for copied in (copy.deepcopy(model), copy.deepcopy(model[0])):
        weight = next(copied.parameters())
        nn.init.normal_(weight)
        rows = weight.full_tensor()
        assert not torch.equal(rows[:5], rows[5:])
        with torch.no_grad(), pytest.raises(ValueError, match="weight: a slice"):
            weight[0].zero_()


def test_copies_of_models_and_of_their_parts_are_handled_alike(pools):
    pools(2).run(copies_are_watched)


class Scaled(nn.Linear):
    def __init__(self, out_features: int) -> None:
        super().__init__(3, out_features)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


NOISE = (torch.randn_like, torch.rand_like, lambda grad: torch.empty_like(grad).normal_())


def noise_is_one_global_tensor() -> None:
    """Also for copies, whose ranks are seeded apart, and for a scalar among uneven shards."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for mode in ("fully_shard", "replicate"):
        model = simple_fsdp(Scaled(2 * ranks - 1), mode=mode)
        torch.manual_seed(rank)
        model(torch.ones(2, 3)).sum().backward()
        for draw in NOISE:
            for param in model.parameters():
                noise = draw(param.grad)
                own = noise.full_tensor()
                theirs = [torch.empty_like(own) for _ in range(ranks)]
                torch.distributed.all_gather(theirs, own.contiguous())
                assert all(torch.equal(own, one) for one in theirs)
                assert own.unique().numel() == own.numel()  # no shard has another's numbers
                torch.nn.init.trunc_normal_(noise)  # draws again on one rank more often


def test_noise_for_gradients_is_the_same_on_all_copies(pools):
    pools(2).run(noise_is_one_global_tensor)


def test_a_model_that_is_gone_is_forgotten(fake_mesh):
    mesh = fake_mesh(2)
    layer = simple_fsdp(nn.Linear(4, 4), mesh)
    value = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
    assert outside._draws_by_rank(layer.weight)
    assert not outside._draws_by_rank(value)
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None
