"""The tables of the README, as Markdown, from the results of ``step.py`` and ``two_hosts.py``.

    python benchmarks/readme_table.py default long_sequence

Nothing is computed here but ratios and MiB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def main() -> None:
    """Print the table of each row named on the command line."""
    for name in sys.argv[1:]:
        result = json.loads((RESULTS / f"step_{name}.json").read_text())
        environment = result["environment"]
        print(f"**{name}**: torch {environment['torch']}, {environment['cpu']}\n")
        print(table(result) + "\n")


if __name__ == "__main__":
    main()
