"""A sweep as JSON.

Keys: ``version`` 1; ``name`` of the model; ``cluster``; ``bucketing``; ``options`` (how the model
is spread, and what is recomputed; null for a target, which decides by itself); ``axes``, the values
of ``batch``, ``seq`` and ``ranks``; ``traces``, the number of traces that the cells needed;
``cells``, a list of:

- ``batch`` (sequences per rank), ``seq`` (tokens per sequence), ``ranks`` (in all);
- ``fits``, ``binds`` (``memory``, ``wire`` or ``compute``) and ``reason``, a sentence;
- ``step_us``, ``exposed_us``, ``compute_us``, ``wire_us``, ``exposed_share`` of the step;
- ``peak_bytes``, the peak memory of a rank, and ``room_bytes``, what its device has room for;
- ``tokens_per_second_per_rank``, ``tokens_per_second`` of all ranks, ``mfu`` (null if the model's
  operations are not known);
- ``pareto``, true for a cell that fits if no other one of its sequence length is better in one of
  ``tokens_per_second`` and ``tokens_per_second_per_rank``, and at least as good in the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from simplefsdp.inspection.names import over_text, time_text
from simplefsdp.sweep.cells import CellStep
from simplefsdp.sweep.traces import CellSweep

_TOLD = ("fits", "binds", "step_us", "exposed_us", "compute_us", "wire_us")


def sweep_document(
    sweep: CellSweep,
    axes: Mapping[str, Sequence[int]],
    steps: Sequence[CellStep],
    options: Mapping[str, object],
) -> dict[str, Any]:
    """The document of a sweep, which holds all that its page shows."""
    rows = [cell_row(sweep, step) for step in steps]
    front = pareto(rows)
    return {
        "version": 1,
        "name": sweep.model.name,
        "cluster": sweep.cluster.name,
        "bucketing": sweep.bucketing,
        "options": dict(options),
        "axes": {name: list(values) for name, values in axes.items()},
        "traces": len(sweep.traced),
        "cells": [{**row, "pareto": at in front} for at, row in enumerate(rows)],
    }


def cell_row(sweep: CellSweep, step: CellStep) -> dict[str, Any]:
    cell = step.cell
    # Tensor-parallel ranks work on the same tokens.
    tokens = cell.batch * cell.seq / sweep.parallel.tp
    mfu = None
    if sweep.model.flops_per_token is not None:
        done = tokens * sweep.model.flops_per_token(cell.seq)
        dtype = "bfloat16" if sweep.parallel.mixed_precision == "bf16" else "float32"
        mfu = done / (step.step_us * sweep.cluster.peak(dtype).tflops * 1e6)
    each = tokens / step.step_us * 1e6
    return {
        **cell._asdict(),
        "reason": reason(step),
        **{name: getattr(step, name) for name in _TOLD},
        "exposed_share": step.exposed_us / step.step_us,
        "peak_bytes": step.peak_nbytes,
        "room_bytes": step.room_nbytes,
        "tokens_per_second_per_rank": each,
        "tokens_per_second": each * cell.ranks,
        "mfu": mfu,
    }


def reason(step: CellStep) -> str:
    """What limits the speed of a cell, or keeps it from fitting, in a sentence."""
    if not step.fits:
        over = over_text(step.peak_nbytes, step.room_nbytes)
        return f"does not fit: it takes {over} what a device has"
    busy = f"compute {time_text(step.compute_us)}, wire {time_text(step.wire_us)}"
    if step.binds == "wire":
        return f"the wire is busy for longer than compute: {busy}"
    return f"compute hides all of the wire but {time_text(step.exposed_us)}: {busy}"


def pareto(rows: Sequence[Mapping[str, Any]]) -> Collection[int]:
    """Indices of the rows on the Pareto front of their sequence length, as the module's docstring
    defines it."""
    found: set[int] = set()
    best: dict[int, float] = {}
    fitting = [at for at, row in enumerate(rows) if row["fits"]]
    speed, each = "tokens_per_second", "tokens_per_second_per_rank"
    for at in sorted(fitting, key=lambda at: (-rows[at][speed], -rows[at][each])):
        row = rows[at]
        if row[each] > best.get(row["seq"], 0.0):
            best[row["seq"]] = row[each]
            found.add(at)
    return found
