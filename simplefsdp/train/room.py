"""Whether a disk has room: for one checkpoint before it is written, for all of them at the start.

A checkpoint is written beside those that are there, and only then an old one is deleted: a run that
keeps two has three for a moment.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from torch import nn

from simplefsdp.words import plural

_MOMENTS = 2  # AdamW's, of each parameter that is trained
# What a file has beside its tensors: torch writes about 2 kB of headers for each part of a tensor,
# and 0.2 kB of metadata. A debug run's checkpoint of 37.0 MB takes 37.8; by that figure one of 8B
# on 1,024 ranks takes 2 % more than its tensors.
_BESIDE_NBYTES, _BESIDE_SHARE = 10**6, 0.03
_REMEDY = "free space there, give another --out, or do without checkpoints (--checkpoint-every 0)"


def nbytes_of_model(model: nn.Module) -> int:
    """Bytes of one checkpoint of ``model``, which may be on meta, and of its AdamW's state."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(t.nbytes for t in model.state_dict().values()) + _MOMENTS * trained


def on_disk(nbytes: int) -> int:
    """Bytes that a checkpoint of ``nbytes`` of tensors takes on a disk: rather too many, but where
    parts of tensors are tiny."""
    return round(nbytes * (1 + _BESIDE_SHARE)) + _BESIDE_NBYTES


def shortage(folder: Path, nbytes: int) -> str | None:
    """Why ``nbytes`` more of tensors do not fit on the disk of ``folder``; None if they do."""
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
    """What to say of a save in ``folder`` that ended with ``error``, whose files are still there.

    Torch's writer, whose C++ half takes a full disk for a wrong position in a file, does not tell
    that the disk is full: so it is looked at.
    """
    what = f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    with suppress(OSError):  # a disk that is gone: the error tells of it
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
    """A line on the disk of a run folder ``out`` that will not hold all the checkpoints that the
    run is to keep, of ``nbytes`` of tensors each, when so many are ``there`` already."""
    wanted = max(1, keep + 1 - there)  # one more, while it is written
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
