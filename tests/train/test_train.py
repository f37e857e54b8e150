"""``simplefsdp train`` as a user runs it: its own ranks, Ctrl-C, resume, what it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sent import Sent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from simplefsdp import simple_fsdp
from simplefsdp.launcher import launch
from simplefsdp.launcher.ranks import Rank
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama
from simplefsdp.train import evaluate, runs
from simplefsdp.train.config import RunOptions, TrainConfig
from simplefsdp.train.display import describe
from simplefsdp.train.metrics import StepRecord

OPTIONS = (
    "--data text --seq-len 16 --global-batch-size 2 --eval-batches 1 --sample-tokens 2 "
    "--no-compile --log-every 1"
)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "simplefsdp", "train", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listed.stdout.split()]


def is_running(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


def read_until(process: subprocess.Popen[str], step: int) -> str:
    """What a run prints up to the end of a step."""
    printed = ""
    for line in process.stdout or ():
        printed += line
        if line.startswith(f"step {step}/"):
            break
    return printed


@pytest.mark.slow
def test_a_killed_rank_resume_and_ctrl_c(tmp_path: Path) -> None:
    """A killed rank ends the run with one clear line. What a whole run prints: test_elastic.py."""
    (tmp_path / "text").write_bytes(Path(__file__).read_bytes() * 3)
    process = start(tmp_path, *OPTIONS.split(), "--steps", "1000", "--checkpoint-every", "1")
    printed = read_until(process, 3)
    ranks = children(process.pid)
    assert ranks, printed
    os.kill(max(ranks), signal.SIGKILL)  # the one started last
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    (run,) = (tmp_path / "runs").iterdir()
    again = f"continue with: simplefsdp train --resume runs/{run.name}"
    killed = "error: rank 1 was killed by SIGKILL (out of memory?)"
    assert text.splitlines()[-1] == f"{killed}; {again}"
    checkpoint = runs.complete_checkpoints(run)[-1]

    # No other options: those of the run are taken over.
    process = start(tmp_path, "--resume")
    printed = read_until(process, runs.step_of(checkpoint) + 2)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    text = printed + rest
    assert process.returncode == 128 + signal.SIGINT, text
    assert len(ranks) >= 2
    assert not any(is_running(rank) for rank in ranks)
    assert "2 cpu ranks" in text and "Traceback" not in text and again in text
    assert f"resumed runs/{run.name}/checkpoints/{checkpoint.name} exactly" in text
    stopped = runs.step_of(runs.complete_checkpoints(run)[-1])
    assert stopped >= runs.step_of(checkpoint) + 2
    lines = (run / runs.METRICS).read_text().splitlines()
    steps = [r["step"] for r in map(json.loads, lines) if "loss" in r]
    assert steps == list(range(1, stopped + 1))


def failure(rank: int, exitcode: int, message: str = "") -> ProcessFailure:
    made = ProcessFailure(local_rank=rank, pid=rank, exitcode=exitcode, error_file="none")
    if message:
        made.message = {"extraInfo": {"py_callstack": message}}  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("failures", "exit_code", "says"),
    [
        ({0: failure(0, 1), 1: failure(1, -9)}, 137, "killed by SIGKILL (out of memory?); go on\n"),
        (
            {0: failure(0, -15), 1: failure(1, 2, "boom")},
            2,
            "boom\nerror: rank 1 failed; what it printed: logs/1/stderr.log\n",
        ),
        ({0: failure(0, 2), 1: failure(1, -15)}, 2, ""),
        ({0: failure(0, -15), 1: failure(1, 143)}, 143, ""),  # all stopped, as rank 0 has said
    ],
)
def test_the_failure_that_came_first_is_reported(
    failures: dict[int, ProcessFailure],
    exit_code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ChildFailedError("train", failures)
    assert launch._report_failure(error, {1: "logs/1/stderr.log"}, lambda: "go on") == exit_code
    message = capsys.readouterr().err
    assert message.endswith(says)
    assert bool(message) == bool(says)


def test_a_report_names_its_units() -> None:
    record = StepRecord(
        step=3, loss=2.5, lr=1e-3, grad_norm=1.0, step_s=0.25, tokens_per_s=4096.0,
        peak_memory_nbytes=3 * 2**30, mfu=0.405,
    )  # fmt: skip
    assert describe(record) == (
        "loss 2.5000  4,096 tokens/s  0.250 s/step  peak 3.00 GiB  MFU 40.5%"
    )


@pytest.mark.parametrize("small", [True, False])
def test_a_small_model_is_gathered_once_for_a_sample(small, fake_mesh, monkeypatch):
    mesh = fake_mesh(2)
    monkeypatch.setattr(evaluate, "_SMALL_NBYTES", 10**9 if small else 0)
    config = replace(CONFIGS["debug"], n_layers=1)
    model = simple_fsdp(Llama(config), mesh)
    session = SimpleNamespace(
        plan=SimpleNamespace(config=TrainConfig(run=RunOptions(sample_tokens=3))),
        rank=Rank(0, 1, torch.device("cpu")),
        corpus=SimpleNamespace(validation=torch.zeros(4, dtype=torch.uint8)),
        model=model,
    )
    # Nothing arrives here, so what is gathered may be anything.
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([0]))
    sent, parameters, broadcasts = Sent(), sum(1 for _ in model.parameters()), []
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: broadcasts.append(1))
    sent.start()
    evaluate.sample(session)
    assert sent.stop().total() == (1 if small else 3) * parameters
    assert len(broadcasts) == 3
    sent.start()
    model(torch.zeros(1, 4, dtype=torch.long))
    assert sent.stop().total() >= parameters  # nothing is kept
