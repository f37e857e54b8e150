"""Makes ranks end when the process that started them does, so that no ranks are left behind."""

import ctypes
import os
import signal
import sys
import threading
import time

from simplefsdp.launcher.errors import EXIT_FAILED, leave_at_once

_LAUNCHER, _RUN = "SIMPLEFSDP_LAUNCHER", "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1


def under_torchrun() -> bool:
    """Whether this process is a rank that a launcher, ours or torchrun, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def be_launcher(run_id: str) -> None:
    """Tell the ranks of a run, by an environment variable, to follow this process.

    Other launchers that this process or a rank starts inherit the variable. Therefore it names the
    run for which it holds.
    """
    os.environ[_LAUNCHER] = f"{run_id} {os.getpid()}"


def follow_launcher() -> None:
    """End this rank if its launcher, ours or torchrun, disappears, as by ``kill -9``.

    On Linux the kernel does this, even for a rank that is stopped or deep in a library. On other
    systems a thread watches the launcher.
    """
    if _RUN in os.environ:
        run_id, _, ours = os.environ.get(_LAUNCHER, "").partition(" ")
        follow(int(ours) if run_id == os.environ[_RUN] else os.getppid())


def follow(parent: int) -> None:
    """End this process when its parent, whose process id is ``parent``, ends; see
    :func:`follow_launcher`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it had ended before prctl was called
        print(f"error: process {parent}, which started this one, is gone", file=sys.stderr)
        leave_at_once(EXIT_FAILED)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()
