"""A folder of safetensors files into shards and back: the plain model's, bit for bit."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from zoo import Zoo

from simplefsdp import (
    full_state_dict,
    load_pretrained,
    save_pretrained,
    simple_fsdp,
)
from simplefsdp.pretrained import load, send
from simplefsdp.pretrained.files import opened
from simplefsdp.pretrained.named import DTYPES


class ZooWithBuffers(Zoo):
    """Also a buffer that no file has, a tied one, an integer one, and a matrix of many columns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.empty(3), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.blocks[1].running = self.blocks[0].running
        self.wide = nn.Linear(40, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.made.copy_(torch.arange(3.0))


def zoo() -> ZooWithBuffers:
    torch.manual_seed(1)
    model = ZooWithBuffers()
    model.blocks[0].running.normal_()
    model.count.fill_(11)
    return model


def meta_zoo() -> ZooWithBuffers:
    with torch.device("meta"):
        return ZooWithBuffers()


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a folder has of the zoo: tied ones once."""
    state = dict(model.state_dict())
    del state["head.weight"], state["blocks.1.running"]
    return state


def write(folder: Path, tensors: dict[str, torch.Tensor], parts: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(parts):
        part = dict(list(tensors.items())[i::parts])
        save_file(part, folder / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """On every rank, bit for bit, with the ties and the buffers of the plain one."""
    for fqn, param in plain.named_parameters():
        got = model.get_parameter(fqn)
        assert isinstance(got, DTensor) and got.dtype == param.dtype
        assert torch.equal(got.full_tensor(), param), fqn
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for fqn, buffer in plain.named_buffers():
        assert torch.equal(buffers[fqn], buffer), fqn
    assert model.head.weight is model.embed.weight
    assert model.blocks[1].running is model.blocks[0].running


def to_and_fro(folder: Path) -> None:
    """Load into every mode, and write what is a copy of the folder."""
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    hybrid = init_device_mesh("cpu", (2, ranks // 2))
    plain = zoo()
    for mode, mesh in (("fully_shard", flat), ("replicate", flat), ("hybrid_shard", hybrid)):
        for build in (meta_zoo, ZooWithBuffers):
            model = simple_fsdp(build(), mesh, mode=mode)
            seen = []
            left = load_pretrained(
                model, folder, progress=lambda *done, seen=seen: seen.append(done)
            )
            assert left == ([], [])
            assert seen[-1] == (len(seen), len(seen)) == (len(untied(plain)),) * 2
            assert_same(model, plain)
        state = full_state_dict(model)
        if dist.get_rank():
            assert state == {}
        else:
            wanted = plain.state_dict()
            assert list(state) == list(wanted)
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)
            assert state["head.weight"] is state["embed.weight"]
        save_pretrained(model, folder / mode, max_shard_size=600)
        save_pretrained(model, folder / mode / "single")


@pytest.mark.slow(quick=["3-2"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("parts", [1, 3])
def test_it_goes_in_and_comes_out_bit_for_bit(pools, tmp_path, ranks, parts):
    wanted = untied(zoo())
    pools(ranks).run(to_and_fro, write(tmp_path / "x", wanted, parts))
    for mode in ("fully_shard", "replicate", "hybrid_shard"):
        folder = tmp_path / "x" / mode
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 3
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        total = sum(tensor.nbytes for tensor in wanted.values())
        assert index["metadata"]["total_size"] == total
        got = {}
        for file in files:
            part = load_file(file)
            assert {name for name, f in index["weight_map"].items() if f == file.name} == set(part)
            assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 600
            got |= part
        for state in (got, load_file(folder / "single" / "model.safetensors")):
            assert state.keys() == wanted.keys()
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)
            assert all(state[name].dtype == wanted[name].dtype for name in wanted)
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_rank_reads_its_own_rows_and_no_more(fake_mesh, tmp_path, monkeypatch, rank):
    folder = write(tmp_path / "x", untied(zoo()))
    read = {}

    class Recorder:
        def __init__(self, file) -> None:
            self.file = file

        def get_slice(self, name: str) -> Recorder:
            self.name, self.part = name, self.file.get_slice(name)
            return self

        def __getitem__(self, index) -> torch.Tensor:
            read[self.name] = self.part[index]
            return read[self.name]

    @contextmanager
    def recorded(file: Path):
        with opened(file) as tensors:
            yield Recorder(tensors)

    monkeypatch.setattr(load, "opened", recorded)
    model = simple_fsdp(meta_zoo(), fake_mesh(4, rank=rank))
    load_pretrained(model, folder)
    for fqn, param in model.named_parameters():
        local, rows = param.to_local(), zoo().get_parameter(fqn)
        if rows.dim():
            chunk = -(-rows.shape[0] // 4)
            rows = rows[rank * chunk : (rank + 1) * chunk]
        assert torch.equal(local, rows), fqn
        assert read[fqn].shape == local.shape if rows.numel() else fqn not in read


def rows_at_once() -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(send, "_PIECE_NBYTES", 256)
        seen = []
        model = nn.Sequential(nn.Linear(8, 1001), nn.Linear(1001, 8, bias=False))
        simple_fsdp(model, init_device_mesh("cpu", (2,)))
        for param in model.parameters():
            send.send(param, 0, lambda first, rows: seen.append(rows.nbytes))
        return max(seen, default=0)


def test_no_rank_holds_a_whole_parameter(pools):
    """A piece of both ranks is 256 bytes, but for rows that are longer."""
    assert pools(2).run(rows_at_once) == [1001 * 4, 0]


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def tensor_parallel(folder: Path, names: tuple[str, str], piece_nbytes: int) -> None:
    send._PIECE_NBYTES = piece_nbytes
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch.manual_seed(0)
    plain = Columns()
    with torch.device("meta"):
        model = Columns()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    simple_fsdp(model, mesh["dp"])
    assert {type(p) for p in model.down.weight.placements} == {Shard}
    assert {p.dim for p in model.down.weight.placements} == {0, 1}
    load_pretrained(model, folder)
    for fqn, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(fqn).full_tensor(), param), fqn
    save_pretrained(model, folder / "again")


@pytest.mark.slow(quick=["33554432-names1", "60-names0", "60-names1"])
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("piece_nbytes", [1 << 25, 60])
def test_tensor_parallel_parameters(pools, tmp_path, names, piece_nbytes):
    torch.manual_seed(0)
    wanted = dict(Columns().named_parameters())
    folder = write(tmp_path / "x", wanted)
    pools(4).run(tensor_parallel, folder, names, piece_nbytes)
    got = load_file(folder / "again" / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_values_are_cast_to_the_parameters_dtype(solo_mesh, tmp_path):
    plain = nn.Linear(4, 3)
    folder = write(tmp_path / "x", {n: p.bfloat16() for n, p in plain.named_parameters()})
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    load_pretrained(simple_fsdp(model, solo_mesh), folder)
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight.full_tensor(), plain.weight.bfloat16().float())


def test_every_dtype_is_written_as_the_library_reads_it(solo_mesh, tmp_path):
    model = nn.Linear(2, 2)
    values = values_of_all_dtypes()
    for dtype, value in values.items():
        model.register_buffer(f"a_{dtype}".replace("torch.", ""), value)
    save_pretrained(simple_fsdp(model, solo_mesh), tmp_path / "x")
    got = load_file(tmp_path / "x" / "model.safetensors")
    for dtype, value in values.items():
        name = f"a_{dtype}".replace("torch.", "")
        assert got[name].dtype == dtype
        assert torch.equal(got[name].to(torch.complex64), value.to(torch.complex64)), dtype


def values_of_all_dtypes() -> dict[torch.dtype, torch.Tensor]:
    some = torch.tensor([[1, 0, 2], [0, 1, 0], [1, 1, 1]])
    return {dtype: some.to(dtype) for dtype in DTYPES.values()}


class Value(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value, requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.value


def all_dtypes_from_two_ranks(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dtype, value in values_of_all_dtypes().items():
        model = simple_fsdp(Value(value.to("meta")), mesh)
        load_pretrained(model, folder / str(dtype))
        state = full_state_dict(model)
        if dist.get_rank() == 0:
            assert state["value"].dtype == dtype
            assert torch.equal(state["value"].view(torch.uint8), value.view(torch.uint8)), dtype


def test_every_dtype_is_read_and_sent(pools, tmp_path):
    for dtype, value in values_of_all_dtypes().items():
        write(tmp_path / str(dtype), {"value": value})
    pools(2).run(all_dtypes_from_two_ranks, tmp_path)


def test_a_copy_of_a_state_dict_shares_no_memory(solo_mesh):
    model = simple_fsdp(zoo(), solo_mesh)
    state = full_state_dict(model)
    before = copy.deepcopy(state)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    assert all(torch.equal(state[name], before[name]) for name in state)
