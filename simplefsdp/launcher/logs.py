"""Where the output and the errors of local ranks go."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

_MEMORY = Path("/dev/shm")


class RankLogs(DefaultLogsSpecs):
    """Output under the run folder; error files elsewhere, where a full disk does not cut them.

    ``stderr_of`` is the file of each rank that does not write to the terminal.
    """

    def __init__(self, folder: Path, errors: Path, ranks: int) -> None:
        # Rank 0 owns the terminal.
        super().__init__(log_dir=str(folder), redirects=dict.fromkeys(range(1, ranks), Std.ALL))
        self._errors = errors
        self.stderr_of: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        files = {}
        for rank, env in envs.items():
            attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
            files[rank] = str(self._errors / f"{attempt}-{rank}.json")
            env["TORCHELASTIC_ERROR_FILE"] = files[rank]
        self.stderr_of = {rank: file for rank, file in destinations.stderrs.items() if file}
        return replace(destinations, error_files=files)


@contextmanager
def logs_of(folder: Path, ranks: int) -> Iterator[RankLogs]:
    """What torch's elastic launcher is told of ``ranks`` local ranks that log into ``folder``."""
    in_memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    errors = Path(tempfile.mkdtemp(prefix="simplefsdp-errors-", dir=in_memory))
    try:
        yield RankLogs(folder, errors, ranks)
    finally:
        shutil.rmtree(errors, ignore_errors=True)
