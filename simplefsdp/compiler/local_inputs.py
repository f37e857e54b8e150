"""Graphs that AOTAutograd compiles only if no input is of a tensor subclass such as DTensor.

So the compiled function of such a graph is called with local tensors, and the DTensors are made of
them inside the graph; what is communicated stays the same. There are two kinds:

- Inputs or outputs alias one another. A graph break makes them: ``for image in features`` hands
  views of one tensor from one graph to the next.
- An input is a result of the step before, and forward detaches it: the state of truncated
  backpropagation through time. If no input is a subclass, AOTAutograd detaches such an input
  itself; else backward would go on into the step before, whose graph is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from simplefsdp import _torch, provenance
from simplefsdp.frontend.gather import gather
from simplefsdp.frontend.gather_spec import spec_of
from simplefsdp.frontend.placement import dtensor_of

CompiledFunction = Callable[..., Any]
_DETACH = {"detach", torch.detach, torch.Tensor.detach}
Backend = Callable[[GraphModule, Sequence[Any]], CompiledFunction]


def compile_with_local_inputs(
    gm: GraphModule, example_inputs: Sequence[Any], compile_graph: Backend
) -> CompiledFunction:
    """Compile a Dynamo graph by ``compile_graph``, its DTensors unwrapped if they must be."""
    unwrapped = {i for i, value in enumerate(example_inputs) if isinstance(value, DTensor)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    must_be = (
        _alias(placeholders)
        or _alias(output.all_input_nodes)
        or _is_cut_off(gm, [n for i, n in enumerate(placeholders) if i not in unwrapped])
    )
    if not unwrapped or not must_be:
        return compile_graph(gm, example_inputs)
    inputs = list(example_inputs)
    for i in sorted(unwrapped, reverse=True):
        inputs[i] = _take_local(gm, placeholders[i], placeholders[-1], example_inputs[i])
    gm.recompile()
    compiled = compile_graph(gm, inputs)

    def call(*args: Any) -> Any:
        return compiled(*(_torch.local_of(a) if i in unwrapped else a for i, a in enumerate(args)))

    return call


def _alias(nodes: Iterable[Node]) -> bool:
    """Whether two inputs of a Dynamo graph, or two outputs, are views of one tensor."""
    found = [_torch.storage_of(node.meta.get("example_value")) for node in nodes]
    storages = [storage for storage in found if storage is not None]
    return len(set(storages)) < len(storages)


def _is_cut_off(gm: GraphModule, inputs: Iterable[Node]) -> bool:
    """Whether a Dynamo graph may give no gradient to an input that has a ``grad_fn``: it detaches
    such an input, or has a block without gradients."""
    values = [(node, node.meta.get("example_value")) for node in inputs]
    computed = [n for n, v in values if isinstance(v, torch.Tensor) and v.grad_fn is not None]
    detached = any(user.target in _DETACH for node in computed for user in node.users)
    return detached or (bool(computed) and any(map(_torch.sets_grad_mode, gm.graph.nodes)))


def _take_local(gm: GraphModule, placeholder: Node, last: Node, param: DTensor) -> torch.Tensor:
    """Have the graph make the DTensor of ``placeholder``, behind the placeholder ``last``; return
    the local tensor to compile for."""
    shape, stride = param.shape, param.stride()
    mesh, placements, mark = param.device_mesh, param.placements, _mark_of(placeholder)

    def as_dtensor(local: torch.Tensor) -> DTensor:
        with mark():  # a view of the shard is a part of the gather, and recomputed with it
            return dtensor_of(local, mesh, placements, shape, stride)

    with gm.graph.inserting_after(last):
        whole = gm.graph.call_function(as_dtensor, (placeholder,))
    whole.meta = placeholder.meta.copy()
    # The fake tensor: the sizes of a real one, of which Dynamo has not told it, AOTAutograd would
    # take to be open.
    fake: DTensor = placeholder.meta["example_value"]
    placeholder.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    local = fake.to_local().detach().requires_grad_(param.requires_grad)
    placeholder.meta["example_value"] = local
    return local


def _mark_of(placeholder: Node) -> Callable[[], AbstractContextManager[object]]:
    """Gives a context that marks what is traced inside as a part of the parameter's gather."""
    for user in placeholder.users:
        if user.target is gather:
            spec = spec_of(user)
            reshards = spec.reshard_after_forward
            return partial(provenance.gather_of, spec.fqn, reshard_after_forward=reshards)
    return nullcontext
