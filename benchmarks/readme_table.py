"""The tables of the README, as Markdown, from the results of ``step.py`` and ``two_hosts.py``.

    python benchmarks/readme_table.py default long_sequence
    python benchmarks/readme_table.py --summary

Nothing is computed here but ratios and MiB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rows import ROWS

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20


def table(result: dict[str, Any]) -> str:
    """One row of the grid, a line per variant."""
    lines = [
        "| variant | step s | / limit | FSDP2 eager / this | FSDP2 compiled / this | exposed s | "
        "gathers + reduces | above the floor, MiB | total, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, v in result["variants"].items():
        if "step_s" in v:
            lines.append(f"| {name} | " + " | ".join(_cells(v)) + " |")
    return "\n".join(lines)


def _cells(v: dict[str, Any]) -> list[str]:
    ratios = [v.get(f"fsdp2_{how}_over_this") for how in ("eager", "compiled")]
    memory = v["memory_nbytes"]
    return [
        f"{v['step_s']:.3f}",
        f"{v['to_limit']:.2f}",
        *(f"{r:.2f}" if r else "" for r in ratios),
        f"{v['exposed_s']:.3f}",
        str(sum(v["collectives"].values())),
        f"{memory['above_floor'] / MIB:.0f}",
        f"{memory['total_peak'] / MIB:.0f}",
    ]


def summary() -> str:
    """All rows of the grid that there are results of, a line each, by the variant manual."""
    lines = [
        "| row | / limit | FSDP2 eager / manual | FSDP2 compiled / manual | torch's manual pass / "
        "manual | torch's auto pass / manual | above the floor, MiB (FSDP2 eager's) | "
        "total / FSDP2 eager's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        path = RESULTS / f"step_{row}.json"
        if path.exists():
            variants = json.loads(path.read_text())["variants"]
            lines.append(f"| {row} | " + " | ".join(_summary_cells(variants)) + " |")
    return "\n".join(lines)


def _summary_cells(variants: dict[str, Any]) -> list[str]:
    manual, eager = variants["manual"], variants["fsdp2_eager"]
    others = ("fsdp2_eager", "fsdp2_compiled", "torch_manual", "torch_auto")
    steps = [variants[name].get("step_s") for name in others]
    ours, theirs = manual["memory_nbytes"], eager["memory_nbytes"]
    return [
        f"{manual['to_limit']:.2f}",
        *(f"{s / manual['step_s']:.2f}" if s else "failed" for s in steps),
        f"{ours['above_floor'] / MIB:.0f} ({theirs['above_floor'] / MIB:.0f})",
        f"{ours['total_peak'] / theirs['total_peak']:.2f}",
    ]


def main() -> None:
    """Print the table of each row named on the command line, or the summary of all."""
    if sys.argv[1:] == ["--summary"]:
        print(summary())
        return
    for name in sys.argv[1:]:
        result = json.loads((RESULTS / f"step_{name}.json").read_text())
        environment = result["environment"]
        print(f"**{name}**: torch {environment['torch']}, {environment['cpu']}\n")
        print(table(result) + "\n")


if __name__ == "__main__":
    main()
