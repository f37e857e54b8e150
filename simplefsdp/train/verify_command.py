"""``simplefsdp verify``: from the command line to a line per file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from simplefsdp.launcher.errors import user_errors

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
    from simplefsdp.train.verify import verify

    with user_errors():
        return verify(options.checkpoint)
