"""Faults of processes: signals, and processes that are gone."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time

from faults_rows import fault
from faults_run import COMPILED, EAGER, End, Run, Scene, until


def _running(scene: Scene, *args: str, step: int = 3) -> Run:
    run = scene.train("--checkpoint-every", "2", *args)
    run.says(f"step {step}/")
    return run


_SAVES = "saves, exit 128 + signal"


@fault("launcher, after step 3", _SAVES, codes={143}, says="continue with", loses=0, resumes=True)
def sigterm(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGTERM)
    return run.end()


@fault("launcher, after step 3", _SAVES, codes={130}, says="continue with", loses=0)
def sigint(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGINT)
    return run.end()


@fault("all processes, after step 3", _SAVES, codes={130}, says="continue with", loses=0)
def ctrl_c_on_a_terminal(scene: Scene) -> End:
    run = _running(scene)
    run.kill_all(signal.SIGINT)
    return run.end()


@fault(
    "launcher, after step 3",
    _SAVES,
    codes={129},
    says="continue with",
    loses=0,
    resumes=True,
    quick=True,
)
def sighup(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGHUP)
    return run.end()


@fault("all processes, after step 3", _SAVES, codes={129}, says="continue with", loses=0)
def terminal_closes(scene: Scene) -> End:
    run = _running(scene)
    run.kill_all(signal.SIGHUP)
    return run.end()


@fault("nobody reads it, after step 3", "goes on, exit 0", codes={0}, loses=0, quick=True)
def output_closed(scene: Scene) -> End:
    run = _running(scene, "--stop-after", "8")
    run.hang_up()
    return run.end()


@fault("rank 0, after step 3", _SAVES, codes={143}, says="continue with", loses=0)
def sigterm_to_rank_zero(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGTERM, run.ranks()[0])
    return run.end()


@fault("rank 1, after step 3", _SAVES, codes={143}, says="continue with", loses=0, resumes=True)
def sigterm_to_rank_one(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGTERM, run.ranks()[1])
    return run.end()


@fault("rank 1, after step 3", _SAVES, codes={130}, says="continue with", loses=0)
def sigint_to_rank_one(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGINT, run.ranks()[1])
    return run.end()


@fault("launcher twice, after step 3", "stops at once, exit 143", codes={143}, loses=3)
def sigterm_twice(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGTERM)
    time.sleep(0.05)
    run.kill(signal.SIGTERM)
    return run.end()


@fault("rank 0, after step 3", "one line, exit 137", codes={137}, says="rank 0 was killed", loses=3)
def kill_rank_zero(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGKILL, run.ranks()[0])
    return run.end()


@fault(
    "rank 1, after step 3",
    "one line, exit 137",
    codes={137},
    says="rank 1 was killed",
    loses=3,
    resumes=True,
)
def kill_rank_one(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGKILL, run.ranks()[1])
    return run.end()


@fault("rank 1, after step 3", "one line, exit 139", codes={139}, says="SIGSEGV", loses=3)
def segmentation_fault(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGSEGV, run.ranks()[1])
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


@fault("launcher, after step 3", "nothing is left", codes={-9}, loses=3, resumes=True)
def kill_launcher(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGKILL)
    return run.end()


@fault("launcher, rank 1 being frozen", "nothing is left", codes={-9}, loses=3, quick=True)
def kill_launcher_of_a_frozen_rank(scene: Scene) -> End:
    run = _running(scene)
    run.kill(signal.SIGSTOP, run.ranks()[1])
    run.kill(signal.SIGKILL)
    return run.end()


@fault("launcher, as the ranks start", "nothing is left", codes={-9})
def kill_launcher_early(scene: Scene) -> End:
    run = scene.train()
    run.has_ranks()
    run.kill(signal.SIGKILL)
    return run.end()


@fault("launcher, while ranks compile", "nothing is left", codes={-9})
def kill_launcher_in_compile(scene: Scene) -> End:
    run = scene.train(options=COMPILED)
    run.says("compiling")
    time.sleep(1)
    run.kill(signal.SIGKILL)
    return run.end()


@fault("torchrun, after step 3", "nothing is left", codes={-9}, loses=3)
def kill_torchrun(scene: Scene) -> End:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m simplefsdp train"
    run = scene.start([sys.executable, *torchrun.split(), *EAGER, "--checkpoint-every", "2"])
    run.says("step 3/")
    run.kill(signal.SIGKILL)
    return run.end()


_UNSAVED = "before a checkpoint was saved; start it again"


@fault("launcher, as the ranks start", "one line, exit 143", codes={143}, says=_UNSAVED)
def sigterm_early(scene: Scene) -> End:
    run = scene.train()
    run.has_ranks()
    run.kill(signal.SIGTERM)
    return run.end()


@fault("all processes, as they start", "exit 130, no traceback", codes={130, -2})
def ctrl_c_early(scene: Scene) -> End:
    run = scene.train()
    until(run.ranks, "a rank")
    time.sleep(0.5)  # before that it is Python itself that starts
    run.kill_all(signal.SIGINT)
    return run.end()


@fault("launcher, while ranks compile", "one line, exit 143", codes={143}, says=_UNSAVED)
def sigterm_in_compile(scene: Scene) -> End:
    run = scene.train(options=COMPILED)
    run.says("compiling")
    time.sleep(1)
    run.kill(signal.SIGTERM)
    return run.end()


@fault("all processes, while ranks compile", "exit 130, no traceback", codes={130})
def ctrl_c_in_compile(scene: Scene) -> End:
    run = scene.train(options=COMPILED)
    run.says("compiling")
    time.sleep(1)
    run.kill_all(signal.SIGINT)
    return run.end()


@fault("rank 1, while ranks compile", "one line, exit 137", codes={137}, says="rank 1 was killed")
def kill_rank_in_compile(scene: Scene) -> End:
    run = scene.train(options=COMPILED)
    run.says("compiling")
    time.sleep(1)
    run.kill(signal.SIGKILL, run.ranks()[1])
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
