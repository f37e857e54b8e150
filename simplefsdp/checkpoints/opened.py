"""A checkpoint whose metadata has been read once: its files are verified, and read.

Each file is verified by one rank only. Each rank gets large files and small ones, and reads them in
a few threads, since hashing releases Python's lock.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from simplefsdp._torch.checkpoints import DAMAGED, load_by
from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.checksums import Checksum
from simplefsdp.checkpoints.metadata import NAME as METADATA
from simplefsdp.checkpoints.metadata import files_of, read_metadata

Tell = Callable[[int, int], object]
_THREADS = 4
_PATIENCE_S = 5.0  # seconds between two lines about progress
# This does not advise to remove files: they may be the only copy, or the reader may be at fault.
REMEDY = "copy it again, or move that folder elsewhere and use an earlier checkpoint"


@dataclass(frozen=True)
class CheckpointFiles:
    """What is in a checkpoint, and where."""

    path: Path
    metadata: Metadata  # for torch's reader; it was checked, and is not read again
    checksums: Mapping[str, Checksum] | None  # by file; None if the checkpoint has none


def open_files(path: Path) -> CheckpointFiles:
    """Read a checkpoint's metadata, and check that all the bytes that it refers to exist."""
    try:
        metadata = read_metadata(path)
        sums = checksums.read(path)
        # Verified before it is used: with a flipped bit in a name it would seem to be of another
        # model.
        if sums and METADATA in sums and (damaged := faults_in(path, sums, [METADATA])):
            raise ValueError(str(damaged[0]))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not a checkpoint: it has no .metadata file") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}; {REMEDY}") from error
    _check_sizes(path, metadata)
    return CheckpointFiles(path, metadata, sums)


def _check_sizes(path: Path, metadata: Metadata) -> None:
    needed: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, nbytes in sorted(needed.items()):
        file = path / name
        try:
            found = file.stat().st_size if file.is_file() else None
        except OSError as error:  # such as a name that is too long
            raise ValueError(f"checkpoint {path}: {name:.100}: {error.strerror}") from error
        if found is None or found < nbytes:
            has = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(
                f"checkpoint {path} is truncated: {name} {has} where {nbytes} are expected; "
                f"{REMEDY}"
            )


def verify(files: CheckpointFiles, tell: Tell | None = None, *, alone: bool = False) -> str | None:
    """Compare all files with their checksums. Every rank must call this; with ``alone``, this
    process reads all files by itself.

    If it takes long, ``tell`` is called with the bytes that this rank has read, and with all that
    it is to read. Returns a line for the user if the checkpoint has no checksums, else None.

    Raises:
        ValueError: a file is damaged, missing or has no checksum; on all ranks, with its name.
    """
    sums = files.checksums
    if sums is None:
        return f"{files.path} has no checksums, {checksums.NO_SUMS}: it is not verified"
    alone = alone or not dist.is_initialized() or "fake" in dist.get_backend_config()
    names = sorted(sums) if alone else share_of(sums, dist.get_rank(), dist.get_world_size())
    faults = faults_in(files.path, sums, names, tell)
    faults += without_checksum(sums, files_of(files.metadata))
    if not alone:
        found: list[list[Fault]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, faults)
        faults = sorted({fault for of_rank in found for fault in of_rank})
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(f"checkpoint {files.path} is damaged: {faults[0]}{more}; {REMEDY}")
    return None


def fill(files: CheckpointFiles, targets: dict[str, Any], *, no_dist: bool = False) -> None:
    """Fill ``targets``, by key, from the files, see :func:`simplefsdp._torch.checkpoints.load_by`,
    with the name of the checkpoint in errors."""
    try:
        load_by(files.metadata, files.path, targets, no_dist=no_dist)
    except ValueError as error:
        # The remedy is only for damage, not for a lack of memory or of the network.
        remedy = f"; {REMEDY}" if DAMAGED in str(error) else ""
        raise ValueError(f"checkpoint {files.path} cannot be loaded: {error}{remedy}") from error


class Fault(NamedTuple):
    """What is wrong with a file: it is ``missing``, ``damaged``, ``unverified`` or ``unknown``.

    ``.metadata`` is ``interrupted`` if it is the only file without a checksum.
    """

    kind: str
    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file} {self.why}"


def faults_in(
    folder: Path, sums: Mapping[str, Checksum], names: Collection[str], tell: Tell | None = None
) -> list[Fault]:
    """What is wrong with the files ``names``; ``tell`` is called as for :func:`verify`."""
    progress = _Progress(sum(sums[name].nbytes for name in names), tell)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _fault(folder, name, sums[name], progress.add), names)
        return [fault for fault in found if fault is not None]


def share_of(sums: Mapping[str, Checksum], rank: int, ranks: int) -> list[str]:
    """The files that a rank reads: every ``ranks``-th by size, so both large and small ones."""
    return sorted(sums, key=lambda name: (sums[name].nbytes, name))[rank::ranks]


def without_checksum(sums: Collection[str], needed: Collection[str]) -> list[Fault]:
    """Faults for those of the ``needed`` files that have no checksum."""
    left = sorted(set(needed) - set(sums))
    if left == [METADATA]:  # a save adds this checksum last
        return [Fault("interrupted", METADATA, "has no checksum, as the save was interrupted")]
    return [Fault("unverified", name, "has no checksum") for name in left]


def unknown_in(folder: Path, known: Collection[str]) -> list[Fault]:
    """Files in ``folder`` that are no part of the checkpoint."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    left = sorted(set(names) - {*known, checksums.NAME})
    told = (name if name.isprintable() else repr(name) for name in left)
    return [Fault("unknown", name, "was not written with the checkpoint") for name in told]


def _fault(folder: Path, name: str, wanted: Checksum, progress: checksums.Progress) -> Fault | None:
    file = folder / name
    try:
        if not file.is_file():
            return Fault("missing", name, "is missing")
        nbytes = file.stat().st_size
        if nbytes != wanted.nbytes:
            return Fault("damaged", name, f"has {nbytes} bytes where {wanted.nbytes} were written")
        found = checksums.checksum_of(file, progress)
    except OSError as error:
        return Fault("damaged", name, f"cannot be read: {error.strerror or error}")
    if found != wanted:
        return Fault("damaged", name, "has other bytes than were written (SHA-256)")
    return None


class _Progress:
    """Adds up the bytes that several threads have read, and calls ``tell`` from time to time."""

    def __init__(self, nbytes: int, tell: Tell | None) -> None:
        self._nbytes = nbytes
        self._tell = tell
        self._done = 0
        self._next = time.monotonic() + _PATIENCE_S
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self._done += n
            if self._tell is not None and time.monotonic() >= self._next:
                self._next = time.monotonic() + _PATIENCE_S
                self._tell(self._done, self._nbytes)
