"""Part f: whole training steps, with clipping and AdamW: one program, or apart; FSDP2 beside it."""

from __future__ import annotations

import statistics
from typing import Any

from ledger import Part, part
from measured import on_wire
from rows import Row
from transfers import link
from whole_step import measured
from workloads import disconnect, rows, use_calibration

VARIANTS = ("fsdp2_eager", "fsdp2_compiled", "fsdp2_compiled_update")
VARIANTS += ("auto", "auto_update", "step_manual", "step_auto")
SMALLEST = ("fsdp2_eager", "step_manual")


def steps(run: Part, row: Row) -> dict[str, Any]:
    """As ``whole_step.py`` compares them."""
    link.blocks = 1
    try:
        load, _ = on_wire(row, run.device)
        names, rounds = (SMALLEST, 1) if run.smallest else (VARIANTS, 9)
        return {"variants": measured(load, names, rounds, 1 if run.smallest else 2, run.turns)}
    finally:
        disconnect()


def told(variants: dict[str, Any]) -> str:
    """FSDP2's steps over the one program's."""
    step = {name: statistics.median(found["step_s"]) for name, found in variants.items()}
    ours = "step_auto" if "step_auto" in step else "step_manual"
    rivals = [name for name in step if name != ours]
    return ", ".join(f"{rival} / {ours} {step[rival] / step[ours]:.2f}" for rival in rivals)


def measure(run: Part) -> None:
    """The part."""
    use_calibration(run)
    for name, row in run.each(rows(run)):
        run.cell(name, lambda r=row: steps(run, r))
    found = {name: cell["variants"] for name, cell in run.cells.items() if "variants" in cell}
    run.finish("; ".join(f"{name}: {told(variants)}" for name, variants in found.items()))


if __name__ == "__main__":
    measure(part(__doc__))
