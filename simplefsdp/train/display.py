"""What the user sees while training: a live line on a terminal, plain lines elsewhere."""

import logging
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from simplefsdp.train.metrics import EvalRecord, StepRecord


class Display:
    """The terminal of a run; on ranks other than 0 it says nothing."""

    def __init__(self, *, first_step: int, last_step: int, enabled: bool) -> None:
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._live = enabled and self._console.is_terminal
        self._last_step = last_step
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("", total=last_step, completed=first_step, text="")
        self._log_handler = _ConsoleHandler(self)

    def __enter__(self) -> Self:
        self._progress.start()
        logger = logging.getLogger("simplefsdp")
        self._before = logger.level, logger.propagate
        logger.addHandler(self._log_handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        logger = logging.getLogger("simplefsdp")
        logger.removeHandler(self._log_handler)
        level, logger.propagate = self._before
        logger.setLevel(level)
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)

    def busy(self, doing: str) -> None:
        """Show what the next seconds go to, until the next report."""
        if self._live:
            self._progress.update(self._task, description=doing, text="")
        else:
            self.say(f"{doing} ...")

    def report(self, record: StepRecord) -> None:
        """Show one step."""
        text = describe(record)
        if self._live:
            self._progress.update(
                self._task, description="training", completed=record.step, text=text
            )
        else:
            self.say(f"step {record.step}/{self._last_step}  {text}")

    def report_eval(self, record: EvalRecord) -> None:
        """Show one evaluation; the line stays."""
        self.say(
            f"validation loss at step {record.step}: {record.validation_loss:.4f} nats/byte "
            f"({record.bits_per_byte:.4f} bits/byte)"
        )


def describe(record: StepRecord) -> str:
    """One line of figures."""
    parts = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_s:,.0f} tokens/s",
        f"{record.step_s:.3f} s/step",
        f"peak {record.peak_memory_nbytes / 2**30:.2f} GiB",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    return "  ".join(parts)


class _ConsoleHandler(logging.Handler):
    """Log lines of the library go through the console, so that they do not break the live line."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(self.format(record))
