"""What a launcher and its ranks do when nobody reads, when a disk is full, when a rank is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from simplefsdp.cli import main
from simplefsdp.launcher import launch
from simplefsdp.launcher.errors import RunFailed, in_one_line, record_failure
from simplefsdp.launcher.output import unbroken_output
from simplefsdp.train import command, preflight, runs


def test_printing_to_nobody_is_no_error(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with unbroken_output():
            for _ in range(2):
                print("a line", flush=True)
        assert sys.stdout is nobody
        nobody.write("what is written from here on goes nowhere")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_printing_to_a_full_disk_is_no_error(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with unbroken_output():
            print("a line", file=sys.stderr, flush=True)


def test_a_hangup_that_is_ignored_is_not_passed_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert "SIGHUP" in launch._signals_to_pass_on().split(",")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert "SIGHUP" not in launch._signals_to_pass_on().split(",")
        stop = launch.StopRequest()
        stop.listen()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        stop.close()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_is_a_wish_to_stop():
    stop = launch.StopRequest()
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # not to end the tests without it
    try:
        stop.listen()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == signal.SIGHUP
    finally:
        stop.close()
        signal.signal(signal.SIGHUP, before)


def test_a_rank_that_lost_another_says_so_in_one_line(monkeypatch, capsys):
    def fail(args):
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            "[127.0.0.1]:6067"
        )

    monkeypatch.setattr("simplefsdp.cli._dispatch", fail)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told == (
        "error: lost another rank in the middle of a collective (Connection closed by peer)\n"
    )
    assert in_one_line(ValueError("Connection closed by peer")) is None
    assert in_one_line(RuntimeError("shape mismatch")) is None


def test_a_rank_that_gets_no_answer_says_where_it_was(monkeypatch, capsys):
    """It may be that two ranks are in different collectives: nobody is lost."""

    def fail_in_a_collective(args):
        raise RuntimeError(
            "[../gloo/transport/tcp/unbound_buffer.cc:86] Timed out waiting 15000ms for recv "
            "operation to complete\nmore"
        )

    monkeypatch.setattr("simplefsdp.cli._dispatch", fail_in_a_collective)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told and "in fail_in_a_collective" in told
    last = told.strip().split("\n")[-1]
    assert last.startswith("error: no answer from another rank in a collective (Timed out waiting")
    assert "15000ms for recv operation to complete): it hangs" in last


_FOLLOWS = "from simplefsdp.launcher.follow import follow_launcher as f; f(); print('follows')"


@pytest.mark.parametrize(
    ("launcher", "code", "out", "error"),
    [
        ("another-run 1", 0, "follows\n", ""),  # inherited
        ("this-run {parent}", 0, "follows\n", ""),
        ("this-run 1", 1, "", "error: process 1, which started this one, is gone\n"),
    ],
)
def test_a_rank_follows_the_launcher_of_its_own_run(launcher, code, out, error):
    launcher = launcher.format(parent=os.getpid())
    told = {"SIMPLEFSDP_LAUNCHER": launcher, "TORCHELASTIC_RUN_ID": "this-run"}
    ended = subprocess.run(
        [sys.executable, "-c", _FOLLOWS],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, error)


def test_a_launcher_tells_its_own_ranks_of_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMPLEFSDP_LAUNCHER", "another-run 1")
    started = []
    monkeypatch.setattr(
        launch, "elastic_launch", lambda config, _: lambda *args: started.append(config.run_id)
    )
    monkeypatch.setattr(launch, "_set_environment", lambda ranks: None)
    launch.start_local_ranks([], ranks=2, log_folder=tmp_path)
    assert os.environ["SIMPLEFSDP_LAUNCHER"] == f"{started[0]} {os.getpid()}"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(24, "Too many open files"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_what_is_used_up_is_one_line(error):
    assert in_one_line(error)
    assert in_one_line(FileNotFoundError(2, "No such file")) is None
    inner = RuntimeError("backend failed\nMemoryError: \n\nmore")
    assert in_one_line(inner) == "out of memory, or near it: MemoryError"
    assert in_one_line(ImportError("No module named 'transformers'")) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit that others ignore")
def test_no_memory_for_torch_itself_is_one_line(tmp_path):
    command = [sys.executable, "-m", "simplefsdp", "train", "--model", "debug", "--out", "run"]
    limited = ["bash", "-c", 'ulimit -v 300000 && exec "$@"', "bash", *command]
    ended = subprocess.run(
        limited, cwd=tmp_path, text=True, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert re.fullmatch("error: out of memory, or near it: .*failed to map.*\n", ended.stderr)


def test_a_command_that_is_out_of_memory_imports_no_more_to_say_so():
    """What it imported failed, too, with a traceback."""
    program = (
        "import sys\n"
        "from simplefsdp import cli\n"
        "def fail(args): raise MemoryError\n"
        "cli._dispatch, before = fail, {*sys.modules}\n"
        "try: cli.main(['inspect'])\n"
        "finally: print(sorted({*sys.modules} - before))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "[]\n")
    assert ended.stderr == "error: out of memory\n"


def test_error_files_do_not_lie_in_the_run_folder(tmp_path):
    envs = {rank: {"TORCHELASTIC_RUN_ID": "id"} for rank in (0, 1)}
    with launch.logs_of(tmp_path / "logs", 2) as logs:
        made = logs.reify(envs)
        files = made.error_files
        assert logs.stderr_of == {1: made.stderrs[1]}
        assert (tmp_path / "logs") in Path(made.stderrs[1]).parents
        assert [envs[rank]["TORCHELASTIC_ERROR_FILE"] for rank in (0, 1)] == list(files.values())
        folder = Path(files[0]).parent
        assert folder.is_dir() and tmp_path not in folder.parents
    assert not folder.exists()


def test_an_error_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, capsys):
    """As it is where no disk has room for it."""

    def damaged(config, entrypoint):
        import json

        return lambda *args: json.loads("")

    monkeypatch.setattr(launch, "elastic_launch", damaged)
    assert launch.start_local_ranks([], ranks=2, log_folder=tmp_path) == 1
    assert capsys.readouterr().err.startswith("error: a rank failed, and cannot say why; ")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_rank_that_is_ended_while_it_says_why_leaves_no_half_file(stop, tmp_path, monkeypatch):
    file = tmp_path / "0.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def half(data, target):
        target.write('{"message"')
        raise stop

    with monkeypatch.context() as during, suppress(KeyboardInterrupt):
        during.setattr("json.dump", half)
        record_failure(RunFailed("lost"))
    assert not file.exists()
    record_failure(RunFailed("lost"))
    assert ProcessFailure(0, 1, 1, str(file)).message["message"] == "RunFailed: lost"


@pytest.mark.parametrize(
    ("there", "saved", "said"),
    [
        ([], [], "stopped by SIGTERM before a checkpoint was saved; start it again\n"),
        (
            [3],
            [],
            "stopped by SIGTERM before a checkpoint was saved; continue with: simplefsdp train "
            "--resume run\n",
        ),
        ([3], [4], ""),  # rank 0 has said how to go on
    ],
)
def test_a_signal_before_the_first_step_is_told(there, saved, said, tmp_path, monkeypatch, capsys):
    """Ranks end at once then, without a word."""

    def save(step):
        checkpoint = runs.step_folder(Path("run"), step)
        checkpoint.mkdir(parents=True)
        for name in (".metadata", "trainer.json"):
            (checkpoint / name).touch()
        return checkpoint

    def signalled(config, entrypoint):
        def start(*args):
            for step in saved:
                save(step)
            raise SignalException("SIGTERM came", signal.SIGTERM)

        return start

    monkeypatch.chdir(tmp_path)
    found = [types.SimpleNamespace(path=save(step)) for step in there]
    plan = types.SimpleNamespace(finished=False, out=Path("run"), checkpoint=(found or [None])[0])
    monkeypatch.setattr(launch, "elastic_launch", signalled)
    monkeypatch.setattr(launch, "_set_environment", lambda ranks: None)
    monkeypatch.setattr(preflight, "plan_run", lambda *args, **_: plan)
    assert command.run([]) == 143
    assert capsys.readouterr().err == said
