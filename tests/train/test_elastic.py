"""Training on a number of ranks that changes: batches, and ranks that torchrun starts anew."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_train import children, start

from simplefsdp.launcher.errors import UserError
from simplefsdp.train import elastic, loop, runs
from simplefsdp.train.command import parse
from simplefsdp.train.config import DataOptions, OptimOptions, RunOptions, TrainConfig
from simplefsdp.train.preflight import plan_run

BATCH, STEPS = 8, 11
OPTIONS = (
    f"--data text --seq-len 16 --global-batch-size {BATCH} --steps {STEPS} --checkpoint-every 4 "
    "--eval-batches 1 --sample-tokens 0 --no-compile --log-every 1 --keep 99"
)


def config_of(sequences: int, **optim: int) -> TrainConfig:
    return TrainConfig(data=DataOptions(global_batch_size=sequences), optim=OptimOptions(**optim))


@pytest.mark.parametrize(
    ("optim", "ranks", "sequences", "microbatches"),
    [
        ({}, 4, 16, 1),
        ({"gradient_accumulation_steps": 2}, 4, 16, 2),
        ({"microbatch_size": 4}, 4, 16, 1),
        ({"microbatch_size": 4}, 2, 16, 2),
        ({"microbatch_size": 4}, 1, 16, 4),
        ({"microbatch_size": 3}, 2, 16, 4),  # of two each: three do not divide eight
        ({"microbatch_size": 4}, 3, 15, 5),  # five have no other divisor
        ({"microbatch_size": 2}, 3, 15, 5),
        ({"microbatch_size": 4}, 5, 15, 1),
        ({"microbatch_size": 4}, 32, 32, 1),
        ({"microbatch_size": 4}, 20, 20, 1),
    ],
)
def test_a_rank_computes_no_more_at_once_however_many_there_are(
    optim: dict[str, int], ranks: int, sequences: int, microbatches: int
) -> None:
    batch = elastic.divide(config_of(16, **optim), ranks)
    assert (batch.sequences, batch.microbatches) == (sequences, microbatches)
    assert (batch.notice is None) == (sequences == 16)
    if batch.notice:
        assert f"{sequences} sequences for now: 16 do not divide among {ranks}" in batch.notice


@pytest.mark.parametrize(
    ("sequences", "ranks", "at_once", "taken", "microbatches"),
    [(30, 2, 8, 30, 3), (31, 2, 8, 30, 3), (7, 2, 2, 6, 3), (1023, 8, 100, 1016, 127)],
)
def test_a_batch_that_does_not_divide_loses_only_the_rest(
    sequences: int, ranks: int, at_once: int, taken: int, microbatches: int
) -> None:
    batch = elastic.divide(config_of(sequences, microbatch_size=at_once), ranks)
    assert (batch.sequences, batch.microbatches) == (taken, microbatches)


def test_what_is_saved_fits_any_number_of_ranks() -> None:
    saved = elastic.for_any_ranks(config_of(16, gradient_accumulation_steps=2), 4)
    loaded = TrainConfig.from_json(json.loads(json.dumps(saved.to_json())))
    assert [elastic.divide(loaded, ranks).microbatches for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert elastic.for_any_ranks(loaded, 3) == loaded  # three ranks change nothing for later


def test_a_first_start_refuses_what_an_elastic_one_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(
        data=DataOptions(data=Path(__file__), seq_len=16, global_batch_size=16),
        run=RunOptions(out=tmp_path / "out"),
    )
    for ranks, named in ((3, "15 or 18"), (32, "32")):
        words = f"16 sequences does not divide among {ranks} data-parallel ranks: use {named}"
        with pytest.raises(UserError, match=words):
            plan_run(config, ranks, ranks)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    plan = plan_run(config, 3, 3)
    assert (plan.batch.sequences, plan.saved.data.global_batch_size) == (15, 16)
    assert plan.batch.notice and "15 sequences for now" in plan.batch.notice


def test_ranks_that_would_start_from_nothing_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    out = f"--out {tmp_path}"
    one = f"{out} --resume {tmp_path}/checkpoints/step-00000004"
    for args in (
        "",
        out,
        one,
        f"{out} --resume latest",
        f"{out} --resume auto --checkpoint-every 0",
    ):
        with pytest.raises(UserError, match="--max-restarts 3: expected --resume auto, --out"):
            parse(args.split())
    assert parse(f"--out {tmp_path} --resume auto".split()).run.resume is None


class Agent:
    """torchrun on one of two "machines", each with one rank; what it prints is in a file."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.log = folder / f"{name}.log"
        torchrun = (
            "--nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d --rdzv-id t "
            f"--rdzv-endpoint 127.0.0.1:{port} "
            "--rdzv-conf last_call_timeout=2,keep_alive_interval=1 "
            "--monitor-interval 0.1 --local-addr 127.0.0.1 -m simplefsdp train"
        )
        command = f"-m torch.distributed.run {torchrun} {OPTIONS} --out run --resume auto"
        environment = {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()],
                cwd=folder,
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def rank(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def kill(self) -> None:
        """As a machine that loses its power."""
        own = [self.process.pid, *children(self.process.pid)]
        for pid in own:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def losses(run: Path) -> dict[int, float]:
    """By step, of those that are on disk."""
    metrics = run / runs.METRICS
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def wait_for(condition: Callable[[], object], what: str, agents: list[Agent]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}\n" + "\n".join(a.log.read_text()[-3000:] for a in agents))
        time.sleep(0.05)


def finish(agents: list[Agent]) -> str:
    """What the ranks printed until their end."""
    said = []
    for agent in agents:
        wait_for(lambda agent=agent: agent.process.poll() is not None, "did not end", agents)
        said.append(agent.log.read_text())
        assert agent.process.returncode == 0, said[-1]
    return "\n".join(said)


def lost_steps(said: str, resumed: int) -> int:
    """Steps that were made, and made again after one resumed at ``resumed``."""
    before, _, _ = said.partition(f"at step {resumed}")
    return max(int(step) for step in re.findall(r"^step (\d+)/", before, re.M)) - resumed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(Path(__file__).read_bytes() * 3)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "text").write_bytes(Path(__file__).read_bytes() * 3)
    more = ("--ranks", "2", "--out", "run", "--sample-tokens", "2")
    process = start(folder, *OPTIONS.split(), *more)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert f"step {STEPS}/{STEPS}" in text
    for part in ("train loss", "validation loss", "bits/byte", "sample:", "metrics: run/"):
        assert part in text
    return losses(folder / "run")


@pytest.fixture
def agents(folder: Path) -> Iterator[Callable[[str], Agent]]:
    started: list[Agent] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def begin(name: str) -> Agent:
        started.append(Agent(folder, name, port))
        return started[-1]

    yield begin
    for agent in started:
        if agent.process.poll() is None:
            agent.kill()


@pytest.mark.slow
def test_a_killed_rank_is_started_anew_and_nothing_else_changes(
    folder: Path, agents: Callable[[str], Agent], undisturbed: dict[int, float]
) -> None:
    both = [agents("a"), agents("b")]
    saved = folder / "run" / "checkpoints" / "step-00000004"  # there as soon as it is whole
    wait_for(lambda: 6 in losses(folder / "run") and saved.exists(), "never at step 6", both)
    os.kill(both[1].rank(), signal.SIGKILL)
    said = finish(both)
    assert losses(folder / "run") == undisturbed  # bit for bit, in the same order of data
    (resumed,) = {int(n) for n in re.findall(r"exactly, at step (\d+)", said)}
    assert 0 <= lost_steps(said, resumed) <= 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads pending signals from /proc")
def test_a_machine_that_comes_and_one_that_is_lost(
    folder: Path, agents: Callable[[str], Agent], undisturbed: dict[int, float]
) -> None:
    first = agents("a")
    wait_for(lambda: 3 in losses(folder / "run"), "never at step 3", [first])
    alone = first.rank()
    os.kill(alone, signal.SIGSTOP)  # until the launcher wants to have it stopped
    second = agents("b")

    def is_asked_to_stop() -> bool:
        status = Path(f"/proc/{alone}/status").read_text()
        pending = int(re.search(r"ShdPnd:\s*(\w+)", status)[1], 16)
        return bool(pending & 1 << signal.SIGTERM - 1)

    wait_for(is_asked_to_stop, "the second machine never came", [first, second])
    os.kill(alone, signal.SIGCONT)
    wait_for(lambda: 8 in losses(folder / "run"), "never at step 8", [first, second])
    second.kill()
    said = finish([first])
    everything = said + second.log.read_text()
    assert "fully_shard on 1 cpu rank " in everything and "on 2 cpu ranks" in everything
    # SIGTERM saves: what grows loses nothing.
    assert re.search(r"stopped at step (\d+);", said)[1] in re.findall(
        r"at step (\d+); random states", everything
    )
    found = losses(folder / "run")
    assert list(found) == list(undisturbed)
    assert list(found.values()) == pytest.approx(list(undisturbed.values()), rel=1e-4)


def test_a_checkpoint_is_put_in_place_at_the_step_that_finds_it_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at the next report, up to which a lost rank would lose it, too."""
    polled: list[int] = []
    config = TrainConfig(
        optim=OptimOptions(steps=20), run=RunOptions(log_every=100, checkpoint_every=10)
    )
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(config=config, first_step=0),
        step=0,
        stopped_by=0,
        stop=SimpleNamespace(received=0, listen=lambda: None),
        display=SimpleNamespace(busy=lambda _: None),
        checkpoints=SimpleNamespace(poll=lambda: polled.append(session.step)),
    )
    monkeypatch.setattr(loop, "_update", lambda _: SimpleNamespace(loss=0.0))
    monkeypatch.setattr(loop, "_agree_to_stop", lambda signal: signal)
    monkeypatch.setattr(loop, "_mean", lambda loss: loss)
    monkeypatch.setattr(loop, "_record", lambda *_: None)
    monkeypatch.setattr(loop, "_report", lambda *_: None)
    monkeypatch.setattr(loop, "_save_or_poll", lambda session: polled.append(session.step))
    loop._train_steps(session)
    assert polled == list(range(1, 21))
