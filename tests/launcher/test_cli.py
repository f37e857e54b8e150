"""The command line: bad input is one line and exit code 2, before any rank is started."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from simplefsdp.choices import with_default
from simplefsdp.cli import COMMANDS, main
from simplefsdp.launcher import launch
from simplefsdp.models import num_parameters
from simplefsdp.models.configs import config_of
from simplefsdp.train import command, runs
from simplefsdp.train.config import TrainConfig
from simplefsdp.train.dry_run import plan_memory
from simplefsdp.train.preflight import make_layout
from simplefsdp.train.runs import TrainerState


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_local_ranks", refuse)
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("once upon a time there was a shard\n" * 4000)
    Path("empty").touch()


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)


def fake_checkpoint(run_folder: Path, step: int, config: TrainConfig | None = None) -> Path:
    """A checkpoint of one wrong tensor, complete by the files it has."""
    import torch.distributed.checkpoint as dcp

    folder = runs.step_folder(run_folder, step)
    dcp.save({"model": {"other.weight": torch.ones(5, 3)}}, checkpoint_id=str(folder), no_dist=True)
    saved = (config or TrainConfig()).to_json()
    runs.write_trainer_state(folder, TrainerState(step, 2, saved, data={}))
    return folder


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--model nope", "debug, 160m, 1b, 8b, 70b, 405b"),
        ("--data missing", "missing does not exist"),
        ("--data empty", "an empty file"),
        ("--data text --global-batch-size 5", "2 data-parallel ranks"),
        ("--data text --global-batch-size 2000", "needs 256,001 bytes"),
        ("--data text --global-batch-size 64", "held-out split"),
        ("--data text --seq-len 4096", "--seq-len 4096 is beyond the 2048 positions"),
        ("--ranks 3 --tp 3", "--tp 3 does not divide the 4 key/value heads"),
        ("--ranks 4 --tp 3", "--tp 3 does not divide 4 ranks"),
        ("--mode hybrid_shard", "--shard-size"),
        ("--steps 0", "--steps must be at least 1"),
        ("--resume", "no complete checkpoint under runs/"),
        ("--resume auto", "--resume auto needs --out"),
        ("--resume elsewhere", "elsewhere does not exist"),
        ("--resume text", "text exists but holds no complete checkpoint"),
        ("--out text", "--out text is a file"),
        ("--out text/run", "--out text/run: cannot make the folder: Not a directory"),
        ("--steps 40 --stop-after 100", "--stop-after 100 is past the end of the run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", *args.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert named in message
    assert sorted(p.name for p in Path().iterdir()) == ["empty", "text"]


def test_unknown_options_and_choices_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--bogus") == 2
    assert run("train", "--mode", "sharded") == 2
    assert run("nonsense") == 2
    assert "choose one of train, export, verify, calibrate" in capsys.readouterr().err


def test_too_many_ranks_for_the_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run("train", "--data", "text", "--ranks", "2") == 2
    assert "this machine has 1 CUDA device; start" in capsys.readouterr().err


def test_a_run_folder_is_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    old = fake_checkpoint(Path("here"), 20)
    newer = fake_checkpoint(Path("here"), 40)
    assert run("train", "--data", "text", "--out", "here") == 2
    assert "already holds a run, at step 40" in capsys.readouterr().err
    assert run("train", "--data", "text", "--resume", str(old)) == 2
    assert "would overwrite step-00000040" in capsys.readouterr().err
    assert old.is_dir()
    assert newer.is_dir()


def test_checkpoints_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    here = fake_checkpoint(Path("here"), 20)
    train = ("train", "--data", "text", "--resume", "here")
    assert run(*train) == 2
    assert "is of another model: it has no embed_tokens.weight" in capsys.readouterr().err
    assert run(*train, "--model", "160m") == 2
    assert "is of --model debug, not --model 160m" in capsys.readouterr().err

    data = next(here.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-7])
    assert run(*train) == 2
    assert f"is truncated: {data.name} has {len(whole) - 7} bytes" in capsys.readouterr().err
    data.unlink()
    assert run(*train) == 2
    assert f"is truncated: {data.name} is missing" in capsys.readouterr().err
    data.write_bytes(whole)

    metadata = (here / ".metadata").read_bytes()
    (here / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert run(*train) == 2
    assert ".metadata: it is damaged;" in capsys.readouterr().err
    (here / ".metadata").write_bytes(metadata)

    (here / "trainer.json").write_text("{")
    assert run(*train) == 2
    assert "trainer.json is damaged" in capsys.readouterr().err
    assert run("export", "--checkpoint", "here", "--out", "exported") == 2
    assert "trainer.json is damaged" in capsys.readouterr().err
    assert not Path("exported").exists()


def test_resume_takes_options_from_the_checkpoint_unless_given_again() -> None:
    saved = command.parse(["--data", "text", "--steps", "40", "--stop-after", "20", "--keep", "9"])
    folder = fake_checkpoint(Path("runs/a"), 20, saved)
    for resume in (["--resume"], ["--resume", "latest"], ["--resume", "runs/a"]):
        config = command.parse([*resume, "--keep", "3"])
        assert config.run.resume == str(folder)
        assert config.run.out == Path("runs/a")
        assert config.data.data == Path("text")
        assert (config.optim.steps, config.optim.stop_after, config.run.keep) == (40, None, 3)
    fork = command.parse(["--resume", str(folder), "--out", "runs/b"])
    assert (fork.run.resume, fork.run.out) == (str(folder), Path("runs/b"))
    fresh = command.parse(["--resume", "auto", "--out", "runs/b"])
    assert fresh.run.resume is None


def test_a_finished_run_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = command.parse(["--data", "text", "--steps", "20"])
    fake_checkpoint(Path("here"), 20, config)
    monkeypatch.setattr("simplefsdp.train.restore.check_model", lambda *_: None)
    monkeypatch.setattr("simplefsdp.train.data.ShardedBatches.load_state_dict", lambda *_: None)
    assert run("train", "--resume", "here") == 0
    assert "nothing to do: here is at step 20 of 20" in capsys.readouterr().out


def test_help_teaches_with_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "train" in capsys.readouterr().out
    assert run("train", "--help") == 0
    text = capsys.readouterr().out
    for group in ("model options", "data options", "optim options", "parallel options"):
        assert group in text
    examples = text.split("examples:")[1].split("\n\n")[0].replace("\\\n", " ").strip()
    commands = [shlex.split(line) for line in examples.splitlines()]
    assert len(commands) >= 5
    for words in commands:
        args = words[words.index("train") + 1 :]
        command._read(with_default(args, "--resume", "latest"), TrainConfig())


@pytest.mark.slow(quick=["--model debug --world-size 64 --mode replicate-64-1-1"])
@pytest.mark.parametrize(
    ("args", "replicate", "shard", "tp"),
    [
        ("--model 8b --world-size 64", 1, 64, 1),
        ("--model debug --world-size 64 --mode replicate", 64, 1, 1),
        ("--model debug --world-size 12 --mode hybrid_shard --shard-size 3 --tp 2", 2, 3, 2),
    ],
)
def test_dry_run_adds_up_to_the_formula(args: str, replicate: int, shard: int, tp: int) -> None:
    config = command.parse(["--dry-run", *args.split()])
    layout = make_layout(config, int(config.plan.world_size or 0), node_ranks=8)
    assert (layout.replicate, layout.shard, layout.tp) == (replicate, shard, tp)
    plan = plan_memory(config, layout)
    model = config_of(config.model.model)
    n = num_parameters(model)
    assert plan.n_parameters == n
    if tp == 1:  # every row count divides
        assert plan.parameters_nbytes == 4 * n // shard
    else:  # 2 ways by tp, all but the norms; then rank 0 has ceil(rows / 3) of each part
        matrices = [(256, 256)] * 2 + [
            shape for _ in range(6) for shape in
            [(256, 256), (128, 256), (128, 256), (256, 256), (384, 256), (384, 256), (256, 384)]
        ]  # fmt: skip
        by_rows = [True, True, *[True, True, True, False, True, True, False] * 6]
        parts = [
            (rows // 2, columns) if split_rows else (rows, columns // 2)
            for (rows, columns), split_rows in zip(matrices, by_rows, strict=True)
        ]
        norms = 13 * -(-256 // 3)
        elements = sum(-(-rows // 3) * columns for rows, columns in parts) + norms
        assert plan.parameters_nbytes == 4 * elements
    assert plan.gradients_nbytes == plan.parameters_nbytes
    step_counters = 4 * (3 + 9 * model.n_layers)
    assert plan.optimizer_nbytes == 2 * plan.parameters_nbytes + step_counters


def test_dry_run_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--dry-run", "--world-size", "4") == 0
    text = capsys.readouterr().out
    assert re.search(r"total +│ +[\d,]+ │", text)


def test_import_stays_light() -> None:
    code = (
        "import sys, simplefsdp, simplefsdp.compiler.backend\n"
        "heavy = {'tyro', 'rich', 'tensorboard', 'safetensors', 'transformers', 'plotly',\n"
        "         'simplefsdp.inspection'} & {*sys.modules}\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    "asked",
    [
        *("--help", "--version", "nonsense", "train --bogus", "inspect --fit nothing"),
        *(f"{name} --help" for name in COMMANDS),
    ],
)
def test_help_and_a_wrong_option_need_no_torch(asked: str) -> None:
    """It takes seconds to import."""
    code = (
        "import sys, simplefsdp.cli\n"
        f"try: simplefsdp.cli.main({asked.split()})\n"
        "except SystemExit as end: assert end.code in (0, 2), end.code\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_launcher_checks_a_run_without_the_compiler(tmp_path: Path) -> None:
    """Which takes a second or two to import, before a rank is started."""
    code = (
        "import sys, simplefsdp.launcher.launch\n"
        "from simplefsdp.train import command, preflight\n"
        f"config = command.parse(['--out', {str(tmp_path / 'run')!r}, '--steps', '3'])\n"
        "plan = preflight.plan_run(config, 2, node_ranks=2, fits=False)\n"
        "assert plan.layout.world_size == 2 and not plan.finished\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'sympy'}\n"
        "sys.exit(f'imported {heavy & {*sys.modules}}' if heavy & {*sys.modules} else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_all_public_names_are_there_when_asked_for() -> None:
    import simplefsdp
    import simplefsdp.frontend.full_parameters

    assert {name for name in simplefsdp.__all__ if not hasattr(simplefsdp, name)} == set()
    assert simplefsdp.unsharded is simplefsdp.frontend.full_parameters.unsharded
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = simplefsdp.nothing


@pytest.mark.slow
def test_a_file_is_there_when_asked_for() -> None:
    """Once all of them were, as the package imported them. Each in a process of its own."""
    code = (
        "import os, torch\n"
        "for asked in ('rank_guard.RankMismatchError', 'models.Llama', 'compiler'):\n"
        "    if (child := os.fork()) == 0:\n"
        "        exec(f'import simplefsdp; simplefsdp.{asked}')\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, asked\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.slow(quick=["cpu-args1-2"])
@pytest.mark.parametrize(
    ("on", "args", "code"),
    [("cpu", ["--version"], 0), ("cpu", ["nothing"], 2), ("cuda", ["nothing"], 2)],
)
def test_a_rank_on_cpu_leaves_at_once(on: str, args: list[str], code: int) -> None:
    script = (
        "import atexit, sys; from simplefsdp import cli; from simplefsdp.launcher import ranks; "
        f"atexit.register(print, 'at exit'); ranks.device_type = lambda: {on!r}; "
        f"sys.argv[1:] = {args!r}; cli.main_of_rank()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code and (done.stdout + done.stderr).strip()
    assert ("at exit" in done.stdout) == (on == "cuda")


def test_bars_leave_no_lock_between_processes() -> None:
    """Python 3.14 tells of each that is left by a rank that leaves at once."""
    pytest.importorskip("tqdm")
    script = (
        "import sys, multiprocessing.synchronize as m; from simplefsdp import cli\n"
        "m.SemLock.__init__ = lambda *args, **kwargs: print('made one')\n"
        "def main():\n    from tqdm import tqdm; sys.exit(len([*tqdm([])]))\n"
        "cli.main = main; cli.main_of_rank()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert not done.stdout
