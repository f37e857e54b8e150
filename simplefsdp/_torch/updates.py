"""What an optimizer's step computes, as a graph of Dynamo's, and how such graphs are extended."""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._dynamo import config
from torch.fx import Graph, GraphModule, Node
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from simplefsdp._torch.cut import copied
from simplefsdp._torch.dynamo import with_own_code

_TORCH = str(Path(torch.__file__).parent)


class MakesState(Exception):
    """A step has results: state that the optimizer makes of its first gradients."""


class CapturedStep(NamedTuple):
    """A graph without results: all that it does is to write to tensors that were there."""

    graph: Graph  # of Dynamo's
    tensors: dict[Node, Tensor]  # what its placeholders and attributes stand for


def captured_step(optimizer: Optimizer) -> CapturedStep:
    """The graph of ``optimizer.step()`` for the parameters that have gradients.

    No tensor changes; what is Python's does. Parameters without state have their first one
    afterwards.

    Raises:
        MakesState: it is to be called once before.
        ValueError: the step that users call is another one, or has effects that no graph has.
        torch._dynamo.exc.Unsupported: Dynamo cannot follow it as one graph.
    """
    step = _defined_step(optimizer)
    found: list[CapturedStep] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tensors = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        attributes = gm.graph.find_nodes(op="get_attr")
        tensors |= {node: getattr(gm, str(node.target)) for node in attributes}
        gm._buffers.clear()  # or the graph keeps the state that there was when it was made
        gm._parameters.clear()
        found.append(CapturedStep(gm.graph, tensors))
        output = gm.graph.output_node()
        results = tuple(None for _ in output.args[0])  # type: ignore[union-attr]
        return lambda *_: results

    def run() -> None:
        step(optimizer)

    run = with_own_code(run, f"step of {type(optimizer).__qualname__}")
    with torch.no_grad():
        torch.compile(run, backend=backend, fullgraph=True, dynamic=False)()
    captured = found.pop()  # Dynamo keeps the backend
    output = captured.graph.output_node()
    if not all(_is_written(node, captured.tensors) for node in output.all_input_nodes):
        raise MakesState
    return captured


IN_PLACE: dict[object, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""Operators that write to what is on their left, and those that do not and compute the same."""


def _is_written(node: Node, tensors: dict[Node, Tensor]) -> bool:
    """Whether a node is a tensor that was there, written to in place."""
    while node not in tensors:
        if not (node.target in IN_PLACE or (node.op == "call_method" and is_in_place(node))):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def is_in_place(node: Node) -> bool:
    """Whether a Dynamo node calls a method, or a function, by a name that says that it writes."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).endswith("_") and not str(name).endswith("__")


def _defined_step(optimizer: Optimizer) -> Callable[..., Any]:
    """What the class of an optimizer defines as its step. What users call breaks the graph before
    and behind it."""
    own = vars(optimizer).get("step")
    # Schedules of learning rates wrap it to see that it is called.
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ValueError("its step was replaced by another one")
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        if not _is_torchs(step):
            raise ValueError(f"its step is wrapped by {step.__code__.co_filename}")
        step = step.__wrapped__
    if assigned := _assigned(type(optimizer), step, set()):
        raise ValueError(f"it assigns to an attribute at each step, .{assigned}")
    return cast(Callable[..., Any], step)


def _assigned(cls: type, function: Any, seen: set[object]) -> str | None:
    """An attribute that a step assigns to, or a method that it may call, which is not torch's: a
    graph would have its first value in it, and Dynamo leaves an optimizer's attributes alone."""
    code = function.__code__
    seen.add(code)
    if _is_torchs(function):
        return None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            return str(instruction.argval)
    methods = (inspect.getattr_static(cls, name, None) for name in code.co_names)
    called = [m for m in methods if isinstance(m, FunctionType) and m.__code__ not in seen]
    return next((found for m in called if (found := _assigned(cls, m, seen))), None)


def _is_torchs(function: Any) -> bool:
    return str(function.__code__.co_filename).startswith(_TORCH)


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What is to be called before or after each step of ``optimizer``, or of all."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return [hook for found in hooks for hook in found.values()]


def no_backward_inside() -> AbstractContextManager[None]:
    """Have Dynamo refuse ``backward()`` in what it traces, also where the user allows it: a step's
    own gradients are others."""
    return config.patch(trace_autograd_ops=False)  # type: ignore[no-any-return]


def note_step(optimizer: Optimizer) -> None:
    """Let learning-rate schedules know that ``optimizer`` made a step, or they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def copied_graph(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph that can be changed, and is compiled as that one would be; Dynamo
    goes on with the nodes of the original."""
    whole, copies = copied(gm)
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    whole.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        whole._param_name_to_source = gm._param_name_to_source
    return whole


def add_input(gm: GraphModule, name: str, tensor: Tensor, like: Tensor) -> tuple[Node, Tensor]:
    """A last input of a graph that :func:`copied_graph` gave, of which Dynamo does not know, and
    its fake tensor. It is called with ``tensor``, of the same sizes and at the same address each
    time."""
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    # Of a real tensor AOTAutograd would take the sizes, of which Dynamo has not told it, for open.
    fake = like.fake_mode.from_tensor(tensor, static_shapes=True)  # type: ignore[attr-defined]
    node.meta |= {"example_value": fake, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
    node._dynamo_source = None  # type: ignore[attr-defined]
    return node, fake
