"""Checksums of a checkpoint's files, in a small JSON file beside them.

They detect a file that the disk, the network or a copy has changed. They do not protect against
somebody who changes a file on purpose, and its checksum with it.

The hash is SHA-256: it is the fastest in hashlib on CPUs that have instructions for it, as those
that come with any GPU since the A100 have (1.0 GiB/s per core measured; BLAKE2b 0.8, MD5 0.6), and
``sha256sum`` can check it by hand. CRC-32 is twice as fast, but misses one damage in four billion.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from inductor_passes.ir.json_file import MIB, read_json, typed

NAME = "checksums.json"
NO_SUMS = "as dcp.save or an older program wrote it"
_FORMAT = "simplefsdp checksums"
_VERSION = 1
_MAX_NBYTES = 256 * MIB  # enough for the checksums of a million files
_PIECE = 4 * MIB
_HEX = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int], object]


class Checksum(NamedTuple):
    """The size of a file, and the hash of its bytes."""

    nbytes: int
    sha256: str


def checksum_of(file: Path, progress: Progress | None = None) -> Checksum:
    """Read a file and compute its checksum; ``progress`` is called with the bytes of each piece."""
    digest, nbytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_PIECE))
    with file.open("rb", buffering=0) as opened:
        while n := opened.readinto(buffer):
            digest.update(buffer[:n])
            nbytes += n
            if progress is not None:
                progress(n)
    return Checksum(nbytes, digest.hexdigest())


def write(folder: Path, sums: Mapping[str, Checksum]) -> None:
    """Write the file of checksums, completely or not at all, and wait until it is on the disk."""
    files = {name: sums[name]._asdict() for name in sorted(sums)}
    part = folder / f".{NAME}.tmp"
    with part.open("w") as file:
        json.dump({"format": _FORMAT, "version": _VERSION, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / NAME)


def add(folder: Path, *names: str) -> None:
    """Add files of ``folder`` to its checksums, if it has any."""
    sums = read(folder)
    if sums is not None:
        write(folder, sums | {name: checksum_of(folder / name) for name in names})


def read(folder: Path) -> dict[str, Checksum] | None:
    """The checksums in ``folder``, by file; None if it has none, as after a plain ``dcp.save``."""
    path = folder / NAME
    try:
        return _read(read_json(path, _MAX_NBYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read(found: Any) -> dict[str, Checksum]:
    data = typed(found, dict, "checksums")
    if data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise ValueError(f'expected "format": "{_FORMAT}", "version": {_VERSION}')
    sums = {}
    for name, of in typed(data.get("files"), dict, "files").items():
        path = PurePosixPath(name)
        if not name or not name.isprintable() or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r:.100} is not in its folder")
        entry = typed(of, dict, "a file")
        nbytes, sha256 = typed(entry.get("nbytes"), int, "nbytes"), entry.get("sha256")
        if nbytes < 0 or not isinstance(sha256, str) or not _HEX.fullmatch(sha256):
            raise ValueError(f"{name!r:.100} has no checksum")
        sums[name] = Checksum(nbytes, sha256)
    return sums
