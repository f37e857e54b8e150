"""Telling the user that something takes its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what goes on: with a running clock on a terminal, else a line when it is done."""
    import sys
    import time

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    out = Console(stderr=True, highlight=False)
    begin = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        progress.add_task(what)
        yield
    print(f"{what}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
