"""torch's writer of checkpoint files, extended to write their checksums.

Each rank reads back and hashes the files that it wrote, in the thread that wrote them. Rank 0 gets
the checksums together with the other facts about files that ranks send to it.
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
    """A part that was written, with the checksum of its file."""

    checksum: Checksum


class ChecksumWriter(FileSystemWriter):
    """Writes a checkpoint's files, then ``checksums.json``, ``.metadata``, and the latter's
    checksum.

    A folder is a checkpoint if it has ``.metadata``. That of an older checkpoint in the folder is
    removed before any file is overwritten, and the new one is written after the checksums. So at
    whatever point a save ends, the folder is refused, or is complete.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Only one rank gets here. The others wait for its plan, so none has begun to write.
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
