"""Loads a folder of safetensors files directly into this rank's shards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp.frontend.initialize import materialize, shard_offsets
from simplefsdp.pretrained import buffers
from simplefsdp.pretrained.files import Entry, entries_of, opened
from simplefsdp.pretrained.match import Rename, Unmatched, match
from simplefsdp.pretrained.named import tensors_of, wrapped_model
from simplefsdp.pretrained.together import together
from simplefsdp.rank_guard import ranks_of_params

Progress = Callable[[int, int], object]


@torch.no_grad()
def load_pretrained(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    progress: Progress | None = None,
) -> Unmatched:
    """Give a wrapped model the values in a folder of safetensors files, in place.

    Each rank reads its own part and nothing else. It never holds more than its shards, and the
    pages of one file, which the system reclaims when it needs memory. A model that was built under
    ``torch.device("meta")`` gets memory; make the optimizer after this call. Values are cast to the
    parameters' dtype. A tied parameter needs only one of its names in the folder. Buffers that
    files do not have are made by the model's own initialisers (transformers' ``_init_weights``,
    ``reset_parameters``). Collective: all ranks must call it, and see the same folder, or a copy of
    it. If it fails on one rank, it fails on all, and parameters that were on meta are so again.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`.
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        device: where to allocate tensors that are on meta; default: the current device of the
            mesh's type.
        strict: False to ignore names that only the folder, or only the model, has.
        rename: maps a name in the folder to the model's name for it, or to None to leave the tensor
            out. Names that transformers has changed need no ``rename``.
        progress: called after each tensor with the number of tensors read so far, and of all.

    Returns:
        The names that did not match; there are none unless ``strict=False``.

    Raises:
        ValueError: not wrapped; a file is missing or damaged; names, shapes or dtypes do not fit;
            tied parameters have different values; or nothing makes a buffer's values.
        RankMismatchError: another rank failed, or has another model or folder.
    """
    model = wrapped_model(model)
    ranks = ranks_of_params(model.parameters())
    with together("the folder given to load_pretrained", ranks) as lines:
        entries = entries_of(folder)
        names, unmatched = match(model, tensors_of(model), entries, rename, strict=strict)
        lines.extend(f"{name}: {entries[name][1:]} for {key}" for name, key in names.items())
    places = buffers.without_values(model)
    with _put_back_on_error(model), together("what load_pretrained does", ranks):
        materialize(model, device)
        buffers.make(model, places)
        _read(tensors_of(model), names, entries, progress)
    return unmatched


@contextmanager
def _put_back_on_error(model: nn.Module) -> Iterator[None]:
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, parameters, own_buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(own_buffers)
        raise


def _read(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    entries: Mapping[str, Entry],
    progress: Progress | None,
) -> None:
    by_file: dict[Any, list[str]] = {}
    for name in names:
        by_file.setdefault(entries[name].file, []).append(name)
    filled: dict[int, str] = {}
    done = 0
    for file, inside in by_file.items():
        with opened(file) as stored:  # one at a time: an open file's pages count as ours
            for name in inside:
                tensor = tensors[names[name]]
                tied = filled.setdefault(id(tensor), name)
                _fill(tensor, stored.get_slice(name), None if tied == name else (tied, name))
                done += 1
                if progress is not None:
                    progress(done, len(names))


def _fill(tensor: Tensor, stored: Any, tied: tuple[str, str] | None) -> None:
    """Copy this rank's part of a stored tensor into ``tensor``. If ``tensor`` was filled under
    another name before (``tied``), compare the values instead."""
    local = tensor.detach()
    offsets = [0] * local.dim()
    if isinstance(local, DTensor):
        offsets = shard_offsets(local)
        local = local.to_local()
    if not local.numel():
        return
    part = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))
    values = stored[part] if part else stored[...]
    if tied is None:
        local.copy_(values)
    elif not torch.equal(local, values.to(local)):
        raise ValueError(
            f"folder: {tied[0]} and {tied[1]} have different values, and are one parameter in the "
            "model; build it with tie_word_embeddings=False"
        )
