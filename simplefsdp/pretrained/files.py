"""Lists the tensors in a folder of safetensors files, reading only the files' headers."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from inductor_passes.ir.json_file import MIB, read_json, shown, typed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX_NBYTES = 512 * MIB
_MAX_NAME = 255


class Entry(NamedTuple):
    """A tensor in a file; ``dtype`` is the name that the file has for it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def entries_of(folder: str | PathLike[str]) -> dict[str, Entry]:
    """Every tensor in ``folder``, by its name there."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"folder: {path} is not a folder on this machine; of a model on the Hub, pass what "
            "huggingface_hub.snapshot_download(name) returns"
        )
    index = _only(path, INDEX, "*.safetensors.index.json")
    if index is not None and not (path / SINGLE).is_file():
        return _indexed(index)
    single = _only(path, SINGLE, "*.safetensors")
    if single is None:
        several = len(list(path.glob("*.safetensors")))
        has = f"{several} safetensors files and no index of them" if several else "no such file"
        raise ValueError(
            f"folder: expected {SINGLE} or {INDEX} in {path}, which has {has}; other formats "
            "(pytorch_model.bin) become safetensors by from_pretrained() and save_pretrained()"
        )
    return _entries_in(single)


def _only(folder: Path, name: str, pattern: str) -> Path | None:
    """The file ``name``, else the only file that fits ``pattern``: diffusers uses other names."""
    if (folder / name).is_file():
        return folder / name
    found = list(folder.glob(pattern))
    return found[0] if len(found) == 1 else None


def _indexed(index: Path) -> dict[str, Entry]:
    weight_map = _weight_map(index)
    found: dict[str, Entry] = {}
    for name in dict.fromkeys(weight_map.values()):
        found |= _entries_in(index.with_name(name))
    absent = next((key for key, name in weight_map.items() if key not in found), None)
    if absent is not None:
        raise ValueError(
            f"{index}: says that {absent} is in {weight_map[absent]}, which has no such tensor"
        )
    return {key: found[key] for key in weight_map}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = typed(read_json(index, _MAX_INDEX_NBYTES), dict, "the index")
        weight_map = typed(found.get("weight_map"), dict, "weight_map")
        for key, name in weight_map.items():
            is_name = Path(typed(name, str, "a file")).name == name != ".." and name.isprintable()
            if not is_name or len(name) > _MAX_NAME:
                raise ValueError(f"{shown(key)} is in {shown(name)}, which is not in this folder")
    except (ValueError, OSError) as error:
        raise ValueError(f"{index}: is damaged ({error}); copy it again") from error
    return weight_map


def _entries_in(file: Path) -> dict[str, Entry]:
    with opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {
            name: Entry(file, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open ``file``. Its pages count as this process's memory until it is closed."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file}: cannot be read ({error}): it is missing, cut short or damaged; copy or "
            "download it again"
        ) from error
    with handle as tensors:
        yield tensors
