"""What ``scale.py`` says: a table per cell, a summary against the targets, published figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from scale_cells import Cell
from scale_variants import Outcome

from inductor_passes.machine.cluster import Cluster

GIB = 1 << 30
AUTO_TO_BOUND, PUBLISHED_WITHIN, PLAN_S = 1.03, 0.15, 10.0


class Published(NamedTuple):
    """A figure of a peer's (design notes, section 6), Llama 3 8B on H100, 8192 tokens.

    Attributes:
        who: ran it.
        variant: of ours that comes nearest.
        ranks, batch: of the cell.
        checkpointing: what may have been checkpointed: it is known of torchtitan's only.
        tokens_per_s: of a GPU.
        peak_gib: of memory, None if unknown.
    """

    who: str
    variant: str
    ranks: int
    batch: int
    checkpointing: tuple[str, ...]
    tokens_per_s: float
    peak_gib: float | None


_UNKNOWN = ("full", "selective")
PUBLISHED = (
    Published("FSDP2 eager", "fsdp2", 8, 1, _UNKNOWN, 7380, 47.8),
    Published("FSDP2 eager", "fsdp2", 64, 1, _UNKNOWN, 5097, 31.4),
    Published("an earlier SimpleFSDP", "torch_manual", 8, 1, _UNKNOWN, 7227, 41.0),
    Published("an earlier SimpleFSDP", "torch_manual", 64, 1, _UNKNOWN, 4984, 29.4),
    Published("torchtitan, FSDP2 eager", "fsdp2", 8, 2, ("selective",), 5762, None),
    Published("torchtitan, FSDP2 compiled", "torch_manual", 8, 2, ("selective",), 6667, None),
)


def as_row(
    cell: Cell, cluster: Cluster, found: dict[str, Outcome | str], timing: dict[str, Any]
) -> dict[str, Any]:
    """One cell on one cluster, as plain data."""
    bound = found["bound"]
    assert isinstance(bound, Outcome)
    variants = {
        name: _failure(outcome)
        if isinstance(outcome, str)
        else _figures(outcome, cell, cluster, bound)
        for name, outcome in found.items()
        if name != "bound"
    }
    return {
        **dataclasses.asdict(cell),
        "cluster": cluster.name,
        "memory_gb": cluster.memory_gb,
        "tokens_per_gpu": cell.tokens,
        "timing": timing,
        "lower_bound_ms": bound.step_us / 1e3,
        "variants": variants,
    }


def _failure(why: str) -> dict[str, Any]:
    return {"failure": why}


def _figures(outcome: Outcome, cell: Cell, cluster: Cluster, bound: Outcome) -> dict[str, Any]:
    peak = cluster.peak("bfloat16").tflops
    return {
        "step_ms": outcome.step_us / 1e3,
        "exposed_ms": outcome.exposed_us / 1e3,
        "to_bound": outcome.step_us / bound.step_us,
        "peak_gb": outcome.peak_nbytes / 1e9,
        "fits": outcome.peak_nbytes <= cluster.memory_gb * 1e9,
        "peak_by_use_gb": {use: nbytes / 1e9 for use, nbytes in outcome.peak_by_use.items()},
        "tokens_per_s_per_gpu": cell.tokens / outcome.step_us * 1e6,
        "mfu": cell.flops / (outcome.step_us * peak * 1e6),
        "collectives": outcome.collectives,
        "plan_s": outcome.plan_s,
    }


def title(row: dict[str, Any]) -> str:
    """A cell in words."""
    layers = "" if row["layers"] is None else f", {row['layers']} layers only"
    checkpointing = "" if row["checkpointing"] == "full" else f", {row['checkpointing']} AC"
    return (
        f"{row['model']} on {row['ranks']} {row['cluster']} ({row['layout']}), "
        f"batch {row['batch']}{checkpointing}{layers}"
    )


def print_cell(row: dict[str, Any]) -> None:
    """The table of one row."""
    timing = row["timing"]
    table = Table(
        title=f"{title(row)}: lower bound {row['lower_bound_ms']:.1f} ms; traced in "
        f"{timing['trace_s']:.0f} s, priced in {timing['price_s']:.0f} s, "
        f"{timing['peak_rss_gb']:.1f} GB here",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("variant")
    headers = ("step ms", "exposed ms", "/ bound", "peak GB", "tokens/s/GPU", "MFU", "gathers")
    for header in (*headers, "reduces", "plan s"):
        table.add_column(header, justify="right")
    for name, v in row["variants"].items():
        table.add_row(name, *([v["failure"][:100]] if "failure" in v else _cells(v)))
    Console(width=130, highlight=False).print(table)


def _cells(v: dict[str, Any]) -> list[str]:
    mark = "" if v["fits"] else " > device"
    return [
        f"{v['step_ms']:.1f}",
        f"{v['exposed_ms']:.1f}",
        f"{v['to_bound']:.3f}",
        f"{v['peak_gb']:.1f}{mark}",
        f"{v['tokens_per_s_per_gpu']:.0f}",
        f"{v['mfu']:.1%}",
        str(v["collectives"]["gather"]),
        str(v["collectives"]["reduce"] + v["collectives"]["all_reduce"]),
        f"{v['plan_s']:.1f}",
    ]


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted over published, where the grid has the cell; whole models only."""
    return [
        _ratios(figure, row)
        for figure in PUBLISHED
        for row in rows
        if (row["model"], row["cluster"], row["layout"], row["layers"]) == _THEIRS
        and (row["ranks"], row["batch"]) == (figure.ranks, figure.batch)
        and row["checkpointing"] in figure.checkpointing
        and "step_ms" in row["variants"].get(figure.variant, {})
    ]


_THEIRS = ("8b", "h100", "shard", None)


def _ratios(figure: Published, row: dict[str, Any]) -> dict[str, Any]:
    v = row["variants"][figure.variant]
    ratio, gib = v["tokens_per_s_per_gpu"] / figure.tokens_per_s, v["peak_gb"] * 1e9 / GIB
    return {
        **figure._asdict(),
        "checkpointing": row["checkpointing"],
        "predicted_tokens_per_s": v["tokens_per_s_per_gpu"],
        "ratio": ratio,
        "within_15_percent": abs(ratio - 1) <= PUBLISHED_WITHIN,
        "predicted_peak_gib": gib,
        "peak_ratio": gib / figure.peak_gib if figure.peak_gib else None,
    }


def misses(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where a target is not met, in words."""
    for row in rows:
        v = {name: found for name, found in row["variants"].items() if "failure" not in found}
        auto = v.get("auto")
        if auto is None:
            yield f"{title(row)}: auto was not priced"
            continue
        if auto["to_bound"] > AUTO_TO_BOUND:
            room = v.get("auto_room")
            told = "" if room is None else f"; with the device's memory {room['to_bound']:.3f}"
            yield f"{title(row)}: auto takes {auto['to_bound']:.3f} x the bound{told}"
        for name in ("torch_auto", "greedy"):
            if name not in v:
                yield f"{title(row)}: {name}, to compare with, was not priced"
            # A microsecond is below what the floats of a simulation agree to.
            if name in v and auto["exposed_ms"] > v[name]["exposed_ms"] + 1e-3:
                yield (
                    f"{title(row)}: auto exposes {auto['exposed_ms']:.1f} ms, {name} "
                    f"{v[name]['exposed_ms']:.1f} (steps {auto['step_ms']:.1f}, "
                    f"{v[name]['step_ms']:.1f})"
                )
        if auto["plan_s"] > PLAN_S:
            yield f"{title(row)}: planning took {auto['plan_s']:.1f} s here"


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """Targets that are missed, and predictions beside published figures."""
    print(f"targets missed in {len(rows)} cells:")
    print("\n".join(f"  {line}" for line in misses(rows)) or "  none")
    for c in compared(rows):
        memory = f", peak {c['predicted_peak_gib']:.1f} GiB"
        memory += f" / {c['peak_gib']} = {c['peak_ratio']:.2f}" if c["peak_gib"] else ""
        print(
            f"{c['who']}, {c['ranks']} H100, batch {c['batch']}, if {c['checkpointing']} AC "
            f"({c['variant']}): predicted "
            f"{c['predicted_tokens_per_s']:.0f} / published {c['tokens_per_s']:.0f} tokens/s/GPU "
            f"= {c['ratio']:.2f}{'' if c['within_15_percent'] else ', BEYOND 15 %'}{memory}"
        )
