"""A run that something happens to every minute, and that is resumed: does it lose, does it grow.

Each session ends by a fault drawn by chance, or outlives it, and the next one resumes it. The
resident memory of every process is sampled. At the end the losses are compared, step by step, with
those of a run that nothing happened to and that saves as often. Its memory is sampled, too: it is
the longest.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults_run import EAGER, Run, Scene, memory_nbytes

_COMPARED_STEPS = 2000
_CALM_S = 1800.0  # at most, for so many steps
_LONG = ("--steps", "1000000", "--warmup-steps", "100")  # no session comes to its end
_SAMPLE_S = 1.0
_WARM_S = 20.0  # after its first step; until then a process still allocates for the first time
_SAVES = ("--checkpoint-every", "10")
_FLAT = 0.03  # of a process's memory, from the first half of a session to the second


def _freeze(run: Run) -> None:
    rank = random.choice(run.ranks())
    run.kill(signal.SIGSTOP, rank)
    time.sleep(3)
    os.kill(rank, signal.SIGCONT)


_OUTLIVED = "freeze"
_FAULTS: dict[str, Callable[[Run], None]] = {
    "terminate": lambda run: run.kill(signal.SIGTERM),
    "hang_up": lambda run: run.kill(signal.SIGHUP),
    "interrupt_all": lambda run: run.kill_all(signal.SIGINT),
    "kill_launcher": lambda run: run.kill(signal.SIGKILL),
    "kill_rank": lambda run: run.kill(signal.SIGKILL, random.choice(run.ranks())),
    "stop_one_rank": lambda run: run.kill(signal.SIGTERM, random.choice(run.ranks())),
    _OUTLIVED: _freeze,
}


@dataclass
class Session:
    """From a start to the end that a fault made of it.

    ``memory`` is that of each process: ``[seconds after the first step, bytes]``.
    """

    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    lost_steps: int = 0
    problems: list[str] = field(default_factory=list)
    began: float = 0.0


def soak(minutes: float, folder: Path, every_s: float) -> Iterator[dict[str, Any]]:
    """Run for so long; what came of it, as JSON: as found so far, then with what was compared."""
    random.seed(0)
    scene, sessions = Scene(folder / "soak"), []
    deadline = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < deadline:
            sessions.append(_session(scene, every_s))
            last = sessions[-1]
            done = max(scene.checkpoints(), default=0)
            print(
                f"session {len(sessions)}: {', '.join(last.faults)}; lost {last.lost_steps} steps, "
                f"at step {done}{''.join('; ' + p for p in last.problems)}",
                flush=True,
            )
        found = _summary(sessions, minutes) | {"steps": max(scene.losses(), default=0)}
        yield found
        yield found | _compared(scene, folder)
    finally:
        scene.close()


def _session(scene: Scene, every_s: float) -> Session:
    session = Session()
    before = max(scene.checkpoints(), default=0)
    run = scene.train(*_SAVES, "--resume", "auto", *_LONG)
    try:
        run.says("step ")
    except Exception as error:
        session.problems.append(str(error)[-300:])
        run.end(5)
        return session
    while True:
        _sample(run, session, every_s * random.uniform(0.5, 1.5))
        fault = random.choice(list(_FAULTS))
        if run.process.poll() is not None:
            session.problems.append(f"ended by itself: {run.end(5).last_line[-300:]}")
            return session
        session.faults.append(fault)
        reached = run.last_step
        _FAULTS[fault](run)
        if fault != _OUTLIVED:
            break
    end = run.end(60)
    saved = max(scene.checkpoints(), default=0)
    session.lost_steps = max(0, max(reached, end.step) - saved)
    session.problems += ["hangs"] if end.hung else []
    session.problems += [f"left behind: {process}" for process in end.left]
    session.problems += ["traceback"] if "Traceback" in end.text else []
    session.problems += [f"went back to {saved}"] if saved < before else []
    return session


def _sample(run: Run, session: Session, seconds: float) -> None:
    """Note the memory of every process for so long."""
    session.began = session.began or time.monotonic()
    until = time.monotonic() + seconds
    while time.monotonic() < until and run.process.poll() is None:
        pids = {"launcher": run.process.pid}
        pids |= {f"rank {i}": pid for i, pid in enumerate(run.ranks())}
        for name, pid in pids.items():
            sample = (round(time.monotonic() - session.began, 1), memory_nbytes(pid))
            session.memory.setdefault(name, []).append(sample)
        time.sleep(_SAMPLE_S)


def _compared(scene: Scene, folder: Path) -> dict[str, Any]:
    """Losses beside those of a run that nothing happens to, and the memory of that run."""
    losses = scene.losses()
    steps = min(max(losses, default=0), _COMPARED_STEPS)
    calm, session = Scene(folder / "calm"), Session()
    try:
        run = calm.train(*_SAVES, "--stop-after", str(steps), *_LONG, options=EAGER)
        run.says("step ")
        _sample(run, session, _CALM_S)
        end = run.end(60)
        expected = calm.losses()
    finally:
        calm.close()
    other = [step for step in expected if losses.get(step) != expected[step]]
    of_calm = _memory([session])
    return {
        "compared_steps": len(expected),
        "other_losses": len(other),
        "calm_exit": end.code,
        "calm_minutes": round((time.monotonic() - run.process_started) / 60, 1),
        "calm": of_calm,
    }


def _summary(sessions: list[Session], minutes: float) -> dict[str, Any]:
    faults = [fault for session in sessions for fault in session.faults]
    return {
        "minutes": minutes,
        "sessions": len(sessions),
        "faults": {name: faults.count(name) for name in sorted(set(faults))},
        "lost_steps": [session.lost_steps for session in sessions],
        "problems": [problem for session in sessions for problem in session.problems],
        **_memory(sessions),
    }


def _memory(sessions: list[Session]) -> dict[str, Any]:
    """Of each process: growth from the first half of each session to the second, and its most."""
    growth: dict[str, list[float]] = {}
    largest: dict[str, list[int]] = {}
    for session in sessions:
        for name, samples in session.memory.items():
            warm = [nbytes for seconds, nbytes in samples if seconds > _WARM_S and nbytes]
            if len(warm) < 8:
                continue
            half = len(warm) // 2
            first, second = statistics.median(warm[:half]), statistics.median(warm[half:])
            growth.setdefault(name, []).append(round(second / first - 1, 4))
            largest.setdefault(name, []).append(max(warm) >> 20)
    return {
        "growth_within_a_session": growth,
        "largest_mib_by_session": largest,
        "flat": all(statistics.median(found) < _FLAT for found in growth.values()),
    }
