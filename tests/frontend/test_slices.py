"""Slices of sharded tensors outside of forward: what is read is right, what is written raises."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from simplefsdp import simple_fsdp, unsharded
from simplefsdp.frontend import slices
from simplefsdp.frontend.slices import CopiedSlice

LOST = "a slice along a dimension that is sharded is a copy"
# Parts of a tensor of 8 x 6, sharded by rows: slices, and views of views.
PARTS = {
    "item": lambda w: w[0],
    "rows": lambda w: w[1:3],
    "every other row": lambda w: w[::2],
    "split": lambda w: w.split(2)[1],
    "chunk": lambda w: w.chunk(2)[0],
    "narrow": lambda w: w.narrow(0, 0, 2),
    "diagonal": lambda w: w.diagonal(),
    "transposed": lambda w: w.t()[:, 0],
    "permuted": lambda w: w.permute(1, 0)[:, 3],
    "flat": lambda w: w.flatten()[:6],
    "unflattened": lambda w: w.view(4, 2, 6)[0],
    "of columns": lambda w: w[:, :3][0],
    "of a chunk": lambda w: w.chunk(2, 1)[0][2],
    "further": lambda w: w[None][:, 1:3],
    "view of a slice": lambda w: w[0].view(2, 3)[:, 1],
    "detached slice": lambda w: w[2:4].detach(),
}
WRITES = {
    "zero_": lambda part: part.zero_(),
    "copy_": lambda part: part.copy_(torch.ones_like(part)),
    "out": lambda part: torch.add(part, 1.0, out=part),
    "foreach": lambda part: torch._foreach_mul_([part], 2.0),
    "index": lambda part: part.__setitem__(..., 1.0),
}


@pytest.mark.parametrize("take", PARTS.values(), ids=PARTS)
def test_a_write_to_a_part_raises(fake_mesh, take):
    layer = simple_fsdp(nn.Linear(6, 8), fake_mesh(2))
    with torch.no_grad(), pytest.raises(ValueError, match=f"^weight: {LOST}"):
        take(layer.weight).zero_()
    with pytest.raises(ValueError, match=LOST):
        take(layer.weight.data).zero_()
    with pytest.raises(ValueError, match=LOST):
        take(layer.requires_grad_(False).weight).zero_()


def test_a_slice_costs_no_look_at_all_parameters(watched_mesh, monkeypatch):
    """Of thousands, a loop over them would take minutes."""
    layer = simple_fsdp(nn.Linear(6, 8), watched_mesh)
    layer(torch.ones(2, 6)).sum().backward()
    layer.weight.grad[0]
    monkeypatch.delattr(slices, "living_shards")
    with torch.no_grad():
        assert type(layer.weight[0]) is type(layer.weight.data[0]) is CopiedSlice
    assert type(layer.weight.grad[0]) is CopiedSlice


def test_what_is_asked_inside_unsharded_is_asked_again(watched_mesh):
    layer = simple_fsdp(nn.Linear(6, 8), watched_mesh)
    state = torch.zeros_like(layer.weight.detach())
    with unsharded(layer, writeback=False):
        state[0]
    assert type(state[0]) is CopiedSlice


def test_what_is_like_no_living_parameter_is_left_alone(watched_mesh):
    teacher = simple_fsdp(nn.Linear(6, 8), watched_mesh)
    student = simple_fsdp(nn.Linear(4, 4), watched_mesh)
    like = torch.zeros_like(teacher.weight.detach())
    assert type(like[0]) is CopiedSlice
    del teacher
    gc.collect()
    averaged = copy.deepcopy(student)  # as many models as before
    like[0].zero_()
    assert type(averaged.weight.detach()[0]) is CopiedSlice


def test_a_gradient_that_is_on_its_way_is_no_obstacle(watched_mesh):
    layer = simple_fsdp(nn.Linear(6, 8), watched_mesh)
    local = all_reduce(torch.zeros_like(layer.weight.to_local()), "sum", watched_mesh)
    assert type(local) is AsyncCollectiveTensor
    layer.weight.grad = DTensor.from_local(local, watched_mesh, [Shard(0)], run_check=False)
    other = distribute_tensor(torch.zeros(6, 6), watched_mesh, [Shard(0)])
    other[0].zero_()
    with pytest.raises(ValueError, match=f"^bias: {LOST}"):
        layer.bias.detach()[:1].zero_()
    local.wait()


def test_a_slice_is_copied_and_saved_as_what_it_is(watched_mesh, tmp_path):
    layer = simple_fsdp(nn.Linear(6, 8), watched_mesh)
    part = layer.weight.detach()[:3]
    assert type(part) is CopiedSlice
    torch.save({"rows": part}, tmp_path / "rows.pt")
    for again in (torch.load(tmp_path / "rows.pt")["rows"], copy.deepcopy([part])[0]):
        assert type(again) is DTensor and torch.equal(again.to_local(), part.to_local())
        again.zero_()  # nobody takes it for the parameter
        assert part.to_local().any()


@pytest.fixture
def watched_mesh(fake_mesh):
    """For what torch does not tell of in older versions."""
    mesh = fake_mesh(2)
    layer = simple_fsdp(nn.Linear(6, 8), mesh)
    with torch.no_grad(), contextlib.suppress(ValueError):
        layer.weight[0].zero_()
    if not CopiedSlice.is_watched:
        pytest.skip("this torch does not tell subclasses of DTensor that they are written to")
    return mesh


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_any_write_raises(fake_mesh, write):
    layer = simple_fsdp(nn.Linear(6, 8), fake_mesh(2))
    with torch.no_grad(), pytest.raises(ValueError, match=LOST):
        write(layer.weight[0])


def zero_in_hook(grad):
    grad = grad.clone()
    grad[:3] = 0
    return grad


@pytest.mark.parametrize("in_hook", [True, False])
def test_so_does_one_to_a_gradient(watched_mesh, in_hook):
    """That is how rows of an embedding are frozen; with a mask it works."""
    layer = simple_fsdp(nn.Embedding(8, 6), watched_mesh)
    if in_hook:
        layer.weight.register_hook(zero_in_hook)

    def step() -> None:
        layer(torch.arange(8)).sum().backward()
        zero_in_hook(layer.weight.grad)

    with pytest.raises(ValueError, match=f"as weight is, such as its gradient: {LOST}.*aten.fill_"):
        step()


def test_and_one_to_a_view_of_a_gradient(watched_mesh):
    layer = simple_fsdp(nn.Linear(6, 8), watched_mesh)
    layer(torch.ones(2, 6)).sum().backward()
    for take in PARTS.values():
        with pytest.raises(ValueError, match=LOST):
            take(layer.weight.grad).zero_()


def test_and_one_to_an_optimizers_state(watched_mesh):
    layer = simple_fsdp(nn.Embedding(8, 6), watched_mesh)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.arange(8)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=LOST):
        optimizer.state[layer.weight]["exp_avg"][:3] = 0


def rows_are_frozen() -> None:
    layer = simple_fsdp(nn.Embedding(8, 6))
    weight, mask = layer.weight, torch.arange(8)[:, None].ge(3).float()
    before = weight.detach().full_tensor()
    layer(torch.arange(8)).square().sum().backward()
    weight.grad.mul_(distribute_tensor(mask, weight.grad.device_mesh, weight.grad.placements))
    torch.optim.SGD(layer.parameters(), 0.1).step()
    after = weight.detach().full_tensor()
    assert torch.equal(after[:3], before[:3]) and after[3:].ne(before[3:]).all()


def rows_are_read() -> None:
    weight = simple_fsdp(nn.Linear(6, 8)).weight
    after = weight.detach().full_tensor()
    with torch.no_grad():
        for take in PARTS.values():
            assert torch.equal(take(weight).full_tensor(), take(after))
        assert weight[5, 1].item() == after[5, 1].item()
        assert torch.equal(torch.cat([weight[3:], weight[:3]]).full_tensor(), after.roll(-3, 0))
        assert torch.equal((weight[0] * 2).add_(1).full_tensor(), after[0] * 2 + 1)


def test_a_mask_freezes_rows(pools):
    pools(2).run(rows_are_frozen)


def test_what_is_read_is_right(pools, watched_mesh):
    pools(2).run(rows_are_read)


def test_other_slices_may_be_written_to(fake_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    layer.weight.data.fill_(1.0)
    assert layer.weight[0].shape == (4,)  # autograd refuses a write to it
    layer.weight.data[:, 1].zero_()
    layer.weight.data[:] = layer.weight.data * 1
    local = layer.weight.to_local()
    assert local[:, 1].eq(0).all() and not local[:, 0].eq(0).any()
    other = distribute_tensor(torch.ones(6, 4), layer.weight.device_mesh, [Shard(0)])
    other[0].zero_()  # nothing of a parameter's
    with unsharded(layer):
        layer.weight.data[0].zero_()
