"""The folder of Inductor's caches, which torch creates when its compiler is imported."""

from __future__ import annotations

import os
import sys
import tempfile

_NAME = "TORCHINDUCTOR_CACHE_DIR"


def leave_unusable_cache_folder() -> None:
    """Use torch's default folder, with a warning, if the folder that the user named is unusable.

    Otherwise torch would fail on ``import torch._dynamo``, or after the first graph, with the
    traceback of whatever wanted to write. Ranks started by this process inherit the default."""
    folder = os.environ.get(_NAME)
    if folder and (why := _why_not(folder)):
        del os.environ[_NAME]
        print(f"warning: {_NAME}={folder} {why}: torch's default is taken instead", file=sys.stderr)


def _why_not(folder: str) -> str:
    if len(folder.split()) > 1:
        return "has a space in it, and torch does not quote paths for g++"
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"
