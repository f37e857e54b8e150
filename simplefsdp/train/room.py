"""Whether a disk has room: for one checkpoint before it is written, for all of them at the start.

A new checkpoint is written before an old one is deleted: a run that keeps two has three for a
moment.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from torch import nn

from simplefsdp.words import plural

_MOMENTS = 2  # tensors of AdamW's state for each trained parameter
# What a checkpoint takes beside its tensors. Torch writes about 2 kB of headers and 0.2 kB of
# metadata for each part of a tensor. The checkpoint of a debug run with 37.0 MB of tensors takes
# 37.8 MB; at 2.2 kB a part, one of 8B on 1,024 ranks takes 2 % more than its tensors.
_BESIDE_NBYTES, _BESIDE_SHARE = 10**6, 0.03
_REMEDY = "free space there, give another --out, or do without checkpoints (--checkpoint-every 0)"


def nbytes_of_model(model: nn.Module) -> int:
    """Bytes of a checkpoint's tensors: ``model``, which may be on meta, and its AdamW state."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(t.nbytes for t in model.state_dict().values()) + _MOMENTS * trained


def on_disk(nbytes: int) -> int:
    """Bytes that a checkpoint with ``nbytes`` of tensors takes on a disk. The estimate is rather
    too high, except where parts of tensors are tiny."""
    return round(nbytes * (1 + _BESIDE_SHARE)) + _BESIDE_NBYTES


def shortage(folder: Path, nbytes: int) -> str | None:
    """Why a checkpoint with ``nbytes`` of tensors does not fit on ``folder``'s disk, or None."""
    free, has_inodes = _free(folder)
    takes = on_disk(nbytes)
    if free < takes:
        return (
            f"the disk of {folder} has {_mb(free)} of free space, a checkpoint takes {_mb(takes)}"
        )
    if not has_inodes:
        return f"the disk of {folder} has no free space for another file (no inodes left)"
    return None


def why_unsaved(folder: Path, error: BaseException) -> str:
    """Why a save in ``folder`` failed with ``error``; call it before its files are deleted.

    Torch's writer does not say that a disk is full: its C++ part reports a wrong position in the
    file instead. So the free space is looked at here.
    """
    what = f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    with suppress(OSError):  # if the disk is gone, ``error`` says so
        free, has_inodes = _free(folder)
        full |= free < _BESIDE_NBYTES or not has_inodes
    if full:
        return f"the disk of {folder} had no free space left while it was written ({what})"
    return what


def check_room(out: Path, nbytes: int) -> None:
    """Raise ValueError if the disk of a run folder does not hold one more checkpoint."""
    if (short := shortage(out, nbytes)) is not None:
        raise ValueError(f"--out {out}: {short}; {_REMEDY}")


def warning(out: Path, nbytes: int, keep: int, there: int) -> str | None:
    """A warning if the disk of the run folder ``out`` will not hold all checkpoints, else None.

    The run keeps ``keep`` checkpoints with ``nbytes`` of tensors each; ``there`` exist already.
    """
    wanted = max(1, keep + 1 - there)  # one more than it keeps, while that is written
    free, takes = _free(out)[0], on_disk(nbytes)
    if free >= wanted * takes:
        return None
    fit = free // takes
    return (
        f"warning: the disk of {out} has {_mb(free)} of free space, room for "
        f"{plural(fit, 'more checkpoint')} of {_mb(takes)}, where --keep {keep} needs {wanted}: "
        "later ones will not be saved"
    )


def _free(folder: Path) -> tuple[int, bool]:
    """Free bytes on the disk where ``folder`` is, or will be, and whether it takes another file."""
    folder = folder.absolute()
    disk = os.statvfs(next(f for f in (folder, *folder.parents) if f.exists()))
    return disk.f_bavail * disk.f_frsize, not disk.f_files or disk.f_favail > 0


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
