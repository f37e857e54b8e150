"""The matrix as a table for people, and what it says in one line per system."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def trains(cell: dict[str, Any], tolerance: float) -> bool:
    """Whether a model trained with the gradients of the reference.

    Where rounding alone moves the reference by more than the tolerance, ten times as much is
    allowed: another order of sums is rounded in other places.
    """
    if "error" in cell or cell["absent_differs"]:
        return False
    noise = cell["rounding"] or 0.0
    allowed = 10 * noise if noise > tolerance else tolerance
    return cell["gradient"] <= allowed and cell["loss"] <= allowed


def words_of(cell: dict[str, Any], tolerance: float) -> str:
    """A cell in one line."""
    if "error" in cell:
        return f"FAILED at {cell.get('at', '?')}: {cell['error'][:200]}"
    verdict = "trains" if trains(cell, tolerance) else "DIFFERS"
    absent = "".join(
        f", {len(cell[key])} gradients {what}"
        for key, what in (("absent_differs", "of one side only"), ("zero_for_absent", "0 for none"))
        if cell[key]
    )
    noise = cell["rounding"] or 0.0
    rounding = f" of {noise:.1e} by rounding alone" if noise > tolerance else ""
    return (
        f"{verdict}, gradients {cell['gradient']:.1e}{rounding} ({cell['gradient_of']}), loss "
        f"{cell['loss']:.1e}{absent}, {cell['graphs']} graphs, "
        f"{cell['breaks']} breaks, {_launches(cell)}{cell['compile_s']:.1f} s compiling"
    )


def _launches(cell: dict[str, Any]) -> str:
    if "collectives" not in cell:
        return ""
    before, after = cell["collectives"], cell["buckets"]
    return ", ".join(f"{before[kind]} {kind}s -> {after[kind]}" for kind in before) + ", "


def missing(data: dict[str, Any]) -> list[str]:
    """What FSDP2 trains and a system of ours does not: ``model (system)``."""
    found = []
    for name, row in data["models"].items():
        cells, tolerance = row["systems"], row["tolerance"]
        if "fsdp2" in cells and trains(cells["fsdp2"], tolerance):
            ours = (system for system in cells if system != "fsdp2")
            found += [f"{name} ({s})" for s in ours if not trains(cells[s], tolerance)]
    return found


def print_table(data: dict[str, Any]) -> None:
    """The table, the errors under it, and how many models train."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    systems = list(dict.fromkeys(s for row in data["models"].values() for s in row["systems"]))
    env = data["environment"]
    console.print(
        f"\n{data['ranks']} gloo ranks, {data['steps']} {data['optimizer']} steps, "
        f"{data['executor']}; torch {env['torch']}, transformers {env['transformers']}, peft "
        f"{env['peft']}, diffusers {env['diffusers']}; {env['cpu']}, {env['cores']} cores, "
        f"{env['date']}, commit {env['git_commit']}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for system in systems:
        for column in (system, "graphs", "breaks", *([] if system == "fsdp2" else _COUNTS), "s"):
            table.add_column(column, justify="right", no_wrap=True)
    for name, row in data["models"].items():
        cells = [_cells(row["systems"].get(s), s, row["tolerance"]) for s in systems]
        table.add_row(name, *(text for texts in cells for text in texts))
    console.print(table)
    console.print(
        "Under each system: largest difference of gradients (or how it failed), graphs, breaks, "
        "collectives before -> after the passes, wall seconds of compiling. Difference: "
        f"{data['difference']}."
    )
    _print_summary(console, data, systems)


_COUNTS = ("gathers", "reduces")


def _cells(cell: dict[str, Any] | None, system: str, tolerance: float) -> list[str]:
    counts = [] if system == "fsdp2" else ["", ""]
    if cell is None:
        return ["-", "", "", *counts, ""]
    graphs = [str(cell.get("graphs", "")), str(cell.get("breaks", ""))]
    if "error" in cell:
        return ["[red]fails[/]", *graphs, *counts, ""]
    if counts:
        before, after = cell["collectives"], cell["buckets"]
        counts = [_change(before, after, ("gather",)), _change(before, after, _REDUCES)]
    colour = "green" if trains(cell, tolerance) else "red"
    return [f"[{colour}]{cell['gradient']:.0e}[/]", *graphs, *counts, f"{cell['compile_s']:.1f}"]


_REDUCES = ("reduce", "all_reduce")


def _change(before: dict[str, int], after: dict[str, int], kinds: tuple[str, ...]) -> str:
    return "{} -> {}".format(*(sum(of.get(kind, 0) for kind in kinds) for of in (before, after)))


def _print_summary(console: Console, data: dict[str, Any], systems: list[str]) -> None:
    for name, row in data["models"].items():
        for system, cell in row["systems"].items():
            if not trains(cell, row["tolerance"]):
                said = escape(words_of(cell, row["tolerance"]))
                console.print(f"[red]{name}[/] {system}: {said}", soft_wrap=True)
    for system in systems:
        rows = [row for row in data["models"].values() if system in row["systems"]]
        good = sum(trains(row["systems"][system], row["tolerance"]) for row in rows)
        console.print(f"{system}: {good} of {len(rows)} train")
    if lacking := missing(data):
        console.print(f"trained by FSDP2 and not by us: {', '.join(lacking)}", soft_wrap=True)
