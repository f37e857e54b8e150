"""What an optimizer's step computes, as a graph of Dynamo's, and how such graphs are extended."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from simplefsdp._torch.cut import graph_module
from simplefsdp._torch.dynamo import with_own_code


class MakesState(Exception):
    """A step has results: state that the optimizer makes of its first gradients."""


class CapturedStep(NamedTuple):
    """A graph without results: all that it does is to write to tensors that were there.

    Attributes:
        graph: of Dynamo's.
        tensors: what its placeholders and attributes stand for.
    """

    graph: Graph
    tensors: dict[Node, Tensor]


def captured_step(optimizer: Optimizer) -> CapturedStep:
    """The graph of ``optimizer.step()`` for the parameters that have gradients.

    No value changes, but parameters without state have their first one afterwards.

    Raises:
        MakesState: it is to be called once before.
        torch._dynamo.exc.Unsupported: Dynamo cannot follow it as one graph.
    """
    # What users call breaks the graph before and behind the step that the class defines.
    step = inspect.unwrap(type(optimizer).step)
    found: list[CapturedStep] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tensors = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        attributes = gm.graph.find_nodes(op="get_attr")
        tensors |= {node: getattr(gm, str(node.target)) for node in attributes}
        found.append(CapturedStep(gm.graph, tensors))
        (output,) = gm.graph.find_nodes(op="output")
        results = tuple(None for _ in output.all_input_nodes)
        return lambda *_: results

    def run() -> None:
        step(optimizer)

    run = with_own_code(run, f"{type(optimizer).__qualname__} at {id(optimizer)}")
    with torch.no_grad():
        torch.compile(run, backend=backend, fullgraph=True, dynamic=False)()
    captured = found[-1]
    (output,) = captured.graph.find_nodes(op="output")
    if output.all_input_nodes:
        raise MakesState
    return captured


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What is to be called before or after each step of ``optimizer``, or of all."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return [hook for found in hooks for hook in found.values()]


def note_step(optimizer: Optimizer) -> None:
    """Let learning-rate schedules know that ``optimizer`` made a step, or they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def copied_graph(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph that can be changed, and is compiled as that one would be; Dynamo
    goes on with the nodes of the original."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    copied = graph_module(gm, graph)
    copied.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    return copied


def add_input(gm: GraphModule, name: str, tensor: Tensor, like: Tensor) -> tuple[Node, Tensor]:
    """A last input of a graph that :func:`copied_graph` gave, which Dynamo does not know of.

    Args:
        gm: the graph.
        name: of the input, or what it begins with.
        tensor: that it will be called with; the same sizes and the same address each time.
        like: a fake tensor of the graph.

    Returns:
        The input, and the fake tensor to compile the graph with.
    """
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    # Of a real tensor AOTAutograd would take the sizes, of which Dynamo has not told it, for open.
    fake = like.fake_mode.from_tensor(tensor, static_shapes=True)  # type: ignore[attr-defined]
    node.meta |= {"example_value": fake, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
    node._dynamo_source = None  # type: ignore[attr-defined]
    return node, fake
