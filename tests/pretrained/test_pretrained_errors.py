"""Folders that do not fit, or that one rank cannot read or write: told by name, on all ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from test_pretrained import ZooWithBuffers, assert_same, meta_zoo, untied, write, zoo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import WIDTH

from simplefsdp import (
    full_state_dict,
    init_weights,
    load_pretrained,
    save_pretrained,
    simple_fsdp,
)
from simplefsdp.pretrained import writer
from simplefsdp.rank_guard import RankMismatchError


def loaded(solo_mesh, folder: Path, **options) -> nn.Module:
    model = simple_fsdp(meta_zoo(), solo_mesh)
    load_pretrained(model, folder, **options)
    return model


def without(tensors: dict, *names: str) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


BAD = {
    "missing": (
        lambda t: without(t, "row", "embed.weight"),
        r"folder: it lacks row, embed.weight, head.weight\. Build .* rename= ",
    ),
    "unexpected": (lambda t: {**t, "more.bias": torch.ones(2)}, "the model has no more.bias. B"),
    "shape": (
        lambda t: {**t, "tiny": torch.ones(WIDTH, 3)},
        r"tiny: expected shape \(3, 8\), and tiny in model.safetensors is \(8, 3\)",
    ),
    "scalar": (lambda t: {**t, "scale": torch.ones(1)}, r"scale: expected shape \(\), .* \(1,\)"),
    "quantized": (
        lambda t: {**t, "tiny": torch.ones(3, WIDTH, dtype=torch.int8)},
        "tiny: is torch.float32, and tiny in model.safetensors is I8",
    ),
    "float8": (
        lambda t: {**t, "tiny": torch.ones(3, WIDTH).to(torch.float8_e4m3fn)},
        "is F8_E4M3, from which there is no plain conversion",
    ),
    "untied": (
        lambda t: {**t, "head.weight": t["embed.weight"] + 1},
        "embed.weight and head.weight have different values, and are one parameter",
    ),
    "twice": (
        lambda t: {**t, "_orig_mod.row": t["row"].clone()},
        "_orig_mod.row and row both stand for row of the model",
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_what_does_not_fit_is_told_by_name(solo_mesh, tmp_path, how):
    change, message = BAD[how]
    with pytest.raises(ValueError, match=message):
        loaded(solo_mesh, write(tmp_path / "x", change(untied(zoo()))))


def test_what_failed_leaves_the_model_on_meta(solo_mesh, tmp_path):
    model = simple_fsdp(meta_zoo(), solo_mesh)
    before = dict(model.named_parameters())
    bad = BAD["untied"][0](untied(zoo()))
    with pytest.raises(ValueError, match="different values"):
        load_pretrained(model, write(tmp_path / "x", bad))
    assert all(param is before[fqn] for fqn, param in model.named_parameters())
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    load_pretrained(model, write(tmp_path / "y", untied(zoo())))
    assert_same(model, zoo())


def test_names_of_other_programs(solo_mesh, tmp_path):
    both = {**untied(zoo()), "head.weight": zoo().embed.weight}  # equal: as pytorch_model.bin had
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in both.items()}
    assert_same(loaded(solo_mesh, write(tmp_path / "x", compiled)), zoo())
    theirs = {f"theirs.{name}": tensor for name, tensor in untied(zoo()).items()}
    theirs["theirs.step"] = torch.tensor(1)

    def rename(name: str) -> str | None:
        return None if name == "theirs.step" else name.removeprefix("theirs.")

    assert_same(loaded(solo_mesh, write(tmp_path / "y", theirs), rename=rename), zoo())


def test_not_strict_leaves_what_does_not_match(solo_mesh, tmp_path):
    some = {**without(untied(zoo()), "row", "count"), "more": torch.ones(1)}
    folder = write(tmp_path / "x", some)
    model = simple_fsdp(meta_zoo(), solo_mesh)
    with pytest.raises(ValueError, match=r"row, count: on the meta device, and .*init_weights"):
        load_pretrained(model, folder, strict=False)
    model = simple_fsdp(ZooWithBuffers(), solo_mesh)
    row = model.row.full_tensor().clone()
    left = load_pretrained(model, folder, strict=False)
    assert left.missing == ["row", "count"] and left.unexpected == ["more"]
    assert torch.equal(model.row.full_tensor(), row) and int(model.count) == 7
    assert torch.equal(model.tiny.full_tensor(), zoo().tiny)


def test_a_compiled_model(solo_mesh, tmp_path):
    model = torch.compile(simple_fsdp(meta_zoo(), solo_mesh), backend="eager")
    load_pretrained(model, write(tmp_path / "x", untied(zoo())))
    assert_same(model._orig_mod, zoo())
    assert list(full_state_dict(model)) == list(zoo().state_dict())


def test_after_to_empty(solo_mesh, tmp_path):
    model = simple_fsdp(meta_zoo(), solo_mesh).to_empty(device="cpu")
    model.made.copy_(torch.arange(3.0))
    model.blocks[1].running = model.blocks[0].running  # of buffers, to_empty() unties them
    load_pretrained(model, write(tmp_path / "x", untied(zoo())))
    assert all(
        torch.equal(p.full_tensor(), zoo().get_parameter(n)) for n, p in model.named_parameters()
    )
    tokens = torch.arange(5)[None]
    assert torch.equal(model(tokens), zoo()(tokens))


def test_a_buffer_that_nobody_makes_is_told_by_name(solo_mesh, tmp_path):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Table())
    simple_fsdp(model, solo_mesh)
    folder = write(tmp_path / "x", nn.Sequential(nn.Linear(2, 2)).state_dict())
    with pytest.raises(ValueError, match=r"1.table: a buffer that files do not have"):
        load_pretrained(model, folder)


def test_what_is_no_such_folder(solo_mesh, tmp_path):
    model = simple_fsdp(meta_zoo(), solo_mesh)
    with pytest.raises(ValueError, match=r"org/name is not a folder.*snapshot_download"):
        load_pretrained(model, "org/name")
    with pytest.raises(ValueError, match=r"has no such file; other formats"):
        load_pretrained(model, tmp_path)
    folder = write(tmp_path / "x", untied(zoo()), parts=2)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part-1.safetensors: cannot be read"):
        load_pretrained(model, folder)
    save_file({}, folder / "part-1.safetensors")
    with pytest.raises(ValueError, match=r"says that .* is in part-1.safetensors, which has no"):
        load_pretrained(model, folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"has 2 safetensors files and no index"):
        load_pretrained(model, folder)
    with pytest.raises(ValueError, match=r"expected a module wrapped by simple_fsdp, got Zoo"):
        load_pretrained(zoo(), folder)


def damaged_on_one_rank(folder: Path) -> str:
    rank = dist.get_rank()
    model = simple_fsdp(meta_zoo(), init_device_mesh("cpu", (2,)))
    with pytest.raises((ValueError, RankMismatchError)) as caught:
        load_pretrained(model, folder / str(rank))
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    load_pretrained(model, folder / "0")  # nobody is out of step
    assert_same(model, zoo())
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["truncated", "untied"])
def test_what_one_rank_cannot_read_all_hear_of(pools, tmp_path, how):
    """A header that is damaged, and what is found out only by reading."""
    wanted = untied(zoo())
    if how == "untied":
        wanted["head.weight"] = wanted["embed.weight"].clone()
    write(tmp_path / "0", wanted)
    if how == "untied":
        wanted["head.weight"] = wanted["embed.weight"] + 1
    write(tmp_path / "1", wanted)
    file = tmp_path / "1" / "model.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    zero, one = pools(2).run(damaged_on_one_rank, tmp_path)
    words = {"truncated": "cut short or damaged", "untied": "have different values"}
    assert one.startswith("ValueError") and words[how] in one
    assert zero.startswith("RankMismatchError") and "rank 1 has 'failed: ValueError: " in zero


def disk_full_on_rank_0(folder: Path, rows: int) -> str:
    model = simple_fsdp(ZooWithBuffers(), init_device_mesh("cpu", (2,)))
    load_pretrained(model, folder)
    written, to_bytes = [], writer._bytes_of

    def bytes_of(rows_: torch.Tensor):
        written.append(rows_)
        if len(written) > rows:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return to_bytes(rows_)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(writer, "_bytes_of", bytes_of)
        with pytest.raises((OSError, RankMismatchError)) as caught:
            save_pretrained(model, folder / "full", max_shard_size=1200)
    assert len(written) == (rows + 1 if dist.get_rank() == 0 else 0)
    save_pretrained(model, folder / "again")  # nobody is out of step
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_full_disk_on_rank_0_is_an_error_on_all(pools, tmp_path):
    folder = write(tmp_path / "x", untied(zoo()))
    zero, one = pools(2).run(disk_full_on_rank_0, folder, 3)
    assert "No space left" in zero
    assert one.startswith("RankMismatchError") and "rank 0 has 'failed: OSError: " in one
    assert sorted(os.listdir(folder)) == ["again", "model.safetensors"]


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}


def test_what_cannot_be_saved(solo_mesh, tmp_path):
    model = simple_fsdp(meta_zoo(), solo_mesh)
    for save in (full_state_dict, lambda m: save_pretrained(m, tmp_path / "x")):
        with pytest.raises(ValueError, match=r"tiny, row, .* on the meta device, without"):
            save(model)
    init_weights(model, init_fn=lambda m: [t.zero_() for t in [*m.parameters(), *m.buffers()]])
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(ValueError, match="already exists: choose another folder"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"max_shard_size: expected bytes, .* got '5 bananas'"):
        save_pretrained(model, tmp_path / "x", max_shard_size="5 bananas")
    with pytest.raises(ValueError, match=r"0._extra_state: is no tensor"):
        save_pretrained(simple_fsdp(nn.Sequential(Extra(2, 2)), solo_mesh), tmp_path / "x")
    assert [file.name for file in tmp_path.iterdir()] == ["keep"]
