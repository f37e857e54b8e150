"""The folder of Inductor's caches, which torch makes when its compiler is imported."""

from __future__ import annotations

import os
import sys
import tempfile

_NAME = "TORCHINDUCTOR_CACHE_DIR"


def leave_unusable_cache_folder() -> None:
    """Take torch's own folder if the one that the user names is no good, and say so; ranks that are
    started from here do likewise, in silence. Torch would fail on ``import torch._dynamo``, or
    after the first graph, with the traceback of whatever wanted to write."""
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
