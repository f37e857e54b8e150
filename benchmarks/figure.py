"""The bar chart of RESULTS.md, as SVG, from the results of ``step.py``.

    python benchmarks/figure.py --out benchmarks/results/step.svg default latency_bound bf16

One panel per row of the grid: a bar per variant, its length the median step; the pale end is the
time that waits slept, the dashed line the limit. Nothing is computed here.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

PANEL_WIDTH, BAR, GAP, TOP, NAMES, VALUES = 480, 16, 7, 46, 116, 132
LABELS = {
    "floor": "no communication",
    "ddp": "DDP",
    "fsdp2_eager": "FSDP2 eager",
    "fsdp2_compiled": "FSDP2 compiled",
    "none": "simplefsdp none",
    "manual": "simplefsdp manual",
    "manual_split": "manual, finer ends",
    "torch_manual": "torch manual",
    "torch_auto": "torch auto",
}
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 13px; font-weight: 600 }
  .dim { fill: #57606a }
  .bar { fill: #8c959f } .bar.own { fill: #0969da }
  .slept { opacity: .4 }
  .limit { stroke: #cf222e; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .dim { fill: #8d96a0 } .bar { fill: #6e7681 } .bar.own { fill: #4493f8 }
  }
"""


def draw(results: list[dict[str, Any]], columns: int = 2) -> str:
    """The chart of ``results``, each the JSON of one run, as the text of an SVG file."""
    panels = [_panel(result) for result in results]
    columns = min(columns, len(panels))
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    body, y = [], 24
    for row in rows:
        for column, (panel, _) in enumerate(row):
            body.append(f'<g transform="translate({column * PANEL_WIDTH + 12} {y})">{panel}</g>')
        y += max(height for _, height in row) + 18
    environment = results[0]["environment"]
    foot = (
        "forward and backward, median; pale: waiting for the wire",
        "dashed: the limit, max(compute, wire) + first gather + last reduce",
        f"torch {environment['torch']}, {environment['cpu']}, {environment['threads']} threads, "
        "modelled wire",
    )
    for line in foot:
        body.append(f'<text class="dim" x="12" y="{y}">{html.escape(line)}</text>')
        y += 15
    width = columns * PANEL_WIDTH + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}">'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _panel(result: dict[str, Any]) -> tuple[str, int]:
    """One run and its height in pixels."""
    variants = {n: v for n, v in result["variants"].items() if n in LABELS}
    ran = {n: v for n, v in variants.items() if "failure" not in v}
    limit = result["limit"]["total_s"]
    scale = (PANEL_WIDTH - NAMES - VALUES) / max(limit, *(v["step_s"] for v in ran.values()))
    parts = [_title(result)]
    for index, name in enumerate(n for n in LABELS if n in variants):
        y = TOP + index * (BAR + GAP)
        parts.append(f'<text x="0" y="{y + 12}">{LABELS[name]}</text>')
        parts.append(_bar(name, ran.get(name), y, scale))
    height = TOP + len(variants) * (BAR + GAP)
    x = NAMES + limit * scale
    parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height}"/>')
    return "".join(parts), height


def _title(result: dict[str, Any]) -> str:
    s, link = result["settings"], result["link"]
    detail = (
        f"{s['layers']} layers, d={s['dim']}, {s['batch']} x {s['seq_len']} tokens, {s['dtype']}, "
        f"{s['world_size']} ranks, {link['bandwidth_gb_s']:.2g} GB/s, {link['latency_us']:.0f} us"
    )
    name = result["row"].replace("_", " ")
    return (
        f'<text class="title" x="0" y="10">{html.escape(name)}</text>'
        f'<text class="dim" x="0" y="27">{html.escape(detail)}</text>'
    )


def _bar(name: str, variant: dict[str, Any] | None, y: int, scale: float) -> str:
    if variant is None:
        return f'<text class="dim" x="{NAMES}" y="{y + 12}">did not run</text>'
    step, slept = variant["step_s"], min(variant["exposed_s"], variant["step_s"])
    own = " own" if name == "manual" else ""
    busy, end = (step - slept) * scale, NAMES + step * scale
    return (
        f'<rect class="bar{own}" x="{NAMES}" y="{y}" width="{busy:.1f}" height="{BAR}"/>'
        f'<rect class="bar slept{own}" x="{NAMES + busy:.1f}" y="{y}" '
        f'width="{slept * scale:.1f}" height="{BAR}"/>'
        f'<text x="{end + 5:.1f}" y="{y + 12}">{step:.2f} s, {variant["to_limit"]:.2f} x limit'
        "</text>"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="rows of the grid, or JSON files; default: all")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "step.svg", help="default: %(default)s"
    )
    parser.add_argument("--columns", type=int, default=2, help="panels side by side")
    args = parser.parse_args()
    paths = [Path(r) if r.endswith(".json") else RESULTS / f"step_{r}.json" for r in args.rows]
    paths = paths or sorted(RESULTS.glob("step_*.json"))
    missing = [str(path) for path in paths if not path.exists()]
    if missing or not paths:
        sys.exit(f"no results at {', '.join(missing) or RESULTS}: run benchmarks/step.py first")
    args.out.write_text(draw([json.loads(path.read_text()) for path in paths], args.columns))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
