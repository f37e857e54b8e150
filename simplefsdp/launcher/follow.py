"""Ranks that end with whoever started them: a launcher that is gone leaves nothing behind."""

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER_PID = "SIMPLEFSDP_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def follow_launcher() -> None:
    """End this rank if its launcher, ours or torchrun, disappears, as by ``kill -9``.

    On Linux the kernel sees to it, even for a rank that is stopped or deep in a library. Elsewhere
    a thread watches.
    """
    parent = _launcher()
    if parent is not None:
        follow(parent)


def follow(parent: int) -> None:
    """End this process when its parent, of that process id, does; see :func:`follow_launcher`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    # From the first moment: it may have gone before the kernel was told.
    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def _launcher() -> int | None:
    """The process that started this rank; None if no launcher did."""
    ours = os.environ.get(LAUNCHER_PID)
    if ours is not None:
        return int(ours)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
