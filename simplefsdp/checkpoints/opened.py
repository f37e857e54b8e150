"""A checkpoint of which the metadata has been read, once, and what is done with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from simplefsdp._torch.checkpoints import DAMAGED, load_by
from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.checksums import Checksum
from simplefsdp.checkpoints.metadata import NAME as METADATA
from simplefsdp.checkpoints.metadata import files_of, read_metadata
from simplefsdp.checkpoints.verifying import Tell, all_faults, faults_in

# Nothing is to be removed: it may be the only copy, or what reads it is wrong.
REMEDY = "copy it again, or move that folder elsewhere and use an earlier checkpoint"


@dataclass(frozen=True)
class CheckpointFiles:
    """What is in a checkpoint, and where."""

    path: Path
    metadata: Metadata  # what torch's reader goes by; it was checked, and is not read again
    checksums: Mapping[str, Checksum] | None  # by file; None if an older program wrote it


def open_files(path: Path) -> CheckpointFiles:
    """Read a checkpoint's metadata, and see that all the bytes it names are there."""
    try:
        metadata = read_metadata(path)
        sums = checksums.read(path)
        # Before anything is concluded from it: with a bit of a name changed it is of another model.
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
    """Compare all files with their checksums; every rank must call it, unless ``alone``: then this
    process reads all files.

    ``tell`` is called with the bytes that this rank has read, and all that it will, if it takes
    long. Returns a line to be told, if the checkpoint has no checksums.

    Raises:
        ValueError: a file is damaged, missing or has no checksum; on all ranks, with its name.
    """
    sums, needed = files.checksums, files_of(files.metadata)
    if sums is None:
        return f"{files.path} has no checksums, as an older program wrote it: it is not verified"
    if faults := all_faults(files.path, sums, needed, tell, alone=alone):
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(f"checkpoint {files.path} is damaged: {faults[0]}{more}; {REMEDY}")
    return None


def fill(files: CheckpointFiles, targets: dict[str, Any], *, no_dist: bool = False) -> None:
    """Fill tensors, by key, from the files; see :func:`simplefsdp._torch.checkpoints.load_by`."""
    try:
        load_by(files.metadata, files.path, targets, no_dist=no_dist)
    except ValueError as error:
        # Only of damage: what is out of memory, or off the network, is not to be removed.
        remedy = f"; {REMEDY}" if DAMAGED in str(error) else ""
        raise ValueError(f"checkpoint {files.path} cannot be loaded: {error}{remedy}") from error
