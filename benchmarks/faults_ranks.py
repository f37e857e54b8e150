"""Faults of ranks that differ, in a program of a user's own (``faults_program.py``)."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from faults_rows import fault
from faults_run import End, Run, Scene

PROGRAM = Path(__file__).with_name("faults_program.py")


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _start(
    scene: Scene,
    executor: str,
    *,
    group_s: float = 30,
    guard_s: float = 300,
    oddity: str = "nothing",
    caches: Sequence[str] = ("cache", "cache"),
) -> list[Run]:
    """The program on two ranks, each with a compiler cache of its own."""
    port = free_port()
    command = [sys.executable, str(PROGRAM), executor, str(group_s), str(guard_s), oddity]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        scene.start(
            command,
            place | {"RANK": str(rank), "TORCHINDUCTOR_CACHE_DIR": str(scene.folder / cache)},
        )
        for rank, cache in enumerate(caches)
    ]


def end_together(runs: Sequence[Run], timeout_s: float = 120.0) -> End:
    """Wait for all; the end of the last, what all have said, and the first code that is not 0."""
    deadline = time.monotonic() + timeout_s
    while any(run.process.poll() is None for run in runs) and time.monotonic() < deadline:
        time.sleep(0.05)
    seconds = time.monotonic() - max(run.injected for run in runs)
    ends = [run.end(0.1) for run in runs]
    return replace(
        max(ends, key=lambda end: end.hung),
        text="\n".join(end.text for end in ends),
        seconds=seconds,
        code=next((end.code for end in ends if end.code), 0),
        step=max(end.step for end in ends),
    )


@fault("rank 1 leaves out a layer, compiled", "all say how, exit 3", codes={3}, says="would hang")
def another_branch_compiled(scene: Scene) -> End:
    return end_together(_start(scene, "aot_eager", oddity="branches"))


@fault("rank 1 leaves out a layer, eager", "ends within the group's 8 s", codes={3, 4})
def another_branch_eager(scene: Scene) -> End:
    runs = _start(scene, "eager", group_s=8, oddity="branches")
    return end_together(runs, 60).expect_words("was being gathered")


@fault("rank 1 with a cold cache, group of 3 s", "rank 0 waits, exit 0", codes={0}, bound_s=240)
def one_rank_compiles_longer(scene: Scene) -> End:
    warm = end_together(_start(scene, "inductor"), 200)
    assert warm.code == 0, warm.text
    # Slower still: it has to make its code while the other has found it.
    return end_together(_start(scene, "inductor", group_s=3, caches=("cache", "cold")), 240)


@fault("rank 1 frozen as it compiles, guard of 4 s", "rank 0 says who", codes={3, -9})
def one_rank_never_compiles(scene: Scene) -> End:
    runs = _start(scene, "inductor", guard_s=4)
    runs[1].says("rank 1: begins")
    runs[1].kill(signal.SIGSTOP)
    runs[0].now()
    runs[0].process.wait(90)
    runs[1].process.kill()
    return end_together(runs).expect_words("rank 1 did not get to")


@fault("rank 1 killed as it compiles, guard of 4 s", "rank 0 says who", codes={3})
def one_rank_dies_as_it_compiles(scene: Scene) -> End:
    runs = _start(scene, "inductor", guard_s=4)
    runs[1].says("rank 1: begins")
    time.sleep(0.5)
    runs[1].kill(signal.SIGKILL)
    runs[0].now()
    return end_together(runs).expect_words("rank 1 did not get to")


def _refused(scene: Scene, oddity: str, parameter: str) -> End:
    """Each rank says in one line what is wrong with which parameter."""
    runs = _start(scene, "eager", oddity=oddity)
    end = end_together(runs, 60)
    for rank, run in enumerate(runs):
        said = [line for line in run.lines if line.startswith(f"rank {rank}: ")]
        told = len(said) == 1 and parameter in said[0]
        end = end.expect(told, f"rank {rank} does not name the parameter in one line")
    return end


@fault(
    "a trainable weight",
    "refused at the wrap, exit 2",
    codes={2},
    says="layers.7.weight",
    quick=True,
)
def float8_parameter(scene: Scene) -> End:
    return _refused(scene, "float8", "layers.7.weight: is a trainable torch.float8_e4m3fn")


@fault("a weight, compiled", "goes on, exit 0", codes={0}, says="done", bound_s=120)
def complex_parameter(scene: Scene) -> End:
    return end_together(_start(scene, "aot_eager", oddity="complex"))


@fault("rank 1's last layer is narrower", "all say how, exit 3", codes={3}, says="layers.7.weight")
def another_width(scene: Scene) -> End:
    return _refused(scene, "width", "layers.7.weight: (64, 64)")
