"""A run of ``simplefsdp train`` as its user sees it, and what can be done to it from outside.

A scene is a folder with a text to train on and the runs that were started in it. Every process of a
scene carries a mark in its environment, so that one that is left behind is found whoever its
parent is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from simplefsdp.train import runs

ROOT = Path(__file__).parents[1]
_MARK = "SIMPLEFSDP_FAULT_SCENE"
_TEXT_NBYTES = 400_000
_WORDS = ("ranks", "gather", "what", "they", "shard", "and", "reduce", "a", "run", "goes", "on;")
_OPTIONS = (
    "--data text --seq-len 16 --global-batch-size 4 --eval-batches 1 --sample-tokens 0 "
    "--log-every 1 --steps 1000 --out run"
)
QUICK = _OPTIONS.split()
EAGER = [*QUICK, "--no-compile"]
COMPILED = [*QUICK, "--executor", "aot_eager"]


class EndedEarly(Exception):
    """A run that ended before its fault could happen; what it said."""


def until(holds: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Return when ``holds()``; raise TimeoutError, with ``what`` was awaited, if it never does."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.01)


@dataclass
class Run:
    """A command that was started, and what it says."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)
    injected: float = field(default_factory=time.monotonic)
    process_started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:  # on a terminal
            return
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
        except (ValueError, OSError):
            pass  # closed by `hang_up`

    @property
    def text(self) -> str:
        """All that it has printed so far."""
        return "\n".join(self.lines)

    def says(self, words: str, timeout_s: float = 120.0) -> None:
        """Wait until it has printed ``words``; from there on the fault's time counts."""

        def said() -> bool:
            if self.process.poll() is not None and words not in self.text:
                self._reader.join(5)
                raise EndedEarly(f"ended before it said {words!r}:\n{self.text[-2000:]}")
            return words in self.text

        until(said, repr(words), timeout_s)
        self.injected = time.monotonic()

    def now(self) -> None:
        """The fault happens now."""
        self.injected = time.monotonic()

    @property
    def last_step(self) -> int:
        """The last step that was reported."""
        steps = [line.split()[1].split("/")[0] for line in self.lines if line.startswith("step ")]
        return int(steps[-1]) if steps else 0

    def ranks(self) -> list[int]:
        """Process ids of the ranks that this command started itself, in their order."""
        found: dict[int, int] = {}
        for pid, environment in marked(self.mark).items():
            if "RANK" in environment and parent_of(pid) == self.process.pid:
                found[int(environment["RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def has_ranks(self, n: int = 2) -> list[int]:
        """Their process ids, once there are ``n``."""
        until(lambda: len(self.ranks()) >= n, f"{n} ranks")
        return self.ranks()

    def kill(self, number: int, *pids: int) -> None:
        """Send a signal: to the command itself, or to these processes."""
        self.now()
        for pid in pids or (self.process.pid,):
            os.kill(pid, number)

    def kill_all(self, number: int) -> None:
        """Send a signal to the foreground group, as a terminal does."""
        self.now()
        os.killpg(self.process.pid, number)

    def hang_up(self) -> None:
        """Nobody reads what it prints any more."""
        assert self.process.stdout
        self.now()
        os.close(self.process.stdout.fileno())

    def end(self, timeout_s: float = 60.0) -> End:
        """Wait for the end; kill what does not end, and what is left behind."""
        hung = False
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            hung = True
        left = _left_behind(self.mark) if not hung else []
        seconds = time.monotonic() - self.injected
        _kill_marked(self.mark)
        self.process.wait(10)
        self._reader.join(5)
        return End(self.process.returncode, self.text, seconds, hung, left, self.last_step)


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        code: exit code; negative for a signal.
        text: all that it printed.
        seconds: from the fault to the end.
        hung: whether it had to be killed.
        left: processes that it left behind.
        step: the last that it reported.
        wrong: what else is not as it should be.
    """

    code: int
    text: str
    seconds: float
    hung: bool = False
    left: Sequence[str] = ()
    step: int = 0
    wrong: tuple[str, ...] = ()

    def expect(self, holds: object, otherwise: str) -> End:
        """This end, and what is wrong with it unless ``holds``."""
        return self if holds else replace(self, wrong=(*self.wrong, otherwise))

    def expect_words(self, words: str) -> End:
        """This end, and that it did not say ``words``, if so."""
        return self.expect(words in self.text, f"does not say {words!r}")

    @property
    def last_line(self) -> str:
        """The last line that says anything."""
        return next((line for line in reversed(self.text.split("\n")) if line.strip()), "")


def _left_behind(mark: str, patience_s: float = 5.0) -> list[str]:
    """Commands of the processes that are still there when their launcher has been gone a while."""
    deadline = time.monotonic() + patience_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{pid} {_command(pid)}" for pid in marked(mark)]


def _kill_marked(mark: str) -> None:
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> dict[int, dict[str, str]]:
    """Environments of the running processes that carry a mark, by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            raw = (folder / "environ").read_bytes()
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        if f"{_MARK}={mark}".encode() in raw and stat.rpartition(")")[2].split()[0] != "Z":
            pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
            found[int(folder.name)] = {name: value for name, _, value in pairs}
    return found


def parent_of(pid: int) -> int:
    """The process that a process is a child of; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def memory_nbytes(pid: int) -> int:
    """Resident bytes of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
    except OSError:
        return ""


_ON_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Scene:
    """A folder in which runs are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        words = random.Random(0).choices(_WORDS, k=_TEXT_NBYTES // 4)
        (folder / "text").write_text(" ".join(words)[:_TEXT_NBYTES])

    @property
    def run(self) -> Path:
        """The run folder that the options above name."""
        return self.folder / "run"

    def start(
        self, command: Sequence[str], env: dict[str, str] | None = None, terminal: int | None = None
    ) -> Run:
        """Start any command in this folder, in a session of its own, that ``terminal`` controls."""
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup: they are to hear it
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if terminal is not None:
            command = [sys.executable, "-c", _ON_ITS_TERMINAL, *command]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ
            | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            | {_MARK: self.mark, "COLUMNS": "200"}
            | (env or {}),
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        return Run(process, self.mark)

    def train(
        self,
        *args: str,
        options: Sequence[str] = EAGER,
        env: dict[str, str] | None = None,
        limits: str = "",
        terminal: int | None = None,
    ) -> Run:
        """Start ``simplefsdp train``; ``limits`` are words for ``ulimit``, such as ``-n 64``."""
        command = [sys.executable, "-m", "simplefsdp", "train", *options, *args]
        if limits:
            command = ["bash", "-c", f'ulimit {limits} && exec "$@"', "bash", *command]
        return self.start(command, env, terminal)

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [runs.step_of(path) for path in runs.complete_checkpoints(self.run)]

    def losses(self) -> dict[int, float]:
        """The loss of each step in the run's metrics."""
        path, found = self.run / runs.METRICS, {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            with suppress(json.JSONDecodeError):  # half a line: it is being written
                record = json.loads(line)
                found |= {record["step"]: record["loss"]} if "loss" in record else {}
        return found

    def close(self) -> None:
        """Remove the folder, and whatever still runs in it."""
        _kill_marked(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)


def python_path() -> str:
    """What our processes import from: this tree, then whatever this process does."""
    return os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])
