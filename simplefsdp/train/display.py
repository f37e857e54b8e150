"""What the user sees while training: a live line on a terminal, plain lines elsewhere."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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

    def __init__(self, console: Console, progress: Progress, first_step: int, last_step: int):
        self._console = console
        self._progress = progress
        self._last_step = last_step
        self._task = progress.add_task("", total=last_step, completed=first_step, text="")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)

    def busy(self, doing: str) -> None:
        """Show what the next seconds go to, until the next report."""
        if not self._progress.disable:
            self._progress.update(self._task, description=doing, text="")
        else:
            self.say(f"{doing} ...")

    def report(self, record: StepRecord) -> None:
        """Show one step."""
        text = describe(record)
        if not self._progress.disable:
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


@contextmanager
def open_display(first_step: int, last_step: int, *, enabled: bool) -> Iterator[Display]:
    """Open a display; inside the context, the library's log lines go through it, too."""
    console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not (enabled and console.is_terminal),
        transient=True,
    )
    logger = logging.getLogger("simplefsdp")
    before = logger.level, logger.propagate
    with progress:
        display = Display(console, progress, first_step, last_step)
        logger.addHandler(handler := _DisplayHandler(display))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield display
        finally:
            logger.removeHandler(handler)
            level, logger.propagate = before
            logger.setLevel(level)


class _DisplayHandler(logging.Handler):
    """Sends log lines through the display: written elsewhere, they would break its live line."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(self.format(record))
