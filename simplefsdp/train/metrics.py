"""What a run measures, and the files that record it: JSON lines and TensorBoard."""

import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from inductor_passes.adapters.devices import preset_of
from inductor_passes.ir.json_file import parse_json
from simplefsdp.train import runs


@dataclass(frozen=True)
class StepRecord:
    """One report of the training loop, after ``step`` updates."""

    step: int
    loss: float  # mean cross entropy over all ranks' tokens, in nats per token, before the update
    lr: float
    grad_norm: float  # before clipping
    step_s: float  # mean since the last report
    tokens_per_s: float  # of all ranks together
    peak_memory_nbytes: int  # of rank 0
    mfu: float | None  # model FLOPs utilisation, 0 to 1; None where the device's peak is not known


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on the held-out split: mean cross entropy per byte, in nats and in bits."""

    step: int
    validation_loss: float
    bits_per_byte: float


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 peak of ``device`` in FLOP/s, or None if it is not known."""
    if device.type != "cuda":
        return None
    known = preset_of(device)  # an estimated peak would not be accurate enough
    return None if known is None else known.peak("bfloat16").tflops * 1e12


def peak_memory_nbytes(device: torch.device) -> int:
    """Most bytes allocated on the GPU so far, or the process's largest resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsWriter:
    """Appends records to ``metrics.jsonl`` and TensorBoard; use it on rank 0 only.

    When a run resumes at ``step``, records of later steps are dropped first, so that the files show
    one curve, as if the run had never stopped. A record that cannot be written does not stop
    training: ``say`` is called with a warning. A JSON line that failed is kept and written with the
    next one; TensorBoard gets nothing more once it has failed.
    """

    def __init__(self, run: Path, step: int, say: Callable[[str], object]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run.mkdir(parents=True, exist_ok=True)
        self._say = say
        _truncate(run / runs.METRICS, step)
        self._file = (run / runs.METRICS).open("a")
        self._excepthook = threading.excepthook
        threading.excepthook = self._heed_thread
        self._tensorboard: Any = SummaryWriter(
            str(run / runs.TENSORBOARD), purge_step=step + 1 if step else None
        )

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append one record; its JSON line is flushed to the file when this returns."""
        values = {name: value for name, value in asdict(record).items() if value is not None}
        group = "train" if isinstance(record, StepRecord) else "validation"
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            if (tensorboard := self._tensorboard) is not None:
                self._tensorboard = None  # for good, if this fails
                for name, value in values.items():
                    if name != "step":
                        tensorboard.add_scalar(f"{group}/{name}", value, record.step)
                self._tensorboard = tensorboard
        except OSError as error:
            self._say(f"warning: metrics of step {record.step} are not written: {error}")

    def _heed_thread(self, failure: threading.ExceptHookArgs) -> None:
        """Hide an OSError of TensorBoard's writer thread: the next record warns of it."""
        in_tensorboard = "tensorboard" in type(failure.thread).__module__
        if not (in_tensorboard and isinstance(failure.exc_value, OSError)):
            self._excepthook(failure)

    def close(self) -> None:
        """Flush and close the files."""
        try:
            with self._file:
                if self._tensorboard is not None:
                    self._tensorboard.close()
        except OSError as error:
            self._say(f"warning: the last metrics are lost: {error}")
        finally:
            threading.excepthook = self._excepthook


def _truncate(path: Path, step: int) -> None:
    if not path.is_file():
        return
    kept = [
        line for line in path.read_text(errors="replace").splitlines() if _step_in(line) <= step
    ]
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(f"{line}\n" for line in kept))
    os.replace(shorter, path)


def _step_in(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # half a line, written as the run was killed
