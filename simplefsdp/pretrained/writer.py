"""Files in the format of safetensors, written a few rows at a time, and the folder around them.

The library writes a file only from whole tensors in memory. The format is a header of JSON, its
length before it as eight bytes, and the tensors' bytes one after another.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from simplefsdp.pretrained.files import INDEX, SINGLE
from simplefsdp.pretrained.named import DTYPES, nbytes_of

T = TypeVar("T")
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


def check_new(folder: Path) -> None:
    """Raise ValueError unless ``folder`` is not there, or empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: choose another folder")


def begin(folder: Path) -> Path:
    """Make the folder, beside ``folder``, that :func:`publish` will put in its place."""
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    discard(partial)  # of a killed process that had our id
    partial.mkdir()
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Give what is complete its name."""
    os.replace(partial, folder)


def discard(partial: Path) -> None:
    """Take away what will not be complete."""
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``folder`` at the end, or nothing if the block fails."""
    partial = begin(folder)
    try:
        yield partial
        publish(partial, folder)
    except BaseException:
        discard(partial)
        raise


def in_files(
    tensors: Iterable[tuple[str, T]], nbytes: Callable[[T], int], max_nbytes: int
) -> Iterator[dict[str, T]]:
    """Consecutive tensors of at most ``max_nbytes`` together; a larger one is alone."""
    held: dict[str, T] = {}
    held_nbytes = 0
    for name, tensor in tensors:
        if held and held_nbytes + nbytes(tensor) > max_nbytes:
            yield held
            held, held_nbytes = {}, 0
        held[name] = tensor
        held_nbytes += nbytes(tensor)
    if held:
        yield held


class Writer:
    """Writes one file after another; their names need their number, so they come at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        self._files: list[list[str]] = []

    @contextmanager
    def file(self, tensors: Mapping[str, Tensor]) -> Iterator[Callable[[str, int, Tensor], None]]:
        """A file of tensors of these shapes and dtypes, in any order.

        Gives what writes rows: the tensor's name, the index of the first row, and the rows.
        """
        header, offsets = _header(tensors)
        part = self.folder / f"part-{len(self._files)}"
        with part.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(nbytes_of, tensors.values())))

            def write(name: str, first: int, rows: Tensor) -> None:
                row_nbytes = nbytes_of(rows) // max(1, rows.shape[0]) if rows.dim() else 0
                file.seek(len(header) + offsets[name] + first * row_nbytes)
                file.write(_bytes_of(rows))

            yield write
        self._files.append(list(tensors))
        self.nbytes += sum(map(nbytes_of, tensors.values()))

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """A file of ``tensors``, which are in memory."""
        with self.file(tensors) as write:
            for name, tensor in tensors.items():
                write(name, 0, tensor)

    def finish(self) -> None:
        """Name the files; of several, write the index."""
        n = len(self._files)
        if n == 1:
            self._part(0).rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
            self._part(i).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
        write_json(self.folder / INDEX, index)

    def _part(self, i: int) -> Path:
        return self.folder / f"part-{i}"


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor's bytes begin after it: wide dtypes first, aligned."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _WORDS:
            raise ValueError(f"{name}: is {tensor.dtype}, which safetensors files do not have")
        offsets[name], end = end, end + nbytes_of(tensor)
        told[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _bytes_of(rows: Tensor) -> Any:
    flat = rows.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def write_json(file: Path, contents: Mapping[str, Any]) -> None:
    """Write it as people read it."""
    file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
