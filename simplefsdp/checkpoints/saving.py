"""Torch's writer of checkpoint files, which leaves their checksums beside them.

Each rank reads back and hashes what it wrote, in the thread that wrote it; rank 0 gets the
checksums with the rest of what ranks tell each other of their files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from simplefsdp.checkpoints import checksums
from simplefsdp.checkpoints.checksums import Checksum
from simplefsdp.checkpoints.metadata import NAME as METADATA


@dataclass(frozen=True)
class _Written(WriteResult):
    """A part that was written, and the checksum of the file that it is in."""

    checksum: Checksum


class ChecksumWriter(FileSystemWriter):
    """Writes a checkpoint's files, ``checksums.json``, ``.metadata``, and the checksum of that.

    A folder is a checkpoint once it has ``.metadata``. So an older one in the folder is none before
    a file is written over, and the new one is none before its checksums are there: whenever a save
    ends, what it leaves is refused, or complete.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # One rank is here, and the others wait for its plan: none has begun to write.
        Path(self.path, METADATA).unlink(missing_ok=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Sequence[WriteResult] = super().write_data(plan, planner).wait()
        names = dict.fromkeys(result.storage_data.relative_path for result in written)
        sums = {name: checksums.checksum_of(Path(self.path, name)) for name in names}
        results: list[WriteResult] = [
            _Written(r.index, r.size_in_bytes, r.storage_data, sums[r.storage_data.relative_path])
            for r in written
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        written = (result for of_rank in results for result in of_rank)
        sums = {result.storage_data.relative_path: result.checksum for result in written}
        folder = Path(self.path)
        checksums.write(folder, sums)
        super().finish(metadata, results)
        checksums.write(folder, sums | {METADATA: checksums.checksum_of(folder / METADATA)})
