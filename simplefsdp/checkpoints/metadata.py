"""Reads the ``.metadata`` of a distributed checkpoint without unpickling it, and checks it.

All that can be wrong with it is found here. So torch's reader only sees tensors whose parts exist,
lie in files of the folder, and cover the tensor.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product, starmap
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from simplefsdp._torch.checkpoints import storage_info
from simplefsdp.checkpoints.pickled import Named, Record, read_pickle

NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Named("torch", "Size")
_LAYOUT = Named("torch.serialization", "_get_layout")
_DTYPES = {
    Named("torch", name): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype)
}
_OURS = {
    name: Named(_MODULE, name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
# The metadata holds the folder that was written to: a path, whose class depends on the machine and
# on the version of Python that wrote it.
_PATHS = [
    Named(module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
]
_KNOWN = {*_OURS.values(), *_PATHS, *_DTYPES, _STORAGE_INFO, _SIZE, _LAYOUT}
_MOST_DIMS = 64
# Limits, because in a small pickle every place may refer to one long list, or one long name, which
# is gone through for each place.
_MOST_TRANSFORMS = 8
_MOST_CHARACTERS = 4096

T = TypeVar("T")


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of the checkpoint in ``folder``, without running any code in it.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        ValueError: it is damaged, asks for a class that no metadata needs, or names a file outside
            of the folder.
    """
    path = folder / NAME
    if path.exists() and not path.is_file():
        raise ValueError(f"{NAME} is no file")
    data = path.read_bytes()
    try:
        return metadata_of(data)
    except ValueError as error:
        raise ValueError(f"{NAME}: {error}; nothing of it was run") from error


def metadata_of(data: bytes) -> Metadata:
    """Read metadata from its pickle ``data``; see :func:`read_metadata`."""
    state = _state(read_pickle(data, _KNOWN), "Metadata")
    entries = _get(state, "state_dict_metadata", dict)
    places = dict(starmap(_place, _get(state, "storage_data", dict).items()))
    # A pickle may repeat a chunk by reference, and each chunk costs time for its corners. Real
    # chunks take more bytes than they have corners.
    budget = len(data)
    tensors: dict[str, Any] = {}
    for key, entry in entries.items():
        tensors[_is(key, str, "a key")] = found = _entry(key, entry)
        if isinstance(found, TensorStorageMetadata):
            _check_parts(key, found, places)
            split = _split_dims(found)
            budget -= len(found.chunks) << len(split)
            if budget < 0:
                raise ValueError("it has more parts of tensors than it has bytes")
            if not _is_covered(found, split):
                which = f"{_short(key)}, which is {list(found.size)}"
                raise ValueError(f"the parts of {which}, overlap or leave gaps")
        elif MetadataIndex(key) not in places:
            raise ValueError(f"it does not say where {_short(key)} is")
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def files_of(metadata: Metadata) -> set[str]:
    """The files of a checkpoint: those that its metadata names, and the metadata itself."""
    return {NAME, *(place.relative_path for place in metadata.storage_data.values())}


def _entry(key: str, entry: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if isinstance(entry, Record) and entry.of == _OURS["BytesStorageMetadata"]:
        return BytesStorageMetadata()
    state = _state(entry, "TensorStorageMetadata")
    of = _get(state, "properties", Record)
    if of.of != _OURS["TensorProperties"] or type(of.state) is not tuple or len(of.state) < 5:
        raise ValueError(f"it has no properties of {_short(key)}")
    dtype, layout, grad, _, pinned, *_ = of.state  # the last is strides, which are not used
    if dtype not in _DTYPES if type(dtype) is Named else True:
        raise ValueError(f"{_short(key)}: it has no dtype")
    if not isinstance(layout, Record) or layout.args != ("torch.strided",):
        raise ValueError(f"{_short(key)}: it is not a dense tensor")
    properties = TensorProperties(
        dtype=_DTYPES[dtype], requires_grad=grad is True, pin_memory=pinned is True
    )
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _get(state, "chunks", list)]
    return TensorStorageMetadata(
        properties,
        _size(state.get("size")),
        [ChunkStorageMetadata(_size(c.get("offsets")), _size(c.get("sizes"))) for c in chunks],
    )


def _place(index: Any, info: Any) -> tuple[MetadataIndex, Any]:
    """Where a part of a tensor is."""
    at = _state(index, "MetadataIndex")
    if not isinstance(info, Record) or info.of != _STORAGE_INFO:
        raise ValueError("it has a place of another kind than a part of a file")
    where = _is(info.state, dict, "a place")
    name = _get(where, "relative_path", str)
    _check_path(name)
    offset, length = (_is_size(where.get(of)) for of in ("offset", "length"))
    transforms = where.get("transform_descriptors")
    if transforms is not None:
        if len(_is(transforms, list, "transforms")) > _MOST_TRANSFORMS:
            raise ValueError(
                f"a part of a file was transformed {len(transforms)} times, {_MOST_TRANSFORMS} are "
                "the most"
            )
        transforms = [_is(t, str, "a transform") for t in transforms]
    fqn, first, hint = _get(at, "fqn", str), at.get("offset"), at.get("index")
    found = MetadataIndex(
        fqn,
        None if first is None else _size(first),
        None if hint is None else _is_size(hint),
    )
    return found, storage_info(name, offset, length, transforms)


def _check_path(name: str) -> None:
    is_name = 0 < len(name) <= _MOST_CHARACTERS and name.isprintable() and "\\" not in name
    if not is_name or (path := PurePosixPath(name)).is_absolute() or ".." in path.parts:
        raise ValueError(f"it says that data is in {_short(name)}, which is not in its folder")


def _check_parts(key: str, found: TensorStorageMetadata, places: Mapping[Any, Any]) -> None:
    """Check that the chunks lie inside of the tensor, and that there are enough bytes for it."""
    nbytes, size, itemsize = 0, found.size, found.properties.dtype.itemsize
    for chunk in found.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
            offset + length <= whole
            for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        place = places.get(MetadataIndex(key, chunk.offsets))
        if not inside or place is None:
            what = "is not inside of it" if not inside else "is in no file"
            raise ValueError(f"a part of {_short(key)} {what}")
        nbytes += prod(chunk.sizes) * itemsize if place.transform_descriptors else place.length
    if nbytes < prod(size) * itemsize:
        raise ValueError(f"{_short(key)} is {list(size)}, its parts together are of {nbytes} bytes")


def _split_dims(found: TensorStorageMetadata) -> list[int]:
    """The dimensions in which not all chunks are as long as the tensor."""
    return [
        dim
        for dim, whole in enumerate(found.size)
        if any(chunk.sizes[dim] != whole for chunk in found.chunks)
    ]


def _is_covered(found: TensorStorageMetadata, split: Sequence[int]) -> bool:
    """Whether each element of the tensor is in exactly one chunk.

    Each corner of each chunk counts 1, or -1 if an odd number of its coordinates are ends of the
    chunk. Where chunks meet, their corners cancel. The sums at all corners determine how often each
    element is covered; they equal those of the tensor as one chunk if each element is covered once.
    Each chunk is looked at once, however the chunks lie.
    """
    if prod(found.size) == 0:
        return True
    signs = [prod(of) for of in product((1, -1), repeat=len(split))]
    left: dict[tuple[int, ...], int] = defaultdict(int)
    for corner, sign in zip(product(*((0, found.size[d]) for d in split)), signs, strict=True):
        left[corner] -= sign
    for chunk in found.chunks:
        begins, lengths = chunk.offsets, chunk.sizes
        ends = product(*((begins[d], begins[d] + lengths[d]) for d in split))
        for corner, sign in zip(ends, signs, strict=True):
            left[corner] += sign
    return not any(left.values())


def _size(value: Any) -> torch.Size:
    if not isinstance(value, Record) or value.of != _SIZE or len(value.args) != 1:
        raise ValueError("it has a size that is none")
    dims = _is(value.args[0], tuple, "a size")
    if len(dims) > _MOST_DIMS:
        raise ValueError(f"it has a tensor of {len(dims)} dimensions")
    return torch.Size([_is_size(n) for n in dims])


def _is_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a size, got {_short(value)}")
    return value


def _state(value: Any, name: str) -> dict[Any, Any]:
    """The fields of a record of the class ``name``."""
    if not isinstance(value, Record) or value.of != _OURS[name] or type(value.state) is not dict:
        raise ValueError(f"expected a {name}, got {_short(value)}")
    return value.state


def _get(state: Mapping[Any, Any], name: str, cls: type[T]) -> T:
    return _is(state.get(name), cls, name)


def _is(value: Any, cls: type[T], what: str) -> T:
    if type(value) is not cls:
        raise ValueError(f"{what}: expected a {cls.__name__}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    """A short text for a value in a message; the value may be large, or nested without end."""
    if isinstance(value, (str, int)):
        text = repr(value) if isinstance(value, str) or abs(value) < 2**64 else "a huge number"
        return text if len(text) <= 100 else f"{text[:100]}..."
    return str(value.of)[:100] if isinstance(value, Record) else f"a {type(value).__name__}"
