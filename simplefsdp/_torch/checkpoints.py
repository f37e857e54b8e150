"""Loads a distributed checkpoint of torch's, by metadata that was read before."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

DAMAGED = "it is damaged"
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def storage_info(name: str, offset: int, length: int, transforms: Sequence[str] | None) -> Any:
    """Where a part of a tensor is stored: file, first byte, length, and the transforms applied."""
    return _StorageInfo(name, offset, length, transforms)


def load_by(
    metadata: Metadata, folder: Path, targets: dict[str, Any], *, no_dist: bool = False
) -> None:
    """Fill ``targets``, by key, from the files of ``folder`` that ``metadata`` describes. Tensors
    are filled in place; other values are replaced. With ``no_dist`` this process loads alone,
    whether there is a process group or not.

    Nothing in the files is run: values that are no tensors are read by
    ``torch.load(weights_only=True)``. Raises a ValueError, on all ranks, if a file cannot be read
    or holds an object that ``weights_only`` refuses.
    """
    with warnings.catch_warnings():
        if no_dist:  # torch warns that torch.distributed is not initialised, which is fine here
            warnings.simplefilter("ignore")
        try:
            load(
                targets,
                storage_reader=_Reader(folder, metadata),
                planner=_Planner(),
                no_dist=no_dist,
            )
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise ValueError(f"{_first_line(cause)} (on rank {rank})") from None


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except Exception as error:  # damaged bytes can raise anything
                raise ValueError(f"{name} cannot be read: {_first_line(error)}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Like the method it overrides, which unpickles whatever it is given; this one does not."""
        key = read_item.dest_index.fqn
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            refused = _REFUSED.search(str(error))
            if refused is None:
                raise
            raise ValueError(
                f"{key} is a {refused[1]}, whose making may run code; if you trust it, call "
                "torch.serialization.add_safe_globals with it"
            ) from None
        set_element(self.original_state_dict, self.mappings[key], found)


def _first_line(error: BaseException) -> str:
    """What is wrong, in one line. For a damaged file that is "it is damaged": torch's own message
    explains in a hundred lines how to run what is in it."""
    if isinstance(error, UnpicklingError):
        return DAMAGED
    line = (str(error).splitlines() or [""])[0][:300]
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}"
