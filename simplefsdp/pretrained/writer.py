"""Writes safetensors files a few rows at a time, and the folder around them.

The safetensors library writes a file only from whole tensors in memory. The format is the length of
a JSON header in eight bytes, the header, and the tensors' bytes one after another.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplefsdp.pretrained.files import INDEX, SINGLE
from simplefsdp.pretrained.named import DTYPES

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which is renamed to ``folder`` at the end, or removed if the block
    fails."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same id
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def in_files(tensors: Iterable[tuple[str, Tensor]], max_nbytes: int) -> Iterator[dict[str, Tensor]]:
    """Divide tensors into files: consecutive ones, of at most ``max_nbytes`` together; a larger
    tensor is alone."""
    held: dict[str, Tensor] = {}
    nbytes = 0
    for name, tensor in tensors:
        if held and nbytes + tensor.nbytes > max_nbytes:
            yield held
            held, nbytes = {}, 0
        held[name] = tensor
        nbytes += tensor.nbytes
    if held:
        yield held


class Writer:
    """Writes one file after another. They get their names at the end, as these hold the number of
    files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        self._files: list[list[str]] = []

    @contextmanager
    def file(self, tensors: Mapping[str, Tensor]) -> Iterator[Callable[[str, int, Tensor], None]]:
        """Begin a file of tensors with these names, shapes and dtypes.

        Gives a function that writes rows, in any order; its arguments are the name of the tensor,
        the index of the first row, and the rows.
        """
        header, offsets = _header(tensors)
        part = self.folder / f"part-{len(self._files)}"
        with part.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(t.nbytes for t in tensors.values()))

            def write(name: str, first: int, rows: Tensor) -> None:
                row_nbytes = rows.nbytes // max(1, rows.shape[0]) if rows.dim() else 0
                file.seek(len(header) + offsets[name] + first * row_nbytes)
                file.write(_bytes_of(rows))

            yield write
        self._files.append(list(tensors))
        self.nbytes += sum(t.nbytes for t in tensors.values())

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of ``tensors``, which are in memory."""
        with self.file(tensors) as write:
            for name, tensor in tensors.items():
                write(name, 0, tensor)

    def finish(self) -> None:
        """Name the files, and write the index if there are several."""
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
    """The header, and the offset of each tensor's bytes after it. Tensors of wide dtypes come
    first, so that all are aligned."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _WORDS:
            raise ValueError(f"{name}: is {tensor.dtype}, which safetensors files do not have")
        offsets[name], end = end, end + tensor.nbytes
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
    file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
