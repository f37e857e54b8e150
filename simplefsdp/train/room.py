"""Whether a disk has room: for one checkpoint before it is written, for all of them at the start.

A checkpoint is written beside those that are there, and only then an old one is deleted: a run that
keeps two has three for a moment.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_MOMENTS = 2  # AdamW's, of each parameter that is trained
_REMEDY = "free space there, give another --out, or do without checkpoints (--checkpoint-every 0)"


def nbytes_of_model(model: nn.Module) -> int:
    """Bytes of one checkpoint of ``model``, which may be on meta, and of its AdamW's state."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(t.nbytes for t in model.state_dict().values()) + _MOMENTS * trained


def nbytes_of(tensors: Any) -> int:
    """Bytes that all ranks together write of a nest of tensors; of a DTensor's, each shard once."""
    return sum(t.numel() * t.element_size() for t in _flat(tensors))


def _flat(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _flat(value)


def shortage(folder: Path, nbytes: int) -> str | None:
    """Why ``nbytes`` more do not fit on the disk of ``folder``; None if they do."""
    disk = os.statvfs(_existing(folder))
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        return (
            f"the disk of {folder} has {_mb(free)} of free space, a checkpoint takes {_mb(nbytes)}"
        )
    if disk.f_files and not disk.f_favail:
        return f"the disk of {folder} has no free space for another file (no inodes left)"
    return None


def check_room(out: Path, nbytes: int) -> None:
    """Raise ValueError if the disk of a run folder does not hold one more checkpoint."""
    if (short := shortage(out, nbytes)) is not None:
        raise ValueError(f"--out {out}: {short}; {_REMEDY}")


def warning(out: Path, nbytes: int, keep: int, there: int) -> str | None:
    """A line on a disk that will not hold all the checkpoints that a run is to keep.

    Args:
        out: the run folder.
        nbytes: of a checkpoint.
        keep: how many are kept.
        there: how many there are already.
    """
    wanted = max(1, keep + 1 - there)  # one more, while it is written
    disk = os.statvfs(_existing(out))
    free = disk.f_bavail * disk.f_frsize
    if free >= wanted * nbytes:
        return None
    return (
        f"warning: the disk of {out} has {_mb(free)} of free space, room for {free // nbytes} more "
        f"checkpoints of {_mb(nbytes)}, where --keep {keep} needs {wanted}: later ones will not "
        "be saved"
    )


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(f for f in (folder, *folder.parents) if f.exists())


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
