"""The report on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from inductor_passes.ir.program import COLLECTIVE_KINDS
from simplefsdp.compiler.size_limits import describe_range
from simplefsdp.inspection.names import block_of, nbytes_text, shorten_blocks, time_text
from simplefsdp.inspection.report import BucketReport, GraphReport, PlanReport
from simplefsdp.inspection.terminal import table_of
from simplefsdp.words import counted, plural

_SENTENCES = 8
_MODULES = 8


def print_plans(out: Console, plans: Sequence[PlanReport], heading: str) -> None:
    """The first plan in full, and all of them side by side if there are several."""
    first, *others = plans
    out.print(f"[bold]{heading}[/bold]")
    out.print(_steps(plans))
    if first.mfu is not None:
        out.print(f"MFU counts operations: {first.flops_are}")
    for graph in first.graphs.values():
        out.print()
        print_graph(out, graph, f"{first.name}, " if others else "")
    out.print()
    out.print(
        f"memory of the step at its peak, {nbytes_text(first.step.peak_nbytes)}, in "
        f"{first.step.peak_graph.name}: {_sizes(first.step.peak_by_use())}"
    )


def print_graph(out: Console, graph: GraphReport, prefix: str = "") -> None:
    """Summary, buckets, reasons and memory of a graph."""
    out.print(f"[bold]{prefix}{graph.name}[/bold]: {_summary(graph)}")
    for found in graph.ranges:
        out.print(describe_range(found), markup=False, soft_wrap=True)
    if graph.buckets:
        out.print(_buckets(graph.buckets))
    for line in _reasons(graph):
        out.print(line, soft_wrap=True)
    memory, total = graph.memory, graph.prediction.memory
    module = graph.module_of.get(memory.peak_op)
    out.print(
        f"memory: peak {nbytes_text(total.peak_nbytes)} at "
        f"{time_text(memory.peak_us)}, during {memory.peak_op or 'nothing'}"
        f"{f' in {module}' if module else ''}: {_sizes(memory.by_kind)}; "
        f"parameter shards {nbytes_text(total.resident_nbytes)}",
        soft_wrap=True,
    )
    out.print(f"  by module: {_sizes(memory.by_module, _MODULES)}", soft_wrap=True)


def _steps(plans: Sequence[PlanReport]) -> Table:
    numbers = ("step", "bound", "exposed", "peak", "tokens/s/rank", "MFU", "buckets")
    table = table_of("plan", *numbers, words=("plan",))
    for plan in plans:
        tokens, mfu = plan.tokens_per_second_per_rank, plan.mfu
        table.add_row(
            plan.name,
            time_text(plan.step.step_us),
            time_text(plan.step.lower_bound_us),
            time_text(plan.step.exposed_us),
            nbytes_text(plan.step.peak_nbytes),
            f"{tokens:,.0f}" if tokens is not None else "-",
            f"{mfu:.1%}" if mfu is not None else "-",
            str(sum(len(graph.buckets) for graph in plan.graphs.values())),
        )
    return table


def _summary(graph: GraphReport) -> str:
    prediction = graph.prediction
    timeline = prediction.timeline
    sent = sum(bucket.nbytes for bucket in graph.buckets)
    kinds = Counter(bucket.kind for bucket in graph.buckets)
    counts = counted((kind, kinds[kind]) for kind in COLLECTIVE_KINDS)
    slowed = f" + {time_text(timeline.slowed_us)} beside transfers" if timeline.slowed_us else ""
    return (
        f"{len(prediction.before.ops):,} nodes; {counted(graph.collectives.items())} -> "
        f"{plural(len(graph.buckets), 'bucket')} ({counts}), "
        f"{nbytes_text(sent)}; takes {time_text(timeline.total_us)} = compute "
        f"{time_text(timeline.compute_us)}{slowed} + exposed {time_text(prediction.exposed_us)}, "
        f"bound {time_text(prediction.lower_bound_us)}; wire {time_text(timeline.wire_us)}; passes "
        f"took {prediction.pass_seconds:.2g} s"
    )


def _buckets(buckets: Iterable[BucketReport]) -> Table:
    table = Table(pad_edge=False)
    columns = ("kind", "parameters", "bytes", "dtype", "ranks", "starts", "starts in", "took",
               "needed", "needed in", "hidden by", "exposed")  # fmt: skip
    for name in columns:
        if name in ("kind", "parameters", "starts in", "needed in", "hidden by"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    for bucket in buckets:
        exposure = bucket.exposure
        table.add_row(
            bucket.kind,
            bucket.parameters,
            nbytes_text(bucket.nbytes),
            bucket.dtype,
            str(bucket.ranks),
            time_text(exposure.begin_us),
            _block(bucket.launched_at),
            time_text(exposure.duration_us),
            time_text(exposure.needed_us),
            _block(bucket.needed_at),
            shorten_blocks(sorted(bucket.hidden_by[:3])),
            time_text(exposure.exposed_us) if exposure.reason else "-",
            exposure.reason,
            style="" if exposure.reason else "dim",
        )
    return table


def _block(place: str) -> str:
    """The block of a place such as ``launched_at``, without the name of the op."""
    return block_of(place.partition(" (")[0])


def _reasons(graph: GraphReport) -> list[str]:
    exposed = sorted(
        (bucket for bucket in graph.buckets if bucket.exposure.reason),
        key=lambda bucket: -bucket.exposure.exposed_us,
    )
    if not exposed:
        return ["nothing is exposed"]
    causes = ", ".join(f"{name} {time_text(us)}" for name, us in graph.exposed_by_reason().items())
    lines = [f"exposed {time_text(graph.prediction.exposed_us)}: {causes}"]
    for bucket in exposed[:_SENTENCES]:
        exposure = bucket.exposure
        what = f"{bucket.kind} {bucket.parameters}"
        lines.append(
            f"  {time_text(exposure.exposed_us)} {what}: {exposure.reason}: {exposure.why}"
        )
    if len(exposed) > _SENTENCES:
        lines.append(f"  and {len(exposed) - _SENTENCES} more")
    return lines


def _sizes(sizes: Mapping[str, int], most: int | None = None) -> str:
    found = sorted(((name, n) for name, n in sizes.items() if n), key=lambda item: -item[1])
    shown = [f"{name} {nbytes_text(n)}" for name, n in found[:most]]
    rest = sum(n for _, n in found[len(shown) :])
    if rest:
        shown.append(f"{len(found) - len(shown)} others {nbytes_text(rest)}")
    return ", ".join(shown) or "nothing"
