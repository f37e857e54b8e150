"""Output on the terminal: a console, tables, written files, and work that takes time."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_WIDTH = 160


def console() -> Console:
    """A console on standard output; wide enough for the tables if that is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDTH)


def printed(show: Callable[[Console], object]) -> str:
    """The text that ``show`` prints on a console of the same width."""
    text = io.StringIO()
    show(Console(file=text, width=_WIDTH, highlight=False))
    return text.getvalue().rstrip()


def table_of(*columns: str, words: Collection[str], title: str | None = None) -> Table:
    """An empty table; the columns in ``words`` are aligned left, the others, of numbers, right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right")
    return table


def save(out: Console, path: Path, text: str) -> None:
    """Write a file, and say so."""
    path.write_text(text)
    out.print(f"wrote {path}", soft_wrap=True, markup=False)


def save_json(out: Console, path: Path | None, document: object) -> None:
    """Write ``document`` as JSON, and say so, if the user has given a path."""
    if path is not None:
        save(out, path, json.dumps(document, indent=1) + "\n")


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done: with a running clock on a terminal, else by a line at its beginning;
    and by a line when it is done. Gives a function that prints a line meanwhile."""
    out = Console(stderr=True, highlight=False)
    begin = time.perf_counter()
    if not out.is_terminal:
        print(f"{what} ...", file=sys.stderr, flush=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        progress.add_task(what)
        yield partial(progress.console.print, soft_wrap=True, markup=False)
    print(f"{what}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
