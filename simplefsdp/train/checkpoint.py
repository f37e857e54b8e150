"""Saves checkpoints in the background; a crash at any moment leaves the previous one usable.

Every rank writes its shards into a temporary folder while training goes on. When all ranks have
finished, rank 0 renames the folder. A checkpoint is therefore complete under its name or absent.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_saver import async_save

from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.saving import ChecksumWriter
from simplefsdp.launcher.ranks import from_rank_zero
from simplefsdp.train import room, runs
from simplefsdp.train.runs import TrainerState


def pinned_stager(device: torch.device) -> AsyncStager | None:
    """The stager that copies tensors of ``device`` to host memory, the same one for all saves; None
    for torch's default.

    From CUDA the copy goes into pinned memory, which takes a fraction of the time. Pinning takes as
    long as an unpinned copy, so the pinned memory, as much as this rank saves, is kept for reuse.
    """
    if device.type != "cuda":
        return None
    if torch.__version__ < (2, 13):  # type: ignore[operator]
        return BlockingAsyncStager(cache_staged_state_dict=True)  # DefaultStager does not keep it
    # No async staging: when `save` returns, training may write to the tensors, so they must have
    # been copied. No shared memory: no other process reads the copy.
    options = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=True,
    )
    return DefaultStager(options)


@dataclass(eq=False)
class CheckpointWriter:
    """Writes the checkpoints of one run; every rank holds one and makes the same calls.

    Saves use their own process group: they run beside training, and the order of collectives in a
    group must be the same on all ranks. A save that fails does not stop training, because the next
    may succeed: ``say`` is called with a warning, and ``error`` says why the latest checkpoint is
    missing. A failure to put a checkpoint in place is known only to rank 0, which does that.
    ``nbytes`` is the size of the tensors of one checkpoint.
    """

    run: Path
    keep: int
    device: torch.device
    nbytes: int
    say: Callable[[str], object]
    error: str | None = None

    def __post_init__(self) -> None:
        self._stager = pinned_stager(self.device)
        self._group: Any = dist.new_group(backend="gloo")
        self._leads = dist.get_rank() == 0
        self._pending: tuple[Future[Any], TrainerState] | None = None
        if self._leads:
            (self.run / runs.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            for leftover in runs.leftovers(self.run):
                runs.remove(leftover)

    def save(self, tensors: dict[str, Any], state: TrainerState) -> None:
        """Begin to save; returns once the tensors are copied to host memory.

        Waits for the previous save, if it still runs. Nothing is written if rank 0 finds that the
        disk has no room for the whole checkpoint.
        """
        self.wait()
        if (short := self._shortage()) is not None:
            self._ended(state.step, short)
            return
        written = runs.temporary(runs.step_folder(self.run, state.step))
        future: Any = async_save(
            tensors,
            storage_writer=ChecksumWriter(written),
            process_group=self._group,
            # Torch's default, too, is a new DefaultStager for each save. But if it is given a
            # writer and no stager, it uses the writer as the stager.
            async_stager=self._stager or DefaultStager(StagingOptions(*[False] * 4)),
        )
        self._pending = future, state

    def _shortage(self) -> str | None:
        """Why a checkpoint does not fit on the disk, or None: rank 0's finding, on all ranks."""
        found = None
        if self._leads:
            try:
                found = room.shortage(self.run, self.nbytes)
            except OSError as error:
                found = f"{type(error).__name__}: {error}"
        return from_rank_zero(found)

    def _ended(self, step: int, error: str | None) -> None:
        self.error = error
        if error:
            self.say(f"warning: checkpoint of step {step} failed: {error}")

    def poll(self) -> None:
        """Put the running save in place if its files are written; never waits for them."""
        if self._pending is not None and self._pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the running save, put it in place, and delete what ``keep`` does not cover."""
        if self._pending is None:
            return
        (future, state), self._pending = self._pending, None
        folder = runs.step_folder(self.run, state.step)
        error = None
        try:
            future.result()
            if self._leads:
                self._publish(folder, state)
        except CheckpointException as failure:
            rank, (cause, _) = next(iter(failure.failures.items()))
            error = f"rank {rank}: {room.why_unsaved(self.run, cause)}"
        except (OSError, ValueError) as failure:
            error = f"rank 0: {room.why_unsaved(self.run, failure)}"
        if error and self._leads:  # no rank is writing into the folder any more
            shutil.rmtree(runs.temporary(folder), ignore_errors=True)
        self._ended(state.step, error)

    def _publish(self, folder: Path, state: TrainerState) -> None:
        written = runs.temporary(folder)
        checksums.add(written, runs.write_trainer_state(written, state))
        if folder.exists():  # incomplete: `check_out` refuses to overwrite a complete one
            runs.remove(folder)
        written.rename(folder)
        for old in runs.complete_checkpoints(self.run)[: -self.keep]:
            doomed = runs.temporary(old)
            old.rename(doomed)
            runs.remove(doomed)
