"""Faults in the middle of a save, of publishing it, and of what a checkpoint consists of."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from faults_rows import fault, signalled
from faults_run import EAGER, End, Run, Scene, until

_SMALL_STEPS = ("--checkpoint-every", "2")


def _saving(scene: Scene, name: str) -> Run:
    """A run that has an older checkpoint and, this moment, a file of the next that is begun."""
    run = scene.train(*_SMALL_STEPS)
    run.says("step 3/")
    begun = scene.run / "checkpoints"
    until(lambda: list(begun.glob(f".step-*.tmp/{name}")), name, 60)
    run.now()
    return run


_OLDER = "the checkpoint before is used"
_LOST: dict[str, Any] = {"loses": 4, "resumes": True}
_in_a_save = partial(
    signalled, begin=partial(_saving, name="*.distcp"), when="while a shard is written"
)
_in_a_save("kill_rank_in_a_save", 1, signal.SIGKILL, _OLDER, codes={137}, **_LOST)
_in_a_save("kill_rank_zero_in_a_save", 0, signal.SIGKILL, _OLDER, codes={137}, **_LOST)
_in_a_save("kill_launcher_in_a_save", "launcher", signal.SIGKILL, _OLDER, codes={-9}, **_LOST)
_in_a_save(
    "sigterm_in_a_save",
    "launcher",
    signal.SIGTERM,
    "saves, exit 143",
    codes={143},
    loses=0,
    resumes=True,
)
signalled(
    "kill_before_publishing",
    0,
    signal.SIGKILL,
    _OLDER,
    codes={137},
    **_LOST,
    begin=partial(_saving, name=".metadata"),
    when="shards written, not published",
)


@fault("rank 0, as trainer.json is there", "one or the other", codes={137}, loses=4, resumes=True)
def kill_in_publishing(scene: Scene) -> End:
    run = scene.train(*_SMALL_STEPS)
    run.says("step 1/")
    begun, (rank, _) = scene.run / "checkpoints", run.ranks()
    until(lambda: list(begun.glob(".step-*.tmp/trainer.json")), "trainer.json", 60)
    run.kill(signal.SIGKILL, rank)
    return run.end()


def _stopped(scene: Scene, step: int = 6) -> Run:
    run = scene.train(*_SMALL_STEPS, "--stop-after", str(step))
    end = run.end()
    assert end.code == 0, end.text
    run.now()
    return run


def _ended(text: str = "", code: int = 0) -> End:
    return End(code, text, 0.0)


@fault("the newest, half renamed back", _OLDER, codes={0}, loses=2, resumes=True)
def crash_before_the_rename(scene: Scene) -> End:
    _stopped(scene)
    newest = scene.run / "checkpoints" / "step-00000006"
    newest.rename(newest.with_name(".step-00000006.tmp"))
    return _ended()


@fault("an old one, half deleted", "cleaned up, goes on", codes={0}, loses=0, resumes=True)
def crash_while_an_old_one_is_deleted(scene: Scene) -> End:
    _stopped(scene)
    old = scene.run / "checkpoints" / "step-00000004"
    doomed = old.rename(old.with_name(".step-00000004.tmp"))
    next(doomed.glob("*.distcp")).unlink()
    return _ended()


@fault("trainer.json of the newest is gone", _OLDER, codes={0}, loses=2, resumes=True)
def trainer_state_is_gone(scene: Scene) -> End:
    _stopped(scene)
    (scene.run / "checkpoints" / "step-00000006" / "trainer.json").unlink()
    return _ended()


@fault("half a line in metrics.jsonl", "dropped, goes on", codes={0}, loses=0, resumes=True)
def half_a_line_of_metrics(scene: Scene) -> End:
    _stopped(scene)
    with (scene.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    return _ended()


@fault("a shard cut to half", "refused, exit 2", codes={2}, says="truncated")
def shard_is_truncated(scene: Scene) -> End:
    _stopped(scene)
    shard = max(scene.run.glob("checkpoints/step-00000006/*.distcp"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    return scene.train("--resume", "run").end()


def _another_model(scene: Scene, *, same_name: bool) -> None:
    """A checkpoint of a smaller model takes the place of the run's newest."""
    _stopped(scene)
    target = scene.run / "checkpoints" / "step-00000006"
    code = (
        "import torch, torch.distributed.checkpoint as dcp\n"
        "tensors = {'model': {'embed.weight': torch.ones(3, 3)}}\n"
        f"dcp.save(tensors, checkpoint_id={str(target)!r})"
    )
    state = json.loads((target / "trainer.json").read_text())
    shutil.rmtree(target)
    made = scene.start([sys.executable, "-W", "ignore", "-c", code]).end()
    assert made.code == 0, made.text
    if not same_name:
        state["config"]["model"]["model"] = "160m"
    state["checksums"] = False  # as another program wrote the tensors
    (target / "trainer.json").write_text(json.dumps(state))


@fault("in place of the newest", "refused, exit 2", codes={2}, says="of another model")
def checkpoint_of_another_model(scene: Scene) -> End:
    _another_model(scene, same_name=True)
    return scene.train("--resume", "run").end()


@fault("named in trainer.json", "refused, exit 2", codes={2}, says="is of --model 160m")
def checkpoint_of_another_config(scene: Scene) -> End:
    _another_model(scene, same_name=False)
    return scene.train("--resume", "run", "--model", "debug").end()


@fault("resumed on 3 ranks", "goes on, says so, exit 0", codes={0}, loses=0)
def another_number_of_ranks(scene: Scene) -> End:
    _stopped(scene)
    options = [*EAGER, "--global-batch-size", "3", "--ranks", "3"]
    options += ["--resume", "run", "--stop-after", "8"]
    end = scene.train(options=options).end(90)
    return end.expect("random states are seeded anew" in end.text, "does not say so")


@fault("while the first still trains", "refused, exit 2", codes={2}, says="another run")
def two_runs_in_one_folder(scene: Scene) -> End:
    first = scene.train("--checkpoint-every", "100")
    first.says("step 3/")
    second = Scene(Path(scene.folder) / "second").train(
        "--resume", "auto", options=[*EAGER, "--out", str(scene.run)]
    )
    second.now()
    end = second.end()
    first.kill(signal.SIGTERM)
    time.sleep(0.1)
    return end.expect(first.end().code == 143, "the first run did not end well")


@fault("--lr 1e30", "all name the last checkpoint, exit 1", codes={1}, says="last checkpoint: run/")
def loss_is_lost(scene: Scene) -> End:
    options = ("--lr", "1e30", "--warmup-steps", "0", "--checkpoint-every", "1")
    end = scene.train(*options).end()
    logs = [path.read_text(errors="replace") for path in scene.run.glob("logs/**/*.log")]
    named = set(re.findall(r"last checkpoint: (\S+)", "\n".join([end.text, *logs])))
    newest = f"run/checkpoints/step-{max(scene.checkpoints()):08d}"
    return end.expect(named == {newest}, f"ranks name {sorted(named)}, there is {newest}")
