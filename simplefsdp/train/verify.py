"""``simplefsdp verify``: whether a checkpoint's files are as they were written; needs no ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from simplefsdp.launcher.errors import EXIT_FAILED, UserError, user_errors

if TYPE_CHECKING:
    from simplefsdp.checkpoints.opened import Fault

_DESCRIPTION = """Compare a checkpoint's files with the checksums that were written with them.

Prints a line per file that is damaged, missing, unverified (it has no checksum) or unknown (it is
no part of the checkpoint). Exit status: 0 if all files are as they were written (unknown ones
beside them or not), 1 if not, 2 if there is nothing to compare with.

examples:
  simplefsdp verify runs/halves
  simplefsdp verify runs/halves/checkpoints/step-00000020
"""


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or a run folder: then its latest one."""


def run(args: list[str]) -> int:
    """Run ``simplefsdp verify *args``; return the exit code."""
    options = tyro.cli(VerifyOptions, prog="simplefsdp verify", description=_DESCRIPTION, args=args)
    with user_errors():
        return verify(options.checkpoint)


def verify(path: Path) -> int:
    """Print what is wrong with a checkpoint; return the exit code."""
    from simplefsdp.checkpoints import checksums
    from simplefsdp.checkpoints.opened import faults_in, open_files, unknown_in, without_checksum
    from simplefsdp.train import runs

    # A folder with checksums is a checkpoint, even if its .metadata is missing.
    folder = path if (path / checksums.NAME).is_file() else runs.checkpoint_at(path)
    sums = checksums.read(folder)
    if sums is None:
        open_files(folder)
        trainer = runs.read_trainer_state(folder)
        if trainer is not None and trainer.checksums:
            print(f"missing: {checksums.NAME} is missing")
            print(f"{folder}: whether its other files are as they were written cannot be told")
            return EXIT_FAILED
        raise UserError(
            f"{folder} has no {checksums.NAME}, {checksums.NO_SUMS}: its files are there and "
            "long enough; whether they are as they were written cannot be told"
        )
    faults = faults_in(folder, sums, sorted(sums), _say_progress)
    needed = _needed(folder, faults)
    faults += without_checksum(sums, needed)
    known = needed | sums.keys()
    for fault in [*faults, *unknown_in(folder, known)]:
        print(f"{fault.kind}: {fault}")
    nbytes = sum(of.nbytes for of in sums.values())
    if faults:
        print(f"{folder}: {len(faults)} of {len(known)} files are damaged, missing or unverified")
        return EXIT_FAILED
    print(f"{folder}: {len(sums)} files, {nbytes / 1e9:.3f} GB, are as they were written")
    return 0


def _needed(folder: Path, faults: list[Fault]) -> set[str]:
    """The files that must have a checksum: ``.metadata``, and those it names if it is undamaged."""
    from simplefsdp.checkpoints.metadata import NAME as METADATA
    from simplefsdp.checkpoints.metadata import files_of, read_metadata

    if any(fault.file == METADATA for fault in faults):
        return {METADATA}
    try:
        return files_of(read_metadata(folder))
    except FileNotFoundError:
        return {METADATA}
    except ValueError as error:
        raise ValueError(f"checkpoint {folder} is damaged: {error}") from error


def _say_progress(nbytes: int, of: int) -> None:
    print(f"{nbytes / 1e9:.1f} of {of / 1e9:.1f} GB ...", file=sys.stderr)
