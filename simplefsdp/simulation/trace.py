"""Traces the graphs of a training step without running it, to plan for a cluster elsewhere.

Inside a ``FakeTensorMode`` and a fake process group, tensors have no memory and collectives no
peers. So even the largest model, on any number of ranks, can be traced on a laptop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from inductor_passes.adapters.scalars import reduce_at_once
from inductor_passes.adapters.unrounded import write_sums_unrounded
from inductor_passes.garbage import no_garbage_collection
from simplefsdp import _torch
from simplefsdp.compiler.dedupe import dedupe_gathers
from simplefsdp.compiler.post_forward import gather_once
from simplefsdp.compiler.recompute import (
    save_what_reads_written_inputs,
    tag_for_recompute,
    tag_gather_chains,
)
from simplefsdp.frontend.control import change_specs
from simplefsdp.frontend.wrapped import is_wrapped
from simplefsdp.provenance import carried_fqn


class TracedStep(NamedTuple):
    """The graphs of one step, as the passes get them."""

    forward: GraphModule  # from inputs and shards to outputs and saved tensors
    backward: GraphModule  # from saved tensors and the outputs' gradients to the shards' gradients
    # For each gathered parameter, in the order of the forward's first reads: the size of the full
    # tensor's dimension that is sharded; 0 if none is.
    rows: Mapping[str, int]
    moved: frozenset[str] = frozenset()  # of these, that dimension is not the first

    @property
    def fqns(self) -> tuple[str, ...]:
        """The gathered parameters, in the order of the forward's first reads."""
        return tuple(self.rows)


class UntraceableError(ValueError):
    """A model, as it was wrapped, has no graphs that could be planned."""


class _TracedError(Exception):
    """Ends a call of the model once its graphs are traced: running them, even on fake tensors,
    would take as long as tracing did."""


def _stop(*_: object) -> NoReturn:
    raise _TracedError


def trace(
    model: nn.Module,
    *inputs: object,
    keywords: Mapping[str, object] | None = None,
    averages: bool | None = None,
) -> TracedStep:
    """Trace forward and backward of a wrapped model.

    Args:
        model: wrapped by :func:`simplefsdp.simple_fsdp`. The outputs of its forward are
            differentiated. If its parameters are fake tensors, nothing is computed; call this
            inside their mode.
        inputs: of the model; fake if its parameters are.
        keywords: its keyword arguments, in the same way.
        averages: True if reduce collectives of the planned machine can average, see
            :class:`inductor_passes.machine.cluster.Cluster`; gradients are then sent so. False if
            it has CPUs, where the outputs of attention are kept instead of recomputed
            (:func:`simplefsdp.compiler.recompute.save_cpu_random_ops`), and sums of gradients are
            rounded before they are reduced in fp32. None for GPUs that send gradients as here.

    Raises:
        UntraceableError: no parameter is sharded, no output needs a gradient, or the model was
            wrapped with ``reshard_after_forward="auto"``.
    """
    on_cpu = averages is False
    if averages is not None:
        change_specs(filter(is_wrapped, model.modules()), {"averages": averages})
    graphs: dict[bool, GraphModule] = {}
    rows, moved = dict[str, int](), set[str]()
    undecided: list[str] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        specs = dedupe_gathers(gm, example_inputs)
        rows.update((spec.fqn, spec.rows) for spec in specs)
        moved.update(spec.fqn for spec in specs if spec.dim)
        undecided.extend(s.fqn for s in specs if s.reshard_after_forward == "auto")
        tag = tag_for_recompute if on_cpu else _tag_on_gpu
        graphs.update(_torch.graphs_of(gm, example_inputs, tag))
        for graph in graphs.values():
            gather_once(graph.graph)
            write_sums_unrounded(graph.graph, torch.device("cpu" if on_cpu else "cuda"))
            reduce_at_once(graph.graph, carried_fqn)
        return _stop

    # For Dynamo, every trace compiles the same code again, which it would refuse after a few times.
    unlimited = torch._dynamo.config.patch(
        recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20
    )
    with no_garbage_collection(), unlimited, contextlib.suppress(_TracedError):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(
            *inputs, **(keywords or {})
        )
    if not rows:
        raise UntraceableError(
            f"model: no parameter of this {type(model).__name__} is sharded; wrap it by "
            "simplefsdp.simple_fsdp(model, mesh) first"
        )
    if undecided:
        raise UntraceableError(
            f"{undecided[0]}: wrapped with reshard_after_forward='auto', which is decided when the "
            "model is compiled for a cluster; to trace it, wrap with True or False"
        )
    if True not in graphs:
        raise UntraceableError("model: its output needs no gradient; there is no backward to trace")
    return TracedStep(graphs[False], graphs[True], rows, frozenset(moved))


def _tag_on_gpu(graph: Graph) -> None:
    """Like :func:`tag_for_recompute`, for a graph that is traced on a CPU for a GPU."""
    save_what_reads_written_inputs(graph)
    tag_gather_chains(graph)
