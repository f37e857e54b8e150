"""Derives a deep model's step from a shallow model's: only a few of its equal layers are traced.

Tracing takes seconds per layer, whatever its size. In the graphs of a model with a list of equal
layers, each layer is the same sequence of nodes, and refers to the same places in the layers next
to it and outside. So the graphs of any depth are those of a few layers with one of them repeated.
That the traced layers are alike is checked, node by node, in both graphs. That the layers which are
not traced are like them is the caller's responsibility.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.fx import Graph

from simplefsdp import _torch
from simplefsdp.compiler.deep_graph import Deep
from simplefsdp.compiler.repeated_layers import Numbering, laid_out
from simplefsdp.compiler.seeds import of_both
from simplefsdp.frontend.placement import local_nbytes
from simplefsdp.simulation.trace import TracedStep

log = logging.getLogger("simplefsdp")

SHALLOW = 7
"""Layers to trace. The layer in the middle is repeated. That layer and the two next to it need
neighbours on both sides; the first and the last layer of the list differ from the others, because a
graph begins or ends with them."""


def deepen(step: TracedStep, layers: str, depth: int) -> TracedStep:
    """The step of the same model with more layers; call this in the same process group.

    Inputs and outputs of the repeated layers come after the other inputs and outputs of a graph.

    Args:
        step: of a model with at least :data:`SHALLOW` layers.
        layers: FQN of the list of layers.
        depth: number of layers of the result, at least that of ``step``; all are taken to be alike.

    Raises:
        ValueError: the layers are not alike in the graphs, or there are too few or too many.
    """
    numbering = Numbering(layers)
    there = len({numbering.of(fqn) for fqn in step.fqns} - {None})
    if there < SHALLOW:
        raise ValueError(
            f"{layers}: the traced step has {there} layers with parameters; trace at least "
            f"{SHALLOW}"
        )
    if depth < there:
        raise ValueError(f"{layers}: the traced step has {there} layers already, not {depth}")
    template, more = there // 2, depth - there
    layouts = [laid_out(gm.graph, numbering, template) for gm in (step.forward, step.backward)]
    try:
        forward = Deep(layouts[0], numbering, more)
        seeds = of_both(layouts[0].seeds, layouts[1].seeds)
        backward = Deep(layouts[1], numbering, more, forward.renamed, seeds=seeds)
    except KeyError as error:
        raise ValueError(f"{layers}: a layer lacks what another refers to: {error}") from error
    _check_names(step, forward.graph, backward.graph)
    moved = {fqn: fqn in step.moved for fqn in step.rows}
    return TracedStep(
        _torch.graph_module(step.forward, forward.graph),
        _torch.graph_module(step.backward, backward.graph),
        dict(_deep_rows(step.rows, numbering, template, more)),
        frozenset(fqn for fqn, is_so in _deep_rows(moved, numbering, template, more) if is_so),
    )


def _check_names(step: TracedStep, forward: Graph, backward: Graph) -> None:
    """Check that backward finds its inputs among the nodes of forward, by name, for all layers."""

    def unknown(ahead: Graph, behind: Graph) -> int:
        names = {node.name for node in ahead.nodes}
        return sum(n.op == "placeholder" and n.name not in names for n in behind.nodes)

    if unknown(forward, backward) != unknown(step.forward.graph, step.backward.graph):
        raise ValueError("backward gets something of a layer that is not forward's of one layer")


def _deep_rows(
    rows: Mapping[str, int], numbering: Numbering, template: int, more: int
) -> Iterator[tuple[str, int]]:
    repeated = [fqn for fqn in rows if numbering.of(fqn) == template]
    for fqn in rows:
        layer = numbering.of(fqn)
        if fqn in repeated[:1]:
            yield from (
                (numbering.moved(f, by), rows[f]) for by in range(more + 1) for f in repeated
            )
        elif layer != template:
            behind = layer is not None and layer > template
            yield numbering.moved(fqn, more if behind else 0), rows[fqn]


def trace_deep(
    traced: Callable[[int], tuple[TracedStep, nn.Module]], layers: str, depth: int
) -> tuple[TracedStep, int]:
    """Trace a step of a deep model from few layers; gives it, and the bytes of this rank's shards.

    Args:
        traced: traces the model with as many layers as its argument says; returns the step and the
            wrapped model.
        layers: FQN of the list of layers.
        depth: number of layers of the model.
    """
    step, model = traced(min(depth, SHALLOW))
    nbytes = local_nbytes(model.parameters())
    if depth <= SHALLOW:
        return step, nbytes
    numbering = Numbering(layers)
    try:
        deep = deepen(step, layers, depth)
    except ValueError as error:
        log.warning("%s; tracing all %d layers", error, depth)
        step, model = traced(depth)
        return step, local_nbytes(model.parameters())
    one = (p for fqn, p in model.named_parameters() if numbering.of(fqn) == SHALLOW // 2)
    return deep, nbytes + (depth - SHALLOW) * local_nbytes(one)
