"""The folder of Inductor's caches, which torch makes when its compiler is imported."""

from __future__ import annotations

import os
import sys
import tempfile

_NAME = "TORCHINDUCTOR_CACHE_DIR"


def leave_cache_folder_that_cannot_be_written() -> None:
    """Take torch's own folder if the one that the user names is no good, and say so; ranks that are
    started from here do likewise, in silence. Torch would fail on ``import torch._dynamo``, or
    after the first graph, with the traceback of whatever wanted to write."""
    folder = os.environ.get(_NAME)
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        del os.environ[_NAME]
        print(
            f"warning: {_NAME}={folder} cannot be written ({error.strerror}): torch's default is "
            "taken instead",
            file=sys.stderr,
        )
