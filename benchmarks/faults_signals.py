"""Faults of processes: signals, and processes that are gone."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from functools import partial
from typing import Any

from faults_rows import fault, signalled
from faults_run import COMPILED, EAGER, End, Run, Scene, until


def _running(scene: Scene, *args: str, step: int = 3) -> Run:
    run = scene.train("--checkpoint-every", "2", *args)
    run.says(f"step {step}/")
    return run


def _starting(scene: Scene) -> Run:
    run = scene.train()
    run.has_ranks()
    return run


def _compiling(scene: Scene) -> Run:
    run = scene.train(options=COMPILED)
    run.says("compiling")
    time.sleep(1)
    return run


_after_step_3 = partial(signalled, begin=_running, when="after step 3")
_as_ranks_start = partial(signalled, begin=_starting, when="as the ranks start")
_in_compile = partial(signalled, begin=_compiling, when="while ranks compile")

_SAVES = "saves, exit 128 + signal"
_SAVED: dict[str, Any] = {"expected": _SAVES, "says": "continue with", "loses": 0}
_TERM, _INT, _HUP, _KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL
_after_step_3("sigterm", "launcher", _TERM, codes={143}, resumes=True, **_SAVED)
_after_step_3("sigint", "launcher", _INT, codes={130}, **_SAVED)
_after_step_3("ctrl_c_on_a_terminal", "all", _INT, codes={130}, **_SAVED)
_after_step_3("sighup", "launcher", _HUP, codes={129}, resumes=True, quick=True, **_SAVED)
_after_step_3("terminal_closes", "all", _HUP, codes={129}, **_SAVED)
_after_step_3("sigterm_to_rank_zero", 0, _TERM, codes={143}, **_SAVED)
_after_step_3("sigterm_to_rank_one", 1, _TERM, codes={143}, resumes=True, **_SAVED)
_after_step_3("sigint_to_rank_one", 1, _INT, codes={130}, **_SAVED)

_KILLED = "one line, exit 137"
_LOST: dict[str, Any] = {"codes": {137}, "says": "rank 1 was killed"}
_after_step_3("kill_rank_zero", 0, _KILL, _KILLED, codes={137}, says="rank 0 was killed", loses=3)
_after_step_3("kill_rank_one", 1, _KILL, _KILLED, loses=3, resumes=True, **_LOST)
_in_compile("kill_rank_in_compile", 1, _KILL, _KILLED, **_LOST)
_after_step_3(
    "segmentation_fault",
    1,
    signal.SIGSEGV,
    "one line, exit 139",
    codes={139},
    says="SIGSEGV",
    loses=3,
)

_LEFT = "nothing is left"
_after_step_3("kill_launcher", "launcher", _KILL, _LEFT, codes={-9}, loses=3, resumes=True)
_as_ranks_start("kill_launcher_early", "launcher", _KILL, _LEFT, codes={-9})
_in_compile("kill_launcher_in_compile", "launcher", _KILL, _LEFT, codes={-9})

_UNSAVED: dict[str, Any] = {
    "expected": "one line, exit 143",
    "codes": {143},
    "says": "before a checkpoint was saved; start it again",
}
_as_ranks_start("sigterm_early", "launcher", _TERM, **_UNSAVED)
_in_compile("sigterm_in_compile", "launcher", _TERM, **_UNSAVED)
_in_compile("ctrl_c_in_compile", "all", _INT, "exit 130, no traceback", codes={130})


@fault("nobody reads it, after step 3", "goes on, exit 0", codes={0}, loses=0, quick=True)
def output_closed(scene: Scene) -> End:
    run = _running(scene, "--stop-after", "8")
    run.hang_up()
    return run.end()


@fault("launcher twice, after step 3", "stops at once, exit 143", codes={143}, loses=3)
def sigterm_twice(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGTERM)
    time.sleep(0.05)
    run.kill(signal.SIGTERM)
    return run.end()


@fault("rank 1, for 5 s after step 3", "goes on, exit 0", codes={0}, loses=0)
def rank_frozen_for_a_while(scene: Scene) -> End:
    run = _running(scene, "--stop-after", "8")
    (rank,) = run.ranks()[1:]
    run.kill(signal.SIGSTOP, rank)
    time.sleep(5)
    os.kill(rank, signal.SIGCONT)
    return run.end()


@fault("rank 1 for good, then SIGTERM", "killed after a grace", codes={143, 137}, loses=3)
def rank_frozen_then_sigterm(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGSTOP, run.ranks()[1])
    run.kill(signal.SIGTERM)
    return run.end(90)


@fault("launcher, rank 1 being frozen", "nothing is left", codes={-9}, loses=3, quick=True)
def kill_launcher_of_a_frozen_rank(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGSTOP, run.ranks()[1])
    run.kill(signal.SIGKILL)
    return run.end()


@fault("torchrun, after step 3", "nothing is left", codes={-9}, loses=3)
def kill_torchrun(scene: Scene) -> End:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m simplefsdp train"
    run = scene.start([sys.executable, *torchrun.split(), *EAGER, "--checkpoint-every", "2"])
    run.says("step 3/")
    run.kill(signal.SIGKILL)
    return run.end()


@fault("all processes, as they start", "exit 130, no traceback", codes={130, -2})
def ctrl_c_early(scene: Scene) -> End:
    run = scene.train()
    until(run.ranks, "a rank")
    time.sleep(0.5)  # before that it is Python itself that starts
    run.kill_all(signal.SIGINT)
    return run.end()


@fault("launcher under nohup, after step 3", "goes on, exit 0", codes={0}, loses=0)
def sighup_under_nohup(scene: Scene) -> End:
    command = [sys.executable, "-m", "simplefsdp", "train", *EAGER, "--stop-after", "8"]
    run = scene.start(["nohup", *command])
    run.says("step 3/")
    run.kill(signal.SIGHUP)
    return run.end()


@fault("a real terminal, after step 3", _SAVES, codes={129}, loses=0, resumes=True)
def terminal_disappears(scene: Scene) -> End:
    master, slave = pty.openpty()
    run = scene.train("--checkpoint-every", "2", terminal=slave)
    os.close(slave)
    until(lambda: 3 in scene.losses(), "step 3")
    run.now()
    os.close(master)  # the kernel sends SIGHUP, and every write fails from here on
    return run.end()
