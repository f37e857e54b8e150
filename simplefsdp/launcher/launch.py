"""Start local ranks with torch's elastic launcher, and say in one line why one failed.

Each rank runs the same command line again and finds its place in torchrun's environment
variables, so ``simplefsdp train`` behaves the same started by itself and under ``torchrun``.
"""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from simplefsdp.launcher.ranks import cpu_count, device_type

_LAUNCHER_PID = "SIMPLEFSDP_LAUNCHER_PID"


def under_torchrun() -> bool:
    """Whether this process is a rank that a launcher, ours or torchrun, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_local_ranks(args: Sequence[str], *, ranks: int, log_folder: Path) -> int:
    """Run ``python -m simplefsdp *args`` on ``ranks`` local ranks; return the exit code.

    Rank 0 owns the terminal; what the others print goes to files under ``log_folder``. The exit
    code is that of the rank that failed first, or 128 + the signal that ended the run.
    """
    _set_environment(ranks)
    _silence_elastic()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(log_folder), redirects=dict.fromkeys(range(1, ranks), Std.ALL)
        ),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "simplefsdp", *args)
    except ChildFailedError as error:
        return _report_failure(error, log_folder)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _set_environment(ranks: int) -> None:
    defaults = {_LAUNCHER_PID: str(os.getpid())}
    if device_type() == "cpu":
        defaults["OMP_NUM_THREADS"] = str(max(1, cpu_count() // ranks))
    # Local ranks talk over loopback: a laptop's host name often resolves to nothing.
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _silence_elastic() -> None:
    """Its warnings repeat, in its own words, what we say in ours; each logger has its own level."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _root_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The failure to report.

    A killed rank makes the others fail in their next collective, so a kill comes first; but
    SIGTERM is what the launcher itself sends to the others, so it comes last.
    """
    failures: dict[int, ProcessFailure] = error.failures

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        exitcode = item[1].exitcode
        kind = 0 if exitcode < 0 else 1
        return (2 if exitcode == -signal.SIGTERM else kind), item[1].timestamp

    return min(failures.items(), key=order)


def _report_failure(error: ChildFailedError, log_folder: Path) -> int:
    rank, failure = _root_cause(error)
    if failure.exitcode < 0:
        hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        print(f"error: rank {rank} was killed by {failure.signal_name()}{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    # Rank 0 has already said why on this terminal.
    if rank != 0:
        message: Any = failure.message
        if isinstance(message, dict):
            message = message["extraInfo"]["py_callstack"].strip()
        print(f"{message}\nerror: rank {rank} failed; its output: {log_folder}", file=sys.stderr)
    return int(failure.exitcode)


def record_failure(error: BaseException) -> None:
    """Leave this rank's error where the launcher looks for it (torchrun's error file)."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def follow_launcher() -> None:
    """End this rank if our launcher disappears (kill -9), so that it is never left behind."""
    launcher = os.environ.get(_LAUNCHER_PID)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


class StopRequest:
    """Ctrl-C and SIGTERM as a wish to stop after the current step; a second one stops at once.

    ``received`` is the signal that reached this rank, or 0. Other ranks may not have it: agree
    before acting on it.
    """

    def __init__(self) -> None:
        self.received = 0
        self._replaced: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Begin to listen; until then the signals end the process as usual."""
        if not self._replaced:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._replaced[number] = signal.signal(number, self._receive)

    def close(self) -> None:
        """Give the signals their former meaning back."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}

    def _receive(self, number: int, frame: object) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number
