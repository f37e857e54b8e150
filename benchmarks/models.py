"""Some fifty real architectures under simplefsdp and under FSDP2, on two gloo ranks.

Tiny sizes, random values, default configurations, nothing downloaded (see models_zoo.py). Each
model takes three AdamW steps in fp32 and is compared with one process (see models_rank.py); every
model under every system runs in a pair of processes of its own, and has a row whatever happens.
The exit code is 1 if FSDP2 trains a model that one of our bucketings does not.

    python benchmarks/models.py
    python benchmarks/models.py --models llama bert --executor aot_eager --bucketing manual
    python benchmarks/models.py --table benchmarks/results/models.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from models_cell import RANKS, Cell, run_cell, server
from models_rows import MODELS
from models_table import missing, print_table, words_of

RESULTS = Path(__file__).parent / "results" / "models.json"
LIBRARIES = ("transformers", "peft", "diffusers", "accelerate")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=list(MODELS),
        metavar="MODEL",
        default=list(MODELS),
        help=f"which; default all: {', '.join(MODELS)}",
    )
    add(
        "--executor",
        choices=("inductor", "regions", "aot_eager"),
        default="inductor",
        help="of ours, and the backend under FSDP2 (inductor for regions); default inductor",
    )
    add(
        "--bucketing",
        nargs="*",
        choices=("auto", "manual", "none"),
        default=["auto", "manual"],
        help="of ours; default auto manual; with no name, only FSDP2 runs",
    )
    add("--no-fsdp2", action="store_true", help="leave FSDP2 + torch.compile out")
    add("--out", type=Path, default=RESULTS, help="results, written as they come")
    add("--resume", action="store_true", help="keep what --out has, and run only what it lacks")
    add("--timeout", type=float, default=600.0, help="seconds for one model under one system")
    add("--logs", type=Path, help="a folder for whole tracebacks")
    add("--table", type=Path, metavar="JSON", help="print the table of these results; run nothing")
    return parser.parse_args(argv)


def start(options: argparse.Namespace) -> dict[str, Any]:
    """The results so far: none, or with ``--resume`` those that are there."""
    import torch
    from models_rank import FORMULA, STEPS
    from report import environment

    if options.resume and options.out.exists():
        found: dict[str, Any] = json.loads(options.out.read_text())
        if found["executor"] != options.executor:
            sys.exit(f"--resume: {options.out} was made with --executor {found['executor']}")
        return found
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            libraries[name] = "not installed"
    return {
        "environment": environment(torch.device("cpu")) | libraries,
        "executor": options.executor,
        "ranks": RANKS,
        "steps": STEPS,
        "optimizer": "AdamW",
        "difference": FORMULA,
        "models": {},
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every cell that is asked for and not there yet."""
    data = start(options)
    systems = [*options.bucketing, *([] if options.no_fsdp2 else ["fsdp2"])]
    context = server()
    for number, name in enumerate(options.models, 1):
        entry = MODELS[name]
        row = data["models"].setdefault(name, {"note": entry.note})
        row["tolerance"] = entry.tolerance
        cells = row.setdefault("systems", {})
        for system in systems:
            if system in cells:
                continue
            began = time.monotonic()
            found = run_cell(context, Cell(name, system, options.executor, options.timeout))
            found["wall_s"] = round(time.monotonic() - began, 1)
            _log(options.logs, f"{name}-{system}", found.pop("trace", ""))
            row["silenced"] = found.pop("silenced", row.get("silenced", []))
            cells[system] = found
            said = words_of(found, entry.tolerance)
            print(f"[{number}/{len(options.models)}] {name} {system}: {said}", flush=True)
            _write(options.out, data)
    return data


def _log(folder: Path | None, name: str, trace: str) -> None:
    if folder is not None and trace:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(trace)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.rename(path)


def main() -> None:
    """The command line."""
    options = parse(sys.argv[1:])
    if options.table is not None:
        data = json.loads(options.table.read_text())
    else:
        data = run(options)
        print(f"written: {options.out}")
    print_table(data)
    sys.exit(bool(missing(data)))


if __name__ == "__main__":
    main()
