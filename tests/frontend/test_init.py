"""``init_weights``: the same seed gives the same global weights on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simplefsdp import init_weights, simple_fsdp
from simplefsdp.frontend import initialize


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.scale, std=0.5)
        nn.init.trunc_normal_(self.up.weight, a=-1.0, b=1.0)  # rejects a third, and draws again
        nn.init.trunc_normal_(self.down.weight, a=-1.0, b=1.0)
        self.table = torch.arange(4.0, device=self.table.device)


def meta(make=Net) -> nn.Module:
    with torch.device("meta"):
        return make()


def weights(mesh: DeviceMesh, seed: int = 3, **kwargs: str) -> dict[str, torch.Tensor]:
    """The global weights after ``init_weights``, put together from the ranks of ``mesh``."""
    model = simple_fsdp(meta(), mesh, **kwargs)
    assert init_weights(model, seed=seed) is model
    assert torch.equal(model.table, torch.arange(4.0))
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    return {fqn: p.detach().full_tensor() for fqn, p in model.named_parameters()}


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for fqn, value in got.items():
        assert torch.equal(value, wanted[fqn]), fqn


def compare_meshes() -> None:
    initialize._BLOCK_NUMEL = 16  # several blocks in these small tensors
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "solo"))
    wanted = weights(mesh["solo"])  # each rank by itself
    assert_equal(weights(init_device_mesh("cpu", (4,))), wanted)
    assert_equal(weights(mesh["shard"]), wanted)
    assert_equal(weights(mesh["shard"], mode="replicate"), wanted)
    assert_equal(weights(mesh["replicate", "shard"], mode="hybrid_shard"), wanted)
    other = weights(mesh["solo"], seed=4)
    assert not torch.equal(other["up.weight"], wanted["up.weight"])
    model = meta()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["shard"], plan)
    init_weights(simple_fsdp(model, mesh["replicate"]), seed=3)
    assert_equal({fqn: p.detach().full_tensor() for fqn, p in model.named_parameters()}, wanted)


def test_weights_do_not_depend_on_the_mesh(pools):
    pools(4).run(compare_meshes)


def test_distribution_is_the_modules_own(fake_mesh):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 2048), nn.Embedding(1000, 64))
    init_weights(simple_fsdp(model, fake_mesh(2)))
    linear = model[0]._parameters["weight"].to_local()
    assert linear.abs().max() <= 1 / 16 and linear.abs().max() > 0.99 / 16  # U(-1/sqrt(256), ..)
    embedding = model[1]._parameters["weight"].to_local()
    assert abs(embedding.std().item() - 1) < 0.02 and abs(embedding.mean().item()) < 0.02
    assert torch.unique(linear).numel() > linear.numel() // 10  # blocks do not repeat each other


def test_random_state_is_left_alone(fake_mesh):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    init_weights(simple_fsdp(meta(), fake_mesh(2)))
    assert torch.equal(torch.rand(3), wanted)


def test_parameters_stay_trainable_and_sharded(fake_mesh):
    model = meta()
    model.norm.requires_grad_(False)
    init_weights(simple_fsdp(model, fake_mesh(4, rank=3)))
    for fqn, p in model.named_parameters():
        assert isinstance(p, DTensor) and not p.is_meta
        assert p.requires_grad == (not fqn.startswith("norm"))
    assert model.get_parameter("up.weight").to_local().shape == (1, 6)


def test_init_fn_replaces_reset_parameters(fake_mesh):
    model = simple_fsdp(meta(lambda: nn.Linear(3, 5)), fake_mesh(2))

    def ones(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)

    init_weights(model, init_fn=ones)
    assert all(
        torch.equal(p.to_local(), torch.ones(p.to_local().shape)) for p in model.parameters()
    )


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


def test_uninitialised_parameter_is_named(fake_mesh):
    model = simple_fsdp(meta(lambda: nn.Sequential(nn.Linear(4, 4), Bare())), fake_mesh(2))
    with pytest.raises(ValueError, match=r"nothing initialised 1\.weight; give the module"):
        init_weights(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_padding_row_is_zero(fake_mesh, rank):
    model = simple_fsdp(meta(lambda: nn.Embedding(6, 4, padding_idx=4)), fake_mesh(2, rank=rank))
    init_weights(model)
    zero_rows = (model.get_parameter("weight").to_local() == 0).all(1)
    assert zero_rows.tolist() == [False, rank == 1, False]  # row 4 is row 1 of rank 1
    assert model.padding_idx == 4


@pytest.mark.parametrize(
    ("init_fn", "message"),
    [
        (lambda m: m.weight[0].fill_(1), "weight: a slice .* would be lost"),
        (
            lambda m: nn.init.orthogonal_(m.weight),
            r"init of root \(Linear\): .* does not work on shards",
        ),
        (lambda m: m.weight.copy_(torch.randn_like(m.weight)), "depend on the number of ranks"),
    ],
    ids=["slice", "new_tensor", "unseeded"],
)
def test_writes_that_would_be_lost_are_refused(fake_mesh, init_fn, message):
    model = simple_fsdp(meta(lambda: nn.Linear(6, 4, bias=False)), fake_mesh(2))
    with pytest.raises(ValueError, match=message):
        init_weights(model, init_fn=init_fn)


def test_unwrapped_model_is_refused():
    with pytest.raises(ValueError, match="expected a module wrapped by simple_fsdp, got Linear"):
        init_weights(nn.Linear(2, 2))
