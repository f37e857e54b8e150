"""Matches the tensors of a folder with those of a model; errors name what does not fit."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from simplefsdp.pretrained import huggingface
from simplefsdp.pretrained.files import Entry
from simplefsdp.pretrained.named import DTYPES, plain_name
from simplefsdp.words import few

Rename = Callable[[str], str | None]


class Unmatched(NamedTuple):
    """Names that ``load_pretrained`` ignored: ``missing`` ones of the model, for which the folder
    has no values, and ``unexpected`` ones of the folder."""

    missing: list[str]
    unexpected: list[str]


def match(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, Entry],
    rename: Rename | None,
    *,
    strict: bool,
) -> tuple[dict[str, str], Unmatched]:
    """The model's names by names in the files, and the names left over on both sides. Shapes,
    dtypes and placements are checked.

    Raises:
        ValueError: something does not fit; or, if ``strict``, names are left over.
    """
    names, unexpected, merged = _matched(model, tensors, entries, rename)
    read = {id(tensors[key]) for key in names.values()}
    left = [key for key, tensor in tensors.items() if id(tensor) not in read]
    needless = huggingface.may_be_missing(model)
    missing = [k for k in left if not needless(k) or tensors[k].is_meta]
    known = huggingface.may_be_unexpected(model)
    unexpected = [name for name in unexpected if not known(name)]
    if strict and (missing or unexpected):
        raise ValueError(_told(missing, unexpected, merged))
    without = [key for key in missing if tensors[key].is_meta]
    if without:
        raise ValueError(
            f"{few(without)}: on the meta device, and the folder has no values; call "
            "simplefsdp.init_weights(model) first, then load_pretrained(..., strict=False)"
        )
    for name, key in names.items():
        _check(name, entries[name], key, tensors[key])
    return names, Unmatched(missing, unexpected)


def _matched(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, Entry],
    rename: Rename | None,
) -> tuple[dict[str, str], list[str], list[str]]:
    """The model's names by names in the files; the names in the files that do not match; and those
    of the latter whose tensors transformers merges with others."""
    name_of = huggingface.names_in_model(model, tensors)
    by_key: dict[str, str] = {}
    unexpected, merged = [], []
    for name in entries:
        given = name if rename is None else rename(name)
        if given is None:
            continue
        key, is_merged = name_of(plain_name(given))
        if is_merged:
            merged.append(name)
        if is_merged or key not in tensors:
            unexpected.append(name)
        elif (other := by_key.setdefault(key, name)) != name:
            raise ValueError(f"folder: {other} and {name} both stand for {key} of the model")
    return {name: key for key, name in by_key.items()}, unexpected, merged


def _told(missing: list[str], unexpected: list[str], merged: list[str]) -> str:
    parts = [f"it lacks {few(missing)}"] if missing else []
    parts += [f"the model has no {few(unexpected)}"] if unexpected else []
    told = f"folder: {'; '.join(parts)}. "
    if merged:
        return told + (
            "Such tensors are merged by transformers as they load, but not by load_pretrained: "
            "build the model by from_pretrained() on the CPU of rank 0 and by from_config() on "
            "the others, then call simple_fsdp, which gives rank 0's values to everybody"
        )
    return told + (
        "Build the model by the folder's own config, pass rename= (from a name in the folder to "
        "the model's, or None), or strict=False to leave them as they are"
    )


def _check(name: str, entry: Entry, key: str, tensor: Tensor) -> None:
    if entry.shape != tuple(tensor.shape):
        raise ValueError(
            f"{key}: expected shape {tuple(tensor.shape)}, and {name} in {entry.file.name} is "
            f"{entry.shape}; build the model by the folder's own config"
        )
    dtype = DTYPES.get(entry.dtype)
    kinds = [
        d and (d.is_floating_point, d.is_complex, d.itemsize < 2) for d in (dtype, tensor.dtype)
    ]
    if dtype != tensor.dtype and kinds[0] != kinds[1]:
        raise ValueError(
            f"{key}: is {tensor.dtype}, and {name} in {entry.file.name} is {entry.dtype}, from "
            "which there is no plain conversion; quantized weights must be unpacked first"
        )
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise ValueError(
            f"{key}: is placed {placements}, and load_pretrained reads only Shard and "
            "Replicate; load by from_pretrained() before parallelize_module"
        )
