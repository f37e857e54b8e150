"""Reports on plans, and on a sweep, as one HTML page that loads no other files."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from simplefsdp.compiler.size_limits import describe_range
from simplefsdp.inspection.document import bucket_document, plan_document
from simplefsdp.inspection.names import block_of, shorten_blocks, time_text
from simplefsdp.inspection.report import GraphReport, PlanReport
from simplefsdp.version import __version__
from simplefsdp.words import counted, plural

_ASSETS = Path(__file__).parent / "assets"
_MOST_SPANS = 1500
"""Up to so many compute ops of a graph are drawn one by one; if there are more, by module."""
_MOST_POINTS = 1500
_MOST_NAMES = 20
_SHOWN = ("kind", "bytes", "dtype", "ranks", "duration_us", "exposed_us", "reason", "why")
_TIMES = ("launch_us", "begin_us", "end_us", "needed_us")
_OF_PLANS = ("report.html", "report.css", "report.js")
_OF_A_SWEEP = ("sweep.html", "sweep.css", "sweep_cells.js", "sweep_map.js", "sweep.js")


def page(plans: Sequence[PlanReport], title: str) -> str:
    """The page of plans: timelines, memory and tables. Most of its 5 MB is the plotting library."""
    hint = "drag to zoom, double-click to see all; a row shows its bucket"
    return filled(_OF_PLANS, title, hint, {"plans": [_plan(plan) for plan in plans]})


def sweep_page(document: Mapping[str, Any]) -> str:
    """The page of a sweep: maps of its cells. It holds the whole of ``document``."""
    title = f"{document['name']} on {document['cluster']}: what fits, and how fast"
    hint = "a cell tells why: point at it, tap it, or use the arrow keys"
    return filled(_OF_A_SWEEP, title, hint, document)


def filled(own: Sequence[str], title: str, hint: str, report: object) -> str:
    """A page: the frame of all pages, with the HTML, style and scripts of the files ``own``, and
    the report that they draw.

    The report is embedded as JSON in which no name can end the script or open a comment.
    """
    from plotly.offline import get_plotlyjs

    def text(suffix: str, files: Iterable[str]) -> str:
        return "".join((_ASSETS / name).read_text() for name in files if name.endswith(suffix))

    return Template(text(".html", ["page.html"])).substitute(
        title=html.escape(title),
        version=__version__,
        hint=hint,
        css=text(".css", ["page.css", *own]),
        js=text(".js", ["page.js", *own]),
        body=text(".html", own),
        plotly=get_plotlyjs(),
        report=json.dumps(report, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _plan(plan: PlanReport) -> dict[str, Any]:
    at_rest = plan.step.parameters_nbytes + plan.step.optimizer_nbytes
    graphs, compute, buckets, memory = [], [], [], []
    begin_us = 0.0
    for graph in plan.graphs.values():
        graphs.append(_graph(graph, begin_us))
        compute += [[round(us + begin_us, 2), *rest] for us, *rest in _compute(graph)]
        buckets += [{**row, "graph": graph.name} for row in _buckets(graph, begin_us)]
        memory += [[round(us + begin_us, 2), n + at_rest] for us, n in _thinned(graph.memory.curve)]
        begin_us += graph.prediction.timeline.total_us
    if plan.step.optimizer_us:
        compute.append([begin_us, plan.step.optimizer_us, "optimizer"])
        graphs.append({"name": "optimizer", "begin_us": begin_us})
    return {
        **plan_document(plan),
        "graphs": graphs,
        "lanes": list(dict.fromkeys(row["lane"] for row in buckets)),
        "compute": compute,
        "buckets": buckets,
        "memory": memory,
    }


def _graph(graph: GraphReport, begin_us: float) -> dict[str, Any]:
    prediction = graph.prediction
    causes = ", ".join(f"{name} {time_text(us)}" for name, us in graph.exposed_by_reason().items())
    return {
        "name": graph.name,
        "begin_us": begin_us,
        "summary": (
            f"{counted(graph.collectives.items())} in {plural(len(graph.buckets), 'bucket')}; "
            f"{time_text(prediction.timeline.total_us)}, bound "
            f"{time_text(prediction.lower_bound_us)}, exposed {time_text(prediction.exposed_us)}"
            f"{f' ({causes})' if causes else ''}"
            f"{''.join(f'; {describe_range(found)}' for found in graph.ranges)}"
        ),
        "by_kind": dict(graph.memory.by_kind),
        "by_module": dict(graph.memory.by_module),
    }


def _compute(graph: GraphReport) -> Iterator[tuple[float, float, str]]:
    """Begin, duration and label of each bar on the compute lane."""
    spans = [span for span in graph.prediction.timeline.spans if span.lane == "compute"]
    if len(spans) <= _MOST_SPANS:
        for span in spans:
            module = graph.module_of.get(span.op)
            label = f"{module} ({span.op})" if module else span.op
            yield round(span.begin_us, 2), round(span.end_us - span.begin_us, 2), label
        return
    merged: list[tuple[float, float, str, int]] = []  # begin, end, module, number
    for span in spans:
        module = graph.module_of.get(span.op, "")
        begin, n = span.begin_us, 1
        if merged and merged[-1][2] == module and begin <= merged[-1][1]:
            begin, *_, before = merged.pop()
            n += before
        merged.append((begin, span.end_us, module, n))
    for begin, end, module, n in merged:
        yield round(begin, 2), round(end - begin, 2), f"{module}: {plural(n, 'op')}"


def _buckets(graph: GraphReport, begin_us: float) -> Iterator[dict[str, Any]]:
    """Those facts about each bucket that the page shows; no more, as there may be a thousand."""
    for bucket in graph.buckets:
        found = bucket_document(bucket)
        names, more = bucket.fqns[:_MOST_NAMES], len(bucket.fqns) - _MOST_NAMES
        yield {
            **{name: found[name] for name in _SHOWN},
            **{name: round(found[name] + begin_us, 3) for name in _TIMES},
            "parameters": ", ".join(names) + (f" and {more} more" if more > 0 else ""),
            "what": bucket.parameters,
            "lane": f"wire {bucket.ranks} ({bucket.group})",
            "hidden_by": shorten_blocks(sorted(map(block_of, bucket.hidden_by[:3]))),
        }


def _thinned(curve: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The curve with about ``_MOST_POINTS`` points at most: the maximum of each stretch of time."""
    if len(curve) <= _MOST_POINTS:
        yield from curve
        return
    stretch = curve[-1][0] / _MOST_POINTS
    for _, points in groupby(curve, key=lambda point: point[0] // stretch):
        times, sizes = zip(*points, strict=True)
        yield times[0], max(sizes)
