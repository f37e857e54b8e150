"""Ranks that are lost: does the run go on, what is lost, and is the result the same?

Four gloo ranks in two network namespaces, two in each, under torchrun's elastic launcher, train the
debug model. In each trial one rank, or a whole "machine" with its launcher, is killed with -9 at a
random step. Counted are the steps that are made again, and compared the final loss with that of a
run that nothing happens to. Needs root and iproute2; says what is missing and exits with 0
otherwise. Examples:

    python benchmarks/elastic.py
    python benchmarks/elastic.py --rank-trials 3 --machine-trials 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from two_hosts import ADDRESSES, INTERFACE, NetworkRefusedError, missing, network

RESULTS = Path(__file__).parent / "results" / "elastic.json"
STEPS, INTERVAL, BATCH = 16, 4, 8
TRAIN = (
    f"--seq-len 16 --global-batch-size {BATCH} --steps {STEPS} --checkpoint-every {INTERVAL} "
    "--log-every 1 --eval-batches 1 --sample-tokens 0 --executor aot_eager "
    "--bucketing manual --resume auto"
)
# One port for each run: what the one before left in TIME_WAIT does not matter.
TORCHRUN = (
    "--nnodes 1:2 --nproc-per-node 2 --max-restarts 5 --monitor-interval 0.2 --rdzv-backend c10d "
    f"--rdzv-endpoint {ADDRESSES[0]}:{{port}} --rdzv-id elastic "
    "--rdzv-conf last_call_timeout=5,keep_alive_interval=1,is_host={is_host}"
)
RATE_MBIT = 10_000
# A text that stays as it is: a folder of this repository has results, which each trial writes anew.
DATA = argparse.__file__
NOISE = 1e-3  # of a loss: on another number of ranks, gradients are added up in another order


class Machine:
    """A launcher in a namespace, and its ranks; what they print is in ``log``."""

    def __init__(self, namespace: str, index: int, folder: Path, port: int) -> None:
        self.log = folder / f"machine{index}.log"
        torchrun = TORCHRUN.format(port=port, is_host=int(index == 0))
        torchrun += f" --local-addr {ADDRESSES[index]}"
        train = f"-m simplefsdp train {TRAIN} --data {DATA} --out {folder / 'run'}"
        prefix = ["ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run"]
        environment = {
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, *torchrun.split(), *train.split()],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ranks(self) -> list[int]:
        """Process ids."""
        return sorted(pid for pid in _children(self.process.pid) if b"simplefsdp" in _command(pid))

    def kill(self) -> None:
        """All of it at once."""
        for pid in (self.process.pid, *_children(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def losses(folder: Path) -> dict[int, float]:
    """By step, of those that are on disk."""
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


@contextlib.contextmanager
def job(namespaces: Sequence[str], folder: Path, port: int) -> Iterator[list[Machine]]:
    """Both machines, started; what is left of them is killed at the end."""
    machines = [Machine(name, i, folder, port) for i, name in enumerate(namespaces)]
    try:
        yield machines
    finally:
        for machine in machines:
            machine.kill()


def until(condition: Any, what: str, machines: Sequence[Machine], limit_s: float = 240.0) -> None:
    """Wait for ``condition``; a job that hangs is an error that shows what it said last."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}:\n{said(machines)[-4000:]}")
        time.sleep(0.05)


def said(machines: Sequence[Machine]) -> str:
    """All that was printed."""
    return "\n".join(machine.log.read_text(errors="replace") for machine in machines)


def undisturbed(namespaces: Sequence[str], port: int) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as name, job(namespaces, Path(name), port) as machines:
        until(lambda: all(m.process.poll() is not None for m in machines), "no end", machines)
        found = losses(Path(name))
        if STEPS not in found:
            raise RuntimeError(f"the undisturbed run failed:\n{said(machines)[-4000:]}")
        return found


def trial(kind: str, rng: random.Random, namespaces: Sequence[str], port: int) -> dict[str, Any]:
    """One run that loses a rank, or a machine, and what became of it."""
    step = rng.randrange(2, STEPS - 2)
    with tempfile.TemporaryDirectory() as name, job(namespaces, Path(name), port) as machines:
        folder = Path(name)
        until(lambda: max(losses(folder), default=0) >= step, f"not at step {step}", machines)
        victim = rng.randrange(4) if kind == "rank" else None
        if victim is None:
            machines[1].kill()  # on the other one is torchrun's store
        else:
            os.kill(machines[victim // 2].ranks()[victim % 2], signal.SIGKILL)
        killed = time.monotonic()
        reached = max(losses(folder))
        left = machines[:1] if victim is None else machines
        resumed = r"^resumed .*at step (\d+)|^validation loss at step (0)"
        starts = len(re.findall(resumed, said(machines), re.M))
        until(lambda: len(re.findall(resumed, said(machines), re.M)) > starts, "no start", machines)
        until(lambda: _made_again(folder, reached, machines), "no step", machines)
        seconds = time.monotonic() - killed
        until(lambda: all(m.process.poll() is not None for m in left), "no end", machines)
        found = re.findall(resumed, said(machines), re.M)
        went_on_at = max(int(a or b) for a, b in found)
        return {
            "fault": f"kill -9 of {'a machine' if victim is None else f'rank {victim}'}",
            "step": reached,
            "resumed_at": went_on_at,
            "lost_steps": reached - went_on_at,
            "s_until_there_again": round(seconds, 1),
            "exit_codes": [machine.process.returncode for machine in left],
            "ranks": sorted({int(n) for n in re.findall(r"on (\d) cpu rank", said(machines))}),
            "losses": losses(folder),
        }


def _made_again(folder: Path, step: int, machines: Sequence[Machine]) -> bool:
    """Whether ``step`` was made since the ranks were started anew."""
    _, _, after = said(machines).rpartition("resumed ")
    made = [int(n) for n in re.findall(r"^step (\d+)/", after, re.M)]
    return max(made, default=0) >= step


def judged(found: dict[str, Any], wanted: dict[int, float]) -> dict[str, Any]:
    """``found`` with how far its losses are from those of the undisturbed run."""
    own = found.pop("losses")
    apart = max((abs(own[s] - wanted[s]) for s in wanted if s in own), default=float("inf"))
    whole = list(own) == list(wanted)
    found |= {"final_loss": own.get(STEPS), "largest_difference": apart, "every_step": whole}
    found["within_interval"] = found["lost_steps"] <= INTERVAL  # else one was being written
    found["ok"] = whole and not any(found["exit_codes"]) and apart <= NOISE
    return found


def main() -> None:
    """Run all trials, print a line for each, write the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rank-trials", type=int, default=20)
    parser.add_argument("--machine-trials", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help=f"default, for all trials: {RESULTS}")
    choice = parser.parse_args()
    if lacking := missing():
        print(lacking)
        return
    whole = choice.rank_trials >= 20
    target = choice.json or (RESULTS if whole else None)
    kinds = ["rank"] * choice.rank_trials + ["machine"] * choice.machine_trials
    rng = random.Random(choice.seed)
    rng.shuffle(kinds)  # so that a run that is cut short has some of each
    try:
        with network(RATE_MBIT) as namespaces:
            run(kinds, rng, namespaces, target)
    except NetworkRefusedError as error:
        print(error)


def run(
    kinds: Sequence[str], rng: random.Random, namespaces: Sequence[str], target: Path | None
) -> None:
    """The undisturbed run, and a trial of each of ``kinds``."""
    import torch
    from report import environment

    began = environment(torch.device("cpu"))
    wanted = undisturbed(namespaces, port=29400)
    print(f"undisturbed: final loss {wanted[STEPS]:.6f}", flush=True)
    trials = []
    for number, kind in enumerate(kinds):
        found = judged(trial(kind, rng, namespaces, 29401 + number), wanted)
        trials.append(found)
        print(
            f"{number + 1:2}: {found['fault']:22} at step {found['step']:2}, went on at "
            f"{found['resumed_at']:2}: {found['lost_steps']} lost, there again after "
            f"{found['s_until_there_again']:5.1f} s, final loss {found['final_loss']:.6f}, largest "
            f"difference {found['largest_difference']:.1e} {'ok' if found['ok'] else 'NOT OK'}",
            flush=True,
        )
        if target is not None:
            results = {
                "environment": began,
                "interval": INTERVAL,
                "undisturbed_losses": wanted,
                "trials": trials,
            }
            target.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
