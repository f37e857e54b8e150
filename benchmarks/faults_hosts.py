"""Faults of machines: two network namespaces, each with ranks started as srun starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from faults_ranks import end_together, free_port
from faults_rows import Skip, fault
from faults_run import EAGER, End, Run, Scene
from two_hosts import ADDRESSES, INTERFACE, NetworkRefusedError, missing, network


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces with a link between them."""
    if (lacks := missing()) is not None:
        raise Skip(lacks)
    try:
        with network(1000) as names:
            yield names
    except NetworkRefusedError as error:
        raise Skip(str(error)) from error


def _train(
    scene: Scene, names: Sequence[str], per_host: int, *args: str, timeout_s: int = 1800
) -> list[Run]:
    """A run on both hosts; its ranks in order."""
    port, world = free_port(), 2 * per_host
    runs = []
    for rank in range(world):
        host, local = divmod(rank, per_host)
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "SIMPLEFSDP_TIMEOUT_S": str(timeout_s),
        }
        command = [sys.executable, "-m", "simplefsdp", "train", *EAGER, *args]
        runs.append(scene.start(["ip", "netns", "exec", names[host], *command], env))
    return runs


def _first_host_dies(scene: Scene, per_host: int) -> End:
    """All processes of the host of rank 0, and of the store, are killed; then all begin again."""
    with hosts() as names:
        runs = _train(scene, names, per_host, "--checkpoint-every", "2")
        runs[0].says("step 3/")
        for run in runs[:per_host]:
            run.kill(signal.SIGKILL)
        for run in runs[per_host:]:
            run.now()
        end = end_together(runs[per_host:], 90)
        again = _train(scene, names, per_host, "--resume", "auto", "--stop-after", "8")
        resumed = end_together(again, 120)
        wrong = f"beginning again ended with {resumed.code}: {resumed.last_line}"
        return end.expect(resumed.code == 0, wrong)


_LOST = "error: lost another rank"


@fault("host 0 of two, 2 ranks, with the store", "one line, exit 1", codes={1}, says=_LOST, loses=3)
def first_of_two_hosts_dies(scene: Scene) -> End:
    return _first_host_dies(scene, 1)


@fault("host 0 of two, 4 ranks, with the store", "one line, exit 1", codes={1}, says=_LOST, loses=3)
def first_of_two_hosts_with_four_ranks_dies(scene: Scene) -> End:
    return _first_host_dies(scene, 2)


@fault(
    "the link goes down in silence",
    "ends within the timeout of 15 s",
    codes={1},
    says="error: no answer from another rank",
    tells_where=True,
)
def link_goes_down(scene: Scene) -> End:
    with hosts() as names:
        runs = _train(scene, names, 1, "--checkpoint-every", "2", timeout_s=15)
        runs[0].says("step 3/")
        down = ["ip", "-n", names[1], "link", "set", INTERFACE, "down"]
        subprocess.run(down, check=True)
        for run in runs:
            run.now()
        return end_together(runs, 60)


@fault("the link is down for 5 s", "goes on, exit 0", codes={0})
def link_goes_down_for_a_while(scene: Scene) -> End:
    with hosts() as names:
        runs = _train(scene, names, 1, "--stop-after", "8", timeout_s=60)
        runs[0].says("step 3/")
        link = ["ip", "-n", names[1], "link", "set", INTERFACE]
        subprocess.run([*link, "down"], check=True)
        time.sleep(5)
        subprocess.run([*link, "up"], check=True)
        for run in runs:
            run.now()
        return end_together(runs, 90)
