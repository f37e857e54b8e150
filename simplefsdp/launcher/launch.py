"""Start local ranks with torch's elastic launcher, and say in one line why one failed.

Each rank runs the same command line again, and reads its rank from torchrun's environment
variables. So ``simplefsdp train`` does the same whether it is started directly or by ``torchrun``.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from simplefsdp.launcher.errors import EXIT_FAILED, RunFailed, UserError
from simplefsdp.launcher.follow import be_launcher
from simplefsdp.launcher.ranks import cpu_count, device_type

# Like ``python -m simplefsdp``, but also during the imports, which take seconds, the process ends
# without a traceback on Ctrl-C, and together with its launcher (as ``follow_launcher`` does later).
_AS_RANK = (
    "import ctypes, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "from simplefsdp.cli import main_of_rank; main_of_rank()"
)


def start_local_ranks(
    args: Sequence[str],
    *,
    ranks: int,
    log_folder: Path,
    go_on: Callable[[], str | None] = lambda: None,
    on_signal: Callable[[str], object] = lambda name: None,
) -> int:
    """Run ``simplefsdp *args`` on ``ranks`` local ranks; return the exit code.

    Rank 0 owns the terminal; the output of the other ranks goes to files under ``log_folder``. The
    exit code is that of the rank that failed first, or 128 + the signal that ended the run. If a
    rank was killed, ``go_on`` gives a hint for the user on what to do next. If this process gets a
    signal, ``on_signal`` is called with its name after the ranks have ended.
    """
    run_id = uuid.uuid4().hex[:8]
    be_launcher(run_id)
    _set_environment(ranks)
    _silence_elastic()
    with logs_of(log_folder, ranks) as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=logs,
            signals_to_handle=_signals_to_pass_on(),
        )
        try:
            elastic_launch(config, sys.executable)("-c", _AS_RANK, *args)
        except ChildFailedError as error:
            return _report_failure(error, logs.stderr_of, go_on)
        except SignalException as error:
            on_signal(signal.Signals(error.sigval).name)
            return 128 + error.sigval
        except json.JSONDecodeError:  # torch reads the error file of the rank that failed
            print(
                f"error: a rank failed, and cannot say why; what ranks printed: {log_folder}",
                file=sys.stderr,
            )
            return EXIT_FAILED
    return 0


class RankLogs(DefaultLogsSpecs):
    """Puts the output of ranks under the run folder, and error files into another folder, where a
    full disk does not truncate them.

    ``stderr_of`` is the file of each rank that does not write to the terminal.
    """

    def __init__(self, folder: Path, errors: Path, ranks: int) -> None:
        # Rank 0 owns the terminal.
        super().__init__(log_dir=str(folder), redirects=dict.fromkeys(range(1, ranks), Std.ALL))
        self._errors = errors
        self.stderr_of: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        files = {rank: str(self._errors / f"{rank}.json") for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = files[rank]
        self.stderr_of = {rank: file for rank, file in destinations.stderrs.items() if file}
        return replace(destinations, error_files=files)


@contextmanager
def logs_of(folder: Path, ranks: int) -> Iterator[RankLogs]:
    """The log settings for torch's elastic launcher, of ``ranks`` local ranks that log into
    ``folder``."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="simplefsdp-errors-", dir=in_memory, ignore_cleanup_errors=True
    ) as errors:
        yield RankLogs(folder, Path(errors), ranks)


def _signals_to_pass_on() -> str:
    return "SIGTERM,SIGINT,SIGQUIT" + ("" if _hangs_on() else ",SIGHUP")


def _hangs_on() -> bool:
    """Whether the run is to outlive its terminal: ``nohup`` says so by ignoring SIGHUP."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _set_environment(ranks: int) -> None:
    if device_type() == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // ranks)))
    # Local ranks talk over loopback: a laptop's host name often resolves to nothing.
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _silence_elastic() -> None:
    """Turn off the warnings of torch's elastic launcher, which repeat what our messages say. Each
    of its loggers has a level of its own."""
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


def _report_failure(
    error: ChildFailedError, stderr_of: Mapping[int, str], go_on: Callable[[], str | None]
) -> int:
    rank, failure = _root_cause(error)
    if failure.exitcode < 0:
        hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        said = f"error: rank {rank} was killed by {failure.signal_name()}{hint}"
        next_ = None
        with suppress(OSError):  # it looks at a disk, which may be what failed
            next_ = go_on()
        print("; ".join(filter(None, (said, next_))), file=sys.stderr)
        return 128 - failure.exitcode
    # Rank 0 has already said why on this terminal; and so it has if all ranks stopped by a signal.
    if rank != 0 and failure.exitcode < 128:
        print(_why(rank, failure, stderr_of), file=sys.stderr)
    return int(failure.exitcode)


def _why(rank: int, failure: ProcessFailure, stderr_of: Mapping[int, str]) -> str:
    """The message for the failure of a rank that does not write to the terminal."""
    message: Any = failure.message
    if isinstance(message, dict):
        kind, _, line = str(message.get("message")).partition(": ")
        if kind in (RunFailed.__name__, UserError.__name__):  # the line says all
            return f"error: {line}"
        message = message["extraInfo"]["py_callstack"].strip()
    return f"{message}\nerror: rank {rank} failed; what it printed: {stderr_of[rank]}"


class StopRequest:
    """Takes Ctrl-C, SIGTERM or SIGHUP as a wish to stop after this step; a second signal stops at
    once.

    ``received`` is the signal that reached this rank, or 0. Other ranks may not have received it,
    so ranks must agree before they act on it.
    """

    def __init__(self) -> None:
        self.received = 0
        self._replaced: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Begin to listen; until then the signals end the process as usual."""
        if not self._replaced:
            hangup = () if _hangs_on() else (signal.SIGHUP,)
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
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
