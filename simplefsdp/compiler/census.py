"""What a graph communicates, and what the passes make of it: its log line."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from inductor_passes.adapters.fx import KIND_OF
from inductor_passes.adapters.loops import nbytes_of
from inductor_passes.rehearsal import Rehearsal, Settings, predict
from simplefsdp import provenance
from simplefsdp.compiler.observers import Part


def describe(graph: Graph, part: Part) -> str:
    """The gathers and reduces that SimpleFSDP put into ``graph``, as one log line. Bytes are those
    of full, padded tensors. A gradient under hybrid_shard is reduced twice, and counts twice."""
    gathers = _starts(graph, ("gather",), provenance.gathered_fqn)
    reduces = _starts(graph, ("reduce", "all_reduce"), provenance.reduced_fqn)
    text = f"{len(gathers)} gathers ({format_nbytes(sum(map(nbytes_of, gathers)))}"
    if part == "backward":
        text += ", recomputed" if gathers else ""
    elif part == "step":
        text += f"; {len(gathers) - len(set(gathers.values()))} of them again in backward"
    elif gathers:
        resharded = sum(map(provenance.reshards_after_forward, gathers))
        text += f"; {resharded} freed after forward, {len(gathers) - resharded} kept"
    reduced_nbytes = sum(nbytes_of(node.all_input_nodes[0]) for node in reduces)
    return f"{part}: {text}), {len(reduces)} reduces ({format_nbytes(reduced_nbytes)})"


def _starts(
    graph: Graph, kinds: tuple[str, ...], fqn_of: Callable[[Node], str | None]
) -> dict[Node, str]:
    found = {node: fqn_of(node) for node in graph.nodes if KIND_OF.get(node.target) in kinds}
    return {node: fqn for node, fqn in found.items() if fqn is not None}


def format_nbytes(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that leaves at least 1."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def describe_passes(rehearsal: Rehearsal, settings: Settings | None) -> str:
    """What the passes will make of a graph, for the log line; "" if there are no passes."""
    if settings is None:
        return ""
    found = predict(rehearsal, settings)
    verb = "->" if settings.merge else "moved as"
    parts = [
        f"{n} {kind}s {verb} {found.buckets[kind]} buckets"
        for kind, n in found.collectives.items()
        if n
    ]
    if (plan := rehearsal.plan) is not None:
        of_budget = f" of {plan.budget_nbytes / 1e9:.3g}" if plan.budget_nbytes else ""
        parts.append(
            f"planned {'' if of_budget else 'as before, '}{plan.step_us / 1e3:.3g} ms (lower bound "
            f"{plan.lower_bound_us / 1e3:.3g}), {plan.peak_nbytes / 1e9:.3g}{of_budget} GB beside "
            "shards of parameters"
        )
    exposed = f"{found.exposed_before_us / 1e3:.3g} -> {found.exposed_after_us / 1e3:.3g} ms"
    return "; ".join(["", *parts, f"predicted exposed {exposed} on {found.device}"])
