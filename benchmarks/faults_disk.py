"""Faults of disks: full ones, those that fill, and folders that are gone or cannot be written."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from faults_rows import Skip, fault
from faults_run import End, Run, Scene, until

# A checkpoint of the debug model has about 37 MB.
_LESS_THAN_ONE, _ONE, _MANY = "10m", "60m", "250m"


@contextmanager
def small_disk(folder: Path, size: str, more: str = "") -> Iterator[Path]:
    """A disk of its own, mounted at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size}" + (f",{more}" if more else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise Skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def fill(folder: Path, leave_nbytes: int = 0) -> Path:
    """A file that takes all that is free on a disk."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        left = shutil.disk_usage(folder).free - leave_nbytes
        while left > 0:
            file.write(bytes(min(left, 1 << 20)))
            left -= 1 << 20
    return ballast


def _begin(scene: Scene, *args: str) -> Run:
    """A run that has a checkpoint."""
    run = scene.train("--checkpoint-every", "2", *args)
    run.says("step 3/")
    until(scene.checkpoints, "the checkpoint of step 2")
    return run


@fault("before the start", "refused, exit 2", codes={2}, says="free space", quick=True)
def no_room_for_a_checkpoint(scene: Scene) -> End:
    with small_disk(scene.run, _LESS_THAN_ONE):
        run = scene.train("--stop-after", "4")
        return run.end()


@fault(
    "room for one checkpoint of two",
    "warns at the start; exit 1",
    codes={1},
)
def room_for_one_checkpoint(scene: Scene) -> End:
    with small_disk(scene.run, _ONE):
        run = scene.train("--stop-after", "6", "--checkpoint-every", "2")
        end = run.end()
        early = end.text.split("step 1/")[0]
        return _usable(scene, end).expect("free space" in early, "no early warning")


def _usable(scene: Scene, end: End) -> End:
    """See that there is a checkpoint on a small disk, before it is unmounted."""
    return end.expect(scene.checkpoints(), "no checkpoint is left")


@fault("after step 3, for good", "trains on; one line, exit 1", codes={1}, says="free", quick=True)
def disk_fills(scene: Scene) -> End:
    with small_disk(scene.run, _MANY):
        run = _begin(scene, "--stop-after", "8")
        fill(scene.run)
        run.now()
        return _usable(scene, run.end())


@fault("in the middle of a save", "trains on; one line, exit 1", codes={1}, says="checkpoint")
def disk_fills_in_a_save(scene: Scene) -> End:
    with small_disk(scene.run, "100m"):
        run = _begin(scene, "--stop-after", "6", "--keep", "1")
        fill(scene.run, leave_nbytes=20 << 20)
        run.now()
        end = _usable(scene, run.end())
        left = list((scene.run / "checkpoints").glob(".step*"))
        return end.expect(not left, "a save that failed left its files")


@fault("steps 3 to 6", "trains on, saves later, exit 0", codes={0}, says="continue with")
def disk_fills_and_is_freed(scene: Scene) -> End:
    with small_disk(scene.run, _MANY):
        run = _begin(scene, "--stop-after", "10")
        ballast = fill(scene.run)
        run.says("step 6/")
        ballast.unlink()
        end = run.end()
        return end.expect(10 in scene.checkpoints(), "not saved when there was room again")


@fault("at a resume", "refused, exit 2", codes={2}, says="free space")
def resume_on_a_full_disk(scene: Scene) -> End:
    with small_disk(scene.run, _MANY):
        first = scene.train("--stop-after", "2").end()
        assert first.code == 0, first.text
        fill(scene.run)
        return scene.train("--resume", "run").end()


@fault(
    "rank 1 fails while the disk is full",
    "its error in full, exit 137",
    codes={137},
    says="rank 1 was killed",
)
def rank_dies_on_a_full_disk(scene: Scene) -> End:
    with small_disk(scene.run, _MANY):
        run = _begin(scene)
        fill(scene.run)
        run.kill(signal.SIGKILL, run.ranks()[1])
        return run.end()


@fault(
    "no file can be made any more, after step 3", "one line, exit 1", codes={1}, says="checkpoint"
)
def out_of_inodes(scene: Scene) -> End:
    with small_disk(scene.run, _MANY, "nr_inodes=60"):
        run = _begin(scene, "--stop-after", "6")
        for number in range(100):
            try:
                (scene.run / f"empty{number}").touch()
            except OSError:
                break
        run.now()
        return _usable(scene, run.end())


@fault("ulimit -f: no file over 8 MB", "one line, exit 1", codes={1}, says="checkpoint")
def file_size_limit(scene: Scene) -> End:
    run = scene.train("--stop-after", "4", "--checkpoint-every", "2", limits="-f 8192")
    return run.end()


@fault("before the start", "refused, exit 2", codes={2}, says="Read-only")
def read_only_disk(scene: Scene) -> End:
    with small_disk(scene.run, _MANY):
        subprocess.run(["mount", "-o", "remount,ro", str(scene.run)], check=True)
        return scene.train("--stop-after", "2").end()


@fault("rm -rf of the run, after step 3", "saves anew, exit 0", codes={0}, says="continue with")
def run_folder_removed(scene: Scene) -> End:
    run = _begin(scene, "--stop-after", "6")
    shutil.rmtree(scene.run, ignore_errors=True)
    run.now()
    return run.end().expect(6 in scene.checkpoints(), "not saved")


@fault("rm -rf of the checkpoints, after step 3", "saves on, exit 0", codes={0})
def checkpoints_removed(scene: Scene) -> End:
    run = _begin(scene, "--stop-after", "6")
    shutil.rmtree(scene.run / "checkpoints", ignore_errors=True)
    run.now()
    return run.end().expect(6 in scene.checkpoints(), "not saved")
