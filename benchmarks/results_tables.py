"""The tables of ``RESULTS.md``, from the results of the other scripts.

    python benchmarks/results_tables.py                # write them all anew into RESULTS.md
    python benchmarks/results_tables.py default        # print one: a row of step.py,
    python benchmarks/results_tables.py --summary      # all rows,
    python benchmarks/results_tables.py --scale        # the clusters of scale.py,
    python benchmarks/results_tables.py --regions      # by regions against the whole graph,
    python benchmarks/results_tables.py --compiling    # compile_time.py
    python benchmarks/results_tables.py --gpu          # the modelled wire on a GPU
    python benchmarks/results_tables.py --gpu-compiling # compile_time.py there
    python benchmarks/results_tables.py --accumulation # micro-batches
    python benchmarks/results_tables.py --whole-step   # whole_step.py

Nothing is computed here but ratios and MiB.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
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
    """All rows of the grid that there are results of, a line each, by the variant auto."""
    lines = [
        "| row | auto / limit | manual / limit | manual / auto | FSDP2 eager / auto | "
        "FSDP2 compiled / auto | torch's manual pass / auto | torch's auto pass / auto | "
        "exposed s: auto, manual, torch's auto pass | step's MiB: auto, manual, FSDP2 eager |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        path = RESULTS / f"step_{row}.json"
        variants = json.loads(path.read_text())["variants"] if path.exists() else {}
        if "step_s" in variants.get("auto", {}):
            lines.append(f"| {row} | " + " | ".join(_summary_cells(variants)) + " |")
    return "\n".join(lines)


def _summary_cells(variants: dict[str, Any]) -> list[str]:
    def of(key: str, *names: str) -> list[float | None]:
        return [variants[name].get(key) for name in names]

    auto_s = variants["auto"]["step_s"]
    others = ("manual", "fsdp2_eager", "fsdp2_compiled", "torch_manual", "torch_auto")
    limits = of("to_limit", "auto", "manual")
    ratios = [s / auto_s if s else None for s in of("step_s", *others)]
    exposed = of("exposed_s", "auto", "manual", "torch_auto")
    memory = of("memory_nbytes", "auto", "manual", "fsdp2_eager")
    return [
        *(f"{ratio:.2f}" if ratio else "failed" for ratio in (*limits, *ratios)),
        ", ".join("-" if s is None else f"{s:.3f}" for s in exposed),
        ", ".join("-" if m is None else f"{m['step_peak'] / MIB:.0f}" for m in memory),
    ]


def regions() -> str:
    """The rows of ``step.py`` by regions against the whole graph: step times and peaks."""
    rows, found = [], {}
    for row in ROWS:
        found = json.loads((RESULTS / f"regions_{row}.json").read_text())
        of = found["variants"]
        pairs = [(of[name], of[f"{name}_regions"]) for name in ("manual", "auto")]
        times = [f"{by['step_s'] / whole['step_s']:.3f}" for whole, by in pairs]
        peaks = [
            ", ".join(f"{v['memory_nbytes']['step_peak'] / MIB:.0f}" for v in p) for p in pairs
        ]
        rows.append([row, *times, *peaks])
    heads = ["row", "manual", "auto", "MiB: manual, by regions", "MiB: auto, by regions"]
    return _where(found) + _lines(heads, rows)


SCALE = ("none", "greedy", "torch_manual", "torch_auto", "fsdp2", "manual", "auto")


def scale() -> str:
    """The cells of ``scale.py``, all checkpointed in full: step / bound, exposed ms, peak GB."""
    lines = [
        "| model, ranks, cluster, batch | bound ms | none | greedy | torch's manual pass | "
        "torch's auto pass | FSDP2 eager | manual | auto | auto: tokens/s/GPU, MFU |",
        "|" + "---|" * 10,
    ]
    rows = json.loads((RESULTS / "scale.json").read_text())["rows"]
    for row in rows:
        if row["checkpointing"] == "full":
            auto = row["variants"]["auto"]
            layout = "" if row["layout"] == "shard" else f" ({row['layout']})"
            cells = [
                f"{row['model'].upper()}{layout}, {row['ranks']} {row['cluster'].upper()}, "
                f"{row['batch']}",
                f"{row['lower_bound_ms']:.0f}",
                *(_scale_cell(row["variants"].get(name)) for name in SCALE),
                f"{auto['tokens_per_s_per_gpu']:.0f}, {auto['mfu']:.1%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _scale_cell(v: dict[str, Any] | None) -> str:
    if v is None:
        return "-"
    if "failure" in v:
        return "failed"
    too_much = "" if v["fits"] else " > device"
    return f"{v['to_bound']:.3f}, {v['exposed_ms']:.0f}, {v['peak_gb']:.1f}{too_much}"


ACCUMULATE = ("accumulate", "accumulate_default", "accumulate_keeps")
LAUNCHES = {"gathers": "gather", "reduces": "reduce", "all-reduces": "all_reduce"}


def accumulation() -> str:
    """The cells of the runs of ``accumulate.py``: steps of several micro-batches on the modelled
    wire, each environment named once."""
    runs = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ACCUMULATE]
    heads = ["row", "mode", "micro-batches", "variant", "step s", "/ limit", "exposed s"]
    rows = []
    for of, cell in ((found["options"]["row"], cell) for found in runs for cell in found["cells"]):
        row = [of, cell["mode"], cell["microbatches"], cell["variant"]]
        if "failure" in cell:
            rows.append([*row, f"failed: {cell['failure']}"])
            continue
        row += [f"{cell[key]:.3f}" for key in ("step_s", "to_limit", "exposed_s")]
        row += [cell["launches"].get(kind, 0) for kind in LAUNCHES.values()]
        sent, peak = sum(cell["nbytes"].values()) / 1e6, cell["peak_nbytes"] / MIB
        error = cell["gradient_error"]
        rows.append([*row, f"{sent:.0f}", f"{peak:.0f}", "" if error is None else f"{error:.1e}"])
    heads = [*heads, *LAUNCHES, "sent MB", "peak MiB", "gradient error"]
    return "".join(dict.fromkeys(map(_where, runs))) + _lines(heads, rows)


def _lines(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    filled = ([*row, *[""] * (len(heads) - len(row))] for row in rows)
    head, *body = (f"| {' | '.join(map(str, line))} |" for line in [heads, *filled])
    return "\n".join([head, "|" + "---|" * len(heads), *body])


def _where(found: dict[str, Any]) -> str:
    environment = found["environment"]
    return f"torch {environment['torch']}, {environment['cpu']}:\n\n"


GPU = RESULTS / "gpu" / "nvidia_h200-torch2.11.0_cu130"


def on_a_gpu() -> str:
    """Part c of the kit in ``gpu/``: steps on the modelled wire, a line per variant and cell."""
    found = json.loads((GPU / "wire.json").read_text())
    rows = []
    for cell, of in sorted(found["cells"].items()):
        for name, v in of.get("variants", {}).items():
            figures = [f"{1e3 * v['step_s']:.1f}", f"{v['to_limit']:.2f}"]
            figures += [
                f"{v[f'fsdp2_{how}_over_this']:.2f}" if name != "floor" else ""
                for how in ("eager", "compiled")
            ]
            seen = v["exposed_s"] is not None  # a replay's transfers cannot be watched
            figures += [f"{1e3 * v['exposed_s']:.1f}" if seen else ""]
            memory = v["memory_nbytes"] or {}
            figures += [f"{memory[key] / MIB:.0f}" for key in ("step_peak", "total_peak") if memory]
            rows.append([cell, name, *figures])
    heads = ["row, blocks", "variant", "step ms", "/ limit", "FSDP2 eager / this"]
    heads += ["FSDP2 compiled / this", "exposed ms", "step's MiB", "total, MiB"]
    return f"{found['environment']['device']}, torch {found['environment']['torch']}:\n\n" + _lines(
        heads, rows
    )


def compiling(path: Path = RESULTS / "compile_time.json") -> str:
    """The cells of ``compile_time.py``, a line per variant."""
    found = json.loads(path.read_text())
    by_variant: dict[str, dict[int, str]] = {}
    for cell in found["cells"]:
        cold, warm = cell["cold"], cell["warm"]
        told = f"{cold['cpu_s']:.1f} ({cold['compiler_s']:.1f}) / {warm['cpu_s']:.1f}"
        by_variant.setdefault(cell["variant"], {})[cell["layers"]] = told
    depths = sorted({cell["layers"] for cell in found["cells"]})
    rows = [[name, *(of.get(n, "") for n in depths)] for name, of in by_variant.items()]
    return _where(found) + _lines(["variant", *(f"{n} layers" for n in depths)], rows)


def whole_step() -> str:
    """The rows that ``whole_step.py`` was run on: whole training steps, with the update."""
    rows, where = [], []
    for path in sorted(RESULTS.glob("whole_step_*.json")):
        found = json.loads(path.read_text())
        where.append(_where(found))
        floor = statistics.median(found["cells"]["floor"]["step_s"])
        for name, cell in found["cells"].items():
            step, exposed = (statistics.median(cell[key]) for key in ("step_s", "exposed_s"))
            sent = " + ".join(str(n) for n in (cell["launches"] or {}).values())
            figures = [f"{step:.3f}", f"{step / floor:.3f}", f"{exposed:.3f}", sent]
            figures += [f"{cell['peak_nbytes'] / MIB:.0f}", f"{cell['losses'][-1]:.5f}"]
            rows.append([path.stem.removeprefix("whole_step_"), name, *figures])
    heads = [
        "row",
        "variant",
        "step s",
        "/ floor",
        "exposed s",
        "launches",
        "peak MiB",
        "last loss",
    ]
    return "".join(dict.fromkeys(where)) + _lines(heads, rows)


def steps_on_a_gpu() -> str:
    """Part f of the kit: whole training steps, with the update."""
    found = json.loads((GPU / "step.json").read_text())
    rows = []
    for row, cell in found["cells"].items():
        variants = cell["variants"]
        steps = {name: statistics.median(v["step_s"]) for name, v in variants.items()}
        for name, v in variants.items():
            figures = [f"{1e3 * steps[name]:.1f}"]
            figures += [
                f"{steps[f'fsdp2_{how}'] / steps[name]:.2f}" for how in ("eager", "compiled")
            ]
            figures += [f"{1e3 * statistics.median(v['exposed_s']):.1f}"]
            figures += [f"{v['peak_nbytes'] / MIB:.0f}", f"{v['losses'][-1]:.4f}"]
            rows.append([row, name, *figures])
    heads = ["row", "variant", "step ms", "FSDP2 eager / this", "FSDP2 compiled / this"]
    return _lines([*heads, "exposed ms", "step's MiB", "last loss"], rows)


OTHERS = {
    "--whole-step": whole_step,
    "--regions": regions,
    "--compiling": compiling,
    "--gpu": on_a_gpu,
    "--gpu-steps": steps_on_a_gpu,
    "--gpu-compiling": lambda: compiling(GPU / "compile_time.json"),
    "--summary": summary,
    "--scale": scale,
    "--accumulation": accumulation,
}


def shown(name: str) -> str:
    """A table, and for a row of ``step.py`` where it was measured.

    Args:
        name: a row that has a result, or one of ``OTHERS``.
    """
    if name in OTHERS:
        return OTHERS[name]()
    result = json.loads((RESULTS / f"step_{name}.json").read_text())
    return _where(result) + table(result)


MARKED = re.compile(
    r"(<!-- python benchmarks/results_tables\.py (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def rewritten(text: str) -> str:
    """``text`` with each marked table made anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{shown(m[2])}\n\n{m[3]}", text)


def main() -> None:
    """Print the tables named on the command line; with none, write all into RESULTS.md."""
    for name in sys.argv[1:]:
        print(shown(name) + "\n")
    if not sys.argv[1:]:
        path = RESULTS.parent / "RESULTS.md"
        path.write_text(rewritten(path.read_text()))


if __name__ == "__main__":
    main()
