"""Graph breaks: which graphs one call of a model runs, and what is lost between them.

Where Dynamo cannot go on, it ends a graph, runs that line eagerly, and begins another graph. Each
graph is bucketed and ordered by itself, so no communication is hidden across the border: the first
gathers of the graph behind the break have no compute before them, and the last reduces of its
backward graph have none after them. A warning says so, once per function; its figures are for the
log and decide nothing.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from inductor_passes.adapters.roofline import cost_of
from inductor_passes.ir.program import CollectiveKind
from inductor_passes.machine.simulate import simulate
from inductor_passes.rehearsal import assumed_cluster
from simplefsdp import _torch
from simplefsdp._torch import CodePlace, GraphBreak
from simplefsdp.compiler import observers
from simplefsdp.compiler.observers import CompiledGraph
from simplefsdp.rank_logging import speaks

log = logging.getLogger("simplefsdp")


@dataclass
class _Call:
    """What a call of a model runs, from one graph to the next."""

    number: int = 0
    root: CodePlace | None = None  # the function that was called
    trains: bool = False
    before: str | None = None  # the last break before the graph that is being compiled, in words
    after: str | None = None  # the last break so far: the one that ends that graph, if one does
    is_over: bool = True  # its backward was compiled, so no graph of its forward comes any more


_numbers = itertools.count(1)
_current = _Call()
_warned: set[CodePlace | None] = set()  # functions whose first break was warned of
# By number of the compilation: its call's number, and the break before its forward graph.
_calls: dict[int, tuple[int, str | None]] = {}


def enter(gm: GraphModule) -> None:
    """Note a Dynamo graph that is about to be compiled. It belongs to the same call as the graph
    before it if the function that the user called is still running: Dynamo compiles the code behind
    a break only when the code before the break has run."""
    place, trains = _torch.place_being_compiled(), torch.is_grad_enabled()
    called = _torch.place_called()
    goes_on = called is not None and called == _current.root and trains == _current.trains
    if _current.is_over or not goes_on:
        root = called or place
        vars(_current).update(vars(_Call(next(_numbers), root, trains, is_over=False)))
    cut = _torch.graph_break_of(gm)
    _current.before = _current.after
    _current.after = _described(cut, gm) if cut is not None else _current.after


def is_between_breaks() -> bool:
    """Whether the graph that is being compiled begins or ends at a graph break."""
    return _current.before is not None or _current.after is not None


def _described(cut: GraphBreak, gm: GraphModule) -> str:
    where = cut.stack[-1] if cut.stack else None
    # What happened, without the hints and links that follow.
    lines = [line.strip() for line in cut.reason.splitlines()]
    told = itertools.takewhile(lambda line: not line.startswith(("Hint:", "Developer ")), lines)
    last = next((m for n in reversed(gm.graph.nodes) if (m := _torch.module_path(n))), None)
    return (
        f"graph break{f' in or after module {last}' if last else ''}"
        f"{f', at {where.filename}:{where.lineno} ({where.line})' if where else ''}. "
        f"Dynamo's reason: {' '.join(filter(None, told)).removesuffix('.')}"
    )


def notify(seen: CompiledGraph) -> None:
    """Call the observers with a graph, and say what the break before it costs."""
    _current.is_over |= seen.part == "backward"
    if seen.part == "forward":
        _calls[seen.compilation] = _current.number, _current.before
    call, cut = _calls.get(seen.compilation, (0, None))
    observers.notify(seen._replace(call=call))
    try:
        _tell(seen, cut)
    except Exception as error:  # it is for the log only
        log.warning("graph break: what it costs cannot be predicted: %s", error)
    if seen.part == "backward" or not _current.trains:  # nothing of this compilation comes any more
        _calls.pop(seen.compilation, None)


def reset() -> None:
    """Forget all calls, and which functions were warned of: they are compiled anew."""
    _warned.clear()
    _calls.clear()
    vars(_current).update(vars(_Call()))


def _tell(seen: CompiledGraph, cut: str | None) -> None:
    """Warn of the first break of a function; log others, and those of backward graphs, at INFO."""
    forward = seen.part == "forward"
    if cut is None or not speaks():
        return
    us, cluster = _exposed_us(seen, "gather" if forward else "reduce")
    if us is None:
        return
    end = "first gathers" if forward else "last reduces"
    cost = f"the {end} of the {seen.part} graph behind it: {us / 1e3:.3g} ms exposed on {cluster}"
    if not forward or _current.root in _warned:
        log.info("predicted for %s (%s)", cost, cut)
        return
    _warned.add(_current.root)
    log.warning(
        "%s. Each graph is compiled for itself, and nothing is hidden across the border. Predicted "
        "for %s, and in backward about as much for its last reduces. fullgraph=True makes a break "
        "an error; this log, at INFO, has the other ones",
        cut,
        cost,
    )


def _exposed_us(seen: CompiledGraph, kind: CollectiveKind) -> tuple[float | None, str]:
    """How long, in us, compute waits for the first gather or the last reduce of a graph, and the
    name of the cluster that this is predicted for; None if the graph has no such collective."""
    after = seen.rehearsal.after
    starts = [op.name for _, op in after.starts() if op.sends == kind]
    if not starts:
        return None, ""
    cluster, _ = assumed_cluster(seen.rehearsal.reading, seen.settings)
    timeline = simulate(after, cost_of(seen.rehearsal.reading, cluster))
    return timeline.exposed_us[starts[0] if kind == "gather" else starts[-1]], cluster.name
