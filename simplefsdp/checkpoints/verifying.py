"""Whether a checkpoint's files are as they were written: in one process, or by all ranks together.

Each file is read by one rank only, a rank gets large ones and small ones, and reads them in a few
threads: hashing leaves Python's lock alone.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.checksums import Checksum
from simplefsdp.checkpoints.metadata import NAME as METADATA

Tell = Callable[[int, int], object]
_THREADS = 4
_PATIENCE_S = 5.0  # between two lines that say how far it is


class Fault(NamedTuple):
    """What is wrong with a file: it is ``missing``, ``damaged``, ``unverified`` or ``unknown``.

    ``.metadata`` is ``interrupted`` if all else was written.
    """

    kind: str
    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file} {self.why}"


def faults_in(
    folder: Path, sums: Mapping[str, Checksum], names: Collection[str], tell: Tell | None = None
) -> list[Fault]:
    """What is wrong with the files ``names``; ``tell`` gets the bytes that were read, and all."""
    progress = _Progress(sum(sums[name].nbytes for name in names), tell)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _fault(folder, name, sums[name], progress.add), names)
        return [fault for fault in found if fault is not None]


def all_faults(
    folder: Path,
    sums: Mapping[str, Checksum],
    needed: Collection[str],
    tell: Tell | None = None,
    *,
    alone: bool = False,
) -> list[Fault]:
    """What is wrong with any file. Every rank must call it and gets all of it, unless ``alone``;
    each reads a part."""
    if alone or not dist.is_initialized() or "fake" in dist.get_backend_config():
        return [*faults_in(folder, sums, sorted(sums), tell), *without_checksum(sums, needed)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[list[Fault]] = [[] for _ in range(ranks)]
    mine = faults_in(folder, sums, share_of(sums, rank, ranks), tell)
    dist.all_gather_object(found, [*mine, *without_checksum(sums, needed)])
    return sorted({fault for faults in found for fault in faults})


def share_of(sums: Mapping[str, Checksum], rank: int, ranks: int) -> list[str]:
    """The files that a rank reads: some of the large ones, and some of the small ones."""
    return sorted(sums, key=lambda name: (sums[name].nbytes, name))[rank::ranks]


def without_checksum(sums: Collection[str], needed: Collection[str]) -> list[Fault]:
    """Of the files that are ``needed``, those that nobody wrote a checksum of."""
    left = sorted(set(needed) - set(sums))
    if left == [METADATA]:  # a save adds it last
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
    """Adds up what several threads have read, and says so from time to time."""

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
