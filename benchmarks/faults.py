"""What becomes of a training run when something goes wrong: one table.

Faults are injected from outside: signals, files, full disks, limits, network namespaces. Each row
says what was injected where, what should come of it, what did, how long it took to end, the last
line that the user reads, and how many steps were lost; many are resumed afterwards and compared
with a run that nothing happened to. The exit code is 1 if a row is not as it should be.

    python benchmarks/faults.py
    python benchmarks/faults.py --only sigterm kill_rank_one
    python benchmarks/faults.py --table benchmarks/results/faults.json
    python benchmarks/faults.py --soak 30
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faults_disk  # noqa: F401  (its rows, as those of the next)
import faults_files  # noqa: F401
import faults_hosts  # noqa: F401
import faults_limits  # noqa: F401
import faults_ranks  # noqa: F401
import faults_saves  # noqa: F401
import faults_signals  # noqa: F401
import torch
from faults_rows import FAULTS, Outcome, Table
from faults_soak import soak
from report import environment

RESULTS = Path(__file__).parent / "results" / "faults.json"


def parse(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(FAULTS), metavar="FAULT", help="these faults only")
    add("--list", action="store_true", help="list the faults, and do nothing")
    add("--table", type=Path, help="print the table of an earlier run")
    add("--json", type=Path, help=f"write the rows here, beside others (all: {RESULTS.name})")
    add("--soak", type=float, metavar="MINUTES", help="a fault every so often, for so long")
    add("--every-s", type=float, default=60.0, help="of --soak: seconds between faults")
    add("--folder", type=Path, help="where the runs are made; default: a temporary folder")
    return parser.parse_args(argv)


def run_rows(names: list[str], folder: Path | None, target: Path | None) -> list[Outcome]:
    """A row for each fault, told and written as it comes; those of other faults there stay."""
    table, rows, here = Table(folder), [], environment(torch.device("cpu"))
    old = json.loads(target.read_text())["rows"] if target and target.exists() else []
    made = {row["fault"]: row for row in old}
    for name in names:
        began = time.monotonic()
        row = table.row(FAULTS[name])
        print(f"{name}: {row.outcome}  [{time.monotonic() - began:.0f} s]", flush=True)
        if row.problems:
            print(f"    {row.last_line}")
        rows.append(row)
        made[row.fault] = {**dataclasses.asdict(row), "git_commit": here["git_commit"]}
        if target:
            write({"environment": here, "rows": in_order(made)}, target)
    table.close()
    return rows


def in_order(made: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of the faults."""
    return [made[this.name] for this in FAULTS.values() if this.name in made]


def write(found: dict[str, Any], target: Path) -> None:
    """Write what was found, in a way that differs little from run to run."""
    target.write_text(json.dumps(found, indent=1) + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    """The table, for people."""
    from rich.console import Console
    from rich.table import Table as Printed

    columns = ("fault", "where", "expected", "outcome", "seconds_to_exit", "lost_steps")
    printed = Printed(*(name.replace("_", " ") for name in columns), "last line")
    for row in rows:
        told = ["" if row[name] is None else str(row[name]) for name in columns]
        printed.add_row(*told, row["last_line"][:100])
    console = Console(width=220)
    console.print(printed)
    of = {
        kind: sum(bool(row[kind]) for row in rows) for kind in ("hang", "silent_loss", "traceback")
    }
    as_expected = sum(row["outcome"] == "as expected" for row in rows)
    skipped = sum(row["outcome"].startswith("skipped") for row in rows)
    console.print(
        f"{len(rows)} faults: {as_expected} as expected, {skipped} skipped; {of['hang']} hangs, "
        f"{of['silent_loss']} silent losses, {of['traceback']} tracebacks"
    )


def run_soak(options: argparse.Namespace) -> int:
    """The exit code: 1 if something was lost, hung or grew."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="simplefsdp-soak-"))
    found: dict[str, Any] = {}
    for found in soak(options.soak, folder, options.every_s):
        if options.json:
            write({"environment": environment(torch.device("cpu")), **found}, options.json)
    print(json.dumps(found, indent=1))
    flat = found["flat"] and found["calm"]["flat"]
    return 1 if found["problems"] or found["other_losses"] or not flat else 0


def main(argv: list[str]) -> int:
    """Make the table; the exit code."""
    options = parse(argv)
    if options.list:
        print("\n".join(f"{name}: {this.where}: {this.expected}" for name, this in FAULTS.items()))
        return 0
    if options.table:
        print_table(json.loads(options.table.read_text())["rows"])
        return 0
    if options.soak:
        return run_soak(options)
    target = options.json or (None if options.only else RESULTS)
    rows = run_rows(options.only or list(FAULTS), options.folder, target)
    print_table([dataclasses.asdict(row) for row in rows])
    return 1 if any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
