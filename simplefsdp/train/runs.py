"""The run folder: where things lie in it, and which checkpoint a resume means.

::

    runs/debug-20260131-235959/
      metrics.jsonl  tensorboard/  logs/  run.lock
      checkpoints/step-00000040/      complete: DCP's .metadata and our trainer.json are there
      checkpoints/.step-00000060.tmp/ being written, or left by a crash
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from inductor_passes.ir.json_file import MIB, read_json, typed
from simplefsdp.checkpoints import checksums
from simplefsdp.train.config import TrainConfig

DEFAULT_ROOT = Path("runs")
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
LOGS = "logs"

_LOCK = "run.lock"
_DCP_METADATA = ".metadata"
_TRAINER_STATE = "trainer.json"
_FORMAT = 2
_MAX_NBYTES = 16 * MIB
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint holds beside tensors; the same on every rank."""

    step: int  # updates done
    world_size: int  # ranks that saved it; only the same number can restore the random states
    config: dict[str, dict[str, Any]]  # TrainConfig.to_json() of the run
    data: dict[str, Any]  # ShardedBatches.state_dict(): the position
    checksums: bool = False  # whether it was saved with checksums; programs of format 1 wrote none


def new_run_folder(model: str) -> Path:
    """``runs/<model>-<date>-<time>``, not yet created."""
    return DEFAULT_ROOT / f"{model}-{datetime.now():%Y%m%d-%H%M%S}"


def step_folder(run: Path, step: int) -> Path:
    """Where the complete checkpoint of ``step`` lies."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def temporary(folder: Path) -> Path:
    """Where a checkpoint is while it is being written or deleted."""
    return folder.with_name(f".{folder.name}.tmp")


def leftovers(run: Path) -> list[Path]:
    """Temporary folders that a crash has left behind."""
    return sorted((run / CHECKPOINTS).glob(".step-*.tmp"))


def remove(leftover: Path) -> None:
    """Delete a folder, or a file or link in its place; what a link points to is kept."""
    if leftover.is_symlink() or not leftover.is_dir():
        leftover.unlink()
    else:
        shutil.rmtree(leftover)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 if it is not named as ours are."""
    match = _STEP_NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def complete_checkpoints(run: Path) -> list[Path]:
    """The usable checkpoints of a run, oldest first."""
    found = (run / CHECKPOINTS).glob("step-*")
    return sorted((c for c in found if step_of(c) >= 0 and _is_complete(c)), key=step_of)


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / _DCP_METADATA).is_file() and (checkpoint / _TRAINER_STATE).is_file()


def run_of(checkpoint: Path) -> Path | None:
    """The run folder a checkpoint lies in, or None if another program wrote it."""
    inside = checkpoint.parent.name == CHECKPOINTS and step_of(checkpoint) >= 0
    return checkpoint.parent.parent if inside else None


def find_checkpoint(resume: str | None, out: Path | None) -> Path | None:
    """The checkpoint that ``--resume`` means, or None to start a new run. A ValueError says that
    there is no such checkpoint or, with ``auto``, that ``out`` is None."""
    if resume is None:
        return None
    if resume == "auto":
        if out is None:
            raise ValueError("--resume auto needs --out: the run folder to resume or to start")
        return _latest(out)
    if resume == "latest":
        candidates = [out] if out else [p for p in DEFAULT_ROOT.glob("*") if p.is_dir()]
        latest = [c for c in map(_latest, candidates) if c]
        if not latest:
            raise ValueError(
                f"--resume: no complete checkpoint under {out or DEFAULT_ROOT}/; name a run "
                "folder or a checkpoint, or leave --resume out to start a new run"
            )
        return max(latest, key=lambda c: c.stat().st_mtime)
    return checkpoint_at(Path(resume))


def checkpoint_at(path: Path) -> Path:
    """``path`` if it is a checkpoint, else the latest checkpoint in the run folder ``path``."""
    if (path / _DCP_METADATA).is_file():
        return path
    latest = _latest(path)
    if latest is None:
        what = "exists but holds no complete checkpoint" if path.exists() else "does not exist"
        raise ValueError(
            f"{path} {what}; expected a run folder, or a checkpoint folder "
            f"(one with a {_DCP_METADATA} file)"
        )
    return latest


def how_to_go_on(run: Path) -> str | None:
    """What to type to continue a run from its last checkpoint; None if it has none."""
    again = f"continue with: simplefsdp train --resume {shlex.quote(str(run))}"
    return again if complete_checkpoints(run) else None


def _latest(run: Path) -> Path | None:
    checkpoints = complete_checkpoints(run)
    return checkpoints[-1] if checkpoints else None


def check_out(out: Path, resumed: Path | None) -> None:
    """Raise ValueError if training into ``out`` would mix two runs or overwrite checkpoints."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a folder")
    with suppress(OSError), (out / _LOCK).open() as file:
        _hold(out, file, alone=False)  # a run still writing would change what is checked
    existing = complete_checkpoints(out)
    if not existing:
        return
    newest = existing[-1]
    if resumed is None:
        raise ValueError(
            f"--out {out} already holds a run, at step {step_of(newest)}; add --resume to "
            "continue it, or give another --out"
        )
    same_run = resumed.resolve().parent == newest.resolve().parent
    if not same_run or step_of(newest) > step_of(resumed):
        raise ValueError(
            f"resuming {resumed} into --out {out} would overwrite {newest.name} there; give "
            "another --out, or move the newer checkpoints away"
        )


def write_trainer_state(checkpoint: Path, state: TrainerState) -> str:
    """Write the file that completes a checkpoint, through to the disk; returns the file's name.

    The file records whether the checkpoint has checksums, which are written before it. If they are
    lost later, a reader can tell.
    """
    state = replace(state, checksums=(checkpoint / checksums.NAME).is_file())
    with (checkpoint / _TRAINER_STATE).open("w") as file:
        json.dump({"format": _FORMAT, **asdict(state)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return _TRAINER_STATE


def read_trainer_state(checkpoint: Path) -> TrainerState | None:
    """Read :func:`write_trainer_state`'s file; None if another program wrote the checkpoint."""
    path = checkpoint / _TRAINER_STATE
    if not path.is_file():
        return None
    try:
        saved = typed(read_json(path, _MAX_NBYTES), dict, "it")
        written_by = typed(saved.pop("format", None), int, "format")
        if written_by == 1:
            _from_first_format(saved)
        if written_by <= _FORMAT:
            return _trainer_state(saved)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); copy it again, or move {checkpoint} elsewhere and use "
            "an earlier checkpoint"
        ) from error
    raise ValueError(f"{path} was written by a later simplefsdp; upgrade to read it")


def _from_first_format(saved: dict[str, Any]) -> None:
    """Convert what format 1 saved, in place: it called the model's name ``config``, and it had no
    checksums."""
    model = typed(typed(saved.get("config"), dict, "config").get("model", {}), dict, "model")
    if "config" in model:
        model["model"] = model.pop("config")
    saved["checksums"] = False


def _trainer_state(saved: dict[str, Any]) -> TrainerState:
    wanted = {"step": int, "world_size": int, "config": dict, "data": dict, "checksums": bool}
    if saved.keys() != wanted.keys():
        raise ValueError(f"expected {', '.join(wanted)}, got {', '.join(saved):.200}")
    for name, cls in wanted.items():
        typed(saved[name], cls, name)
    for name in ("step", "world_size"):
        if saved[name] < 0:
            raise ValueError(f"{name}: expected 0 or more, got {saved[name]}")
    config = TrainConfig.from_json(saved["config"])  # raises if it is not a TrainConfig
    saved["config"].setdefault("model", {})["model"] = config.model.model
    return TrainerState(**saved)


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Hold a run folder, so that no second run writes into it; freed when the process ends."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / _LOCK).open("a") as file:
        _hold(run, file, alone=True)
        yield


def _hold(run: Path, file: TextIO, *, alone: bool) -> None:
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"another run is writing to {run}; wait for it, or give another --out"
        ) from error
