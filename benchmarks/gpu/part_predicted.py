"""Part d: predicted against measured: steps, exposed time, peak memory; then bucket by bucket."""

from __future__ import annotations

from typing import Any

import predict
from ledger import Part, part
from measured import on_wire, step_of
from rows import Row
from workloads import disconnect, rows, use_calibration

import simplefsdp


def steps(run: Part, name: str, row: Row) -> dict[str, Any]:
    """As ``predict.py`` compares them."""
    names = ["manual"] if run.smallest else ["none", "manual", "auto"]
    try:
        found = predict.run(name, row, names, 2 if run.smallest else 7, run.device, run.turns)
        del found["environment"]  # it is the file's
        return found
    finally:
        disconnect()


def buckets(run: Part, variant: str, row: Row) -> dict[str, Any]:
    """Of one variant, as ``measured.py`` compares them."""
    try:
        with run.turns.shared():
            load, cluster = on_wire(row, run.device)
            with simplefsdp.inspect(cluster) as report:
                step = step_of(load, variant)
                step()
        with run.turns.alone():
            return report.measure(step, 1 if run.smallest else 5).to_json()
    finally:
        disconnect()


def told(found: dict[str, Any]) -> str:
    """The errors of the predictions, of each variant."""
    return ", ".join(
        f"{name}: step {v['step_s']['error']:+.0%}, memory {v['step_nbytes']['error']:+.0%}"
        for name, v in found.get("variants", {}).items()
        if "step_s" in v
    )


def measure(run: Part) -> None:
    """The part."""
    use_calibration(run)
    for name, row in run.each(rows(run)):
        run.cell(f"{name}, steps", lambda n=name, r=row: steps(run, n, r))
        for variant in ("manual",) if run.smallest else ("manual", "auto"):
            what = f"{name}, buckets of {variant}"
            run.cell(what, lambda v=variant, r=row: buckets(run, v, r))
    lines = [
        f"{name.removesuffix(', steps')}: {told(found)}"
        for name, found in run.cells.items()
        if name.endswith(", steps")
    ]
    run.finish("predicted against measured, " + "; ".join(lines))


if __name__ == "__main__":
    measure(part(__doc__))
