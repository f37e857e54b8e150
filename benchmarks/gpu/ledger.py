"""The results of one part of the kit: a file of cells, written after each of them.

Processes that run side by side add to one file, and take turns on the device.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from measure import Turns
from report import environment, git_commit

from simplefsdp.launcher.follow import follow

NOTED = ("took_s", "git_commit")  # of every cell, beside what it found

Cell = Callable[[], dict[str, Any]]
T = TypeVar("T")


@contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a file's lock; it goes with the process, however that ends."""
    with path.open("a+") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also of what was forked meanwhile


@dataclass
class Part:
    """What a part was told, and what it has found so far.

    Attributes:
        out: the file of its results.
        device: that it measures.
        smallest: tiny shapes, to see that all of it works.
        side_by_side: a process for each row; the other parts run at the same time.
        row: the one row of this process; None for all.
        cells: results by name: what was found, ``{"failure": ...}`` or ``{"needs": ...}``. Each
            says by which commit it was found: a later run may add to them by another.
    """

    out: Path
    device: torch.device
    smallest: bool
    side_by_side: bool = False
    row: str | None = None
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def turns(self) -> Turns:
        """On the device, among the processes that write into this folder."""
        of = functools.partial(locked, self.out.with_name("device.lock"))
        return Turns(shared=functools.partial(of, fcntl.LOCK_SH), alone=of)

    def alone(self, find: Cell) -> Cell:
        """The same, with nothing else on the device."""

        def found() -> dict[str, Any]:
            with self.turns.alone():
                return find()

        return found

    def each(self, rows: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        """Rows to measure here. Side by side there are none: each has a process of its own, and
        what those wrote is read when all have ended. If one was killed, so does this one end: the
        part is not done."""
        if self.row not in (None, *rows):
            raise ValueError(f"--row: expected one of {', '.join(rows)}, got {self.row}")
        if not self.side_by_side or self.row is not None:
            yield from ((name, row) for name, row in rows.items() if self.row in (None, name))
            return
        command = [sys.executable, *sys.argv]
        children = [subprocess.Popen([*command, "--row", name]) for name in rows]
        codes = dict(zip(rows, [child.wait() for child in children], strict=True))
        if failed := {name: code for name, code in codes.items() if code}:
            sys.exit(f"rows that ended with an exit code: {failed}")
        self.cells = _cells_of(self.out)

    def has(self, name: str) -> bool:
        """Whether this cell was found before; one that failed, or could not be had, was not."""
        return name in self.cells and not {"failure", "needs"} & self.cells[name].keys()

    def cell(self, name: str, find: Cell) -> None:
        """Find a result and write it, unless it is there; one that fails is told, and no more."""
        if self.has(name):
            print(f"{name}: is there", flush=True)
            return
        begin = time.perf_counter()
        try:
            found = find()
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            found = {"failure": f"{type(error).__name__}: {lines[0]}"}
        self.put(name, {**found, "took_s": round(time.perf_counter() - begin, 2)})

    def put(self, name: str, found: dict[str, Any]) -> None:
        """Write a result down."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.out.with_suffix(".lock")):
            self.cells = {**_cells_of(self.out), name: {**found, "git_commit": git_commit()}}
            self.write(finished=False)
        how = found.get("failure") or found.get("needs") or "found"
        print(f"{name}: {how}", flush=True)

    def needs_cuda(self, name: str, what: str) -> bool:
        """True on CPU, where this cell says what it would do."""
        if self.device.type == "cuda":
            return False
        self.put(name, {"needs": f"needs CUDA: {what}"})
        return True

    def write(self, *, finished: bool, line: str = "") -> None:
        """Write the file, complete or not at all. It is not finished with a cell that failed, or
        that lacks what could be brought to this machine: a library, not a GPU."""
        kinds = {"failure", "needs"} if self.device.type == "cuda" else {"failure"}
        again = any(kinds & found.keys() for found in self.cells.values())
        data = {
            "finished": finished and not again,
            "line": line,
            "smallest": self.smallest,
            "environment": self._environment(),
            "failed": self._failed(),
            "cells": self.cells,
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        beside = self.out.with_suffix(".tmp")
        beside.write_text(json.dumps(data, indent=1) + "\n")
        beside.replace(self.out)

    def _failed(self) -> list[str]:
        """Cells that failed, and variants that failed inside of a cell that was found."""
        failed = []
        for name, found in self.cells.items():
            inside = found.get("variants", {})
            failed += [name] if "failure" in found else []
            failed += [f"{name}: {v}" for v in inside if "failure" in inside[v]]
        return failed

    def _environment(self) -> dict[str, Any]:
        """Without the paths of this machine."""
        command = [f"benchmarks/gpu/{Path(sys.argv[0]).name}", "--device", self.device.type]
        command += ["--smallest"] if self.smallest else []
        command += ["--side-by-side"] if self.side_by_side else []
        return environment(self.device) | {"command": " ".join(["python", *command])}

    def finish(self, line: str) -> None:
        """The end of the part: its one line."""
        if self.row is not None:
            return  # the part has others
        failed = self._failed()
        line += f"; FAILED: {', '.join(failed)}" if failed else ""
        self.write(finished=True, line=line)
        print(line, flush=True)


def part(description: str | None) -> Part:
    """From a part's command line; cells of an earlier run are kept."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--smallest", action="store_true", help="tiny shapes")
    parser.add_argument("--side-by-side", action="store_true", help="a process for each row")
    parser.add_argument("--row", help="this one alone")
    options = parser.parse_args()
    follow(os.getppid())  # or it would go on beside the next run
    torch._dynamo.config.recompile_limit = 64  # the variants share the code of the model
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    how = (options.smallest, options.side_by_side, options.row)
    return Part(options.out, device, *how, _cells_of(options.out))


def _cells_of(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text())["cells"] if path.exists() else {}


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call, when ``repeats`` of them are queued up, after two that are not counted."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(repeats):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / repeats
