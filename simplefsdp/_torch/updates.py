"""Captures an optimizer's step as a Dynamo graph, and extends such graphs."""

from __future__ import annotations

import dis
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    """The graph of a step has results: state that the optimizer makes from the first gradients."""


class CapturedStep(NamedTuple):
    """A graph without results: it only writes to tensors that existed before."""

    graph: Graph  # a Dynamo graph
    tensors: dict[Node, Tensor]  # the tensors that its placeholders and attributes stand for


def captured_step(optimizer: Optimizer) -> CapturedStep:
    """Trace ``optimizer.step()`` for the parameters that have gradients.

    No tensor changes, but Python values do. Parameters without state get their initial state.

    Raises:
        MakesState: the step has to run once before it can be traced.
        ValueError: the step was replaced or wrapped, or has effects that no graph can have.
        torch._dynamo.exc.Unsupported: Dynamo cannot trace the step as one graph.
    """
    step = _defined_step(optimizer)
    found: list[CapturedStep] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tensors = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        attributes = gm.graph.find_nodes(op="get_attr")
        tensors |= {node: getattr(gm, str(node.target)) for node in attributes}
        gm._buffers.clear()  # or the graph keeps the state tensors of this moment alive
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
    captured = found.pop()  # Dynamo keeps the backend, and with it the list, alive
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
"""In-place operators, and the operators that compute the same without writing."""


def _is_written(node: Node, tensors: dict[Node, Tensor]) -> bool:
    """Whether a node is a tensor that existed before the step, after in-place writes."""
    while node not in tensors:
        if not (node.target in IN_PLACE or (node.op == "call_method" and is_in_place(node))):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def is_in_place(node: Node) -> bool:
    """Whether a Dynamo node calls a method or function whose name says that it writes in place: one
    that ends in one underscore."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).endswith("_") and not str(name).endswith("__")


def _defined_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The step function that the class of an optimizer defines. torch's wrappers around it, which
    users call, would break the graph before and after it."""
    own = vars(optimizer).get("step")
    # Learning-rate schedules wrap the step to notice that it is called; that is harmless.
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
    """An attribute to which a step, or a method that it may call, assigns; torch's own code is not
    searched. A graph would keep the attribute's first value, as Dynamo does not guard attributes of
    optimizers."""
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
    """The hooks to be called before or after each step of ``optimizer``, or of every optimizer."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return [hook for found in hooks for hook in found.values()]


def no_backward_inside() -> AbstractContextManager[None]:
    """Inside, Dynamo refuses to trace ``backward()``, also if the user allows it: a compiled step
    computes its gradients in another way."""
    return _backward_is_refused() if config.trace_autograd_ops else nullcontext()


@functools.cache  # each patch that torch makes stays in the thread's context for ever
def _backward_is_refused() -> AbstractContextManager[None]:
    return config.patch(trace_autograd_ops=False)  # type: ignore[no-any-return]


def note_step(optimizer: Optimizer) -> None:
    """Tell learning-rate schedules that ``optimizer`` has made a step; otherwise they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def copied_graph(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph that can be changed and compiled in the place of the original, whose
    nodes Dynamo still uses."""
    whole, copies = copied(gm)
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    whole.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        whole._param_name_to_source = gm._param_name_to_source
    return whole


def add_input(gm: GraphModule, name: str, tensor: Tensor, like: Tensor) -> tuple[Node, Tensor]:
    """Add a last input, which Dynamo does not know, to a graph from :func:`copied_graph`; gives its
    node and fake tensor. Each call of the graph must pass a tensor there with the sizes and the
    address of ``tensor``."""
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    # Of a real tensor that Dynamo does not know, AOTAutograd would make the sizes symbolic.
    fake = like.fake_mode.from_tensor(tensor, static_shapes=True)  # type: ignore[attr-defined]
    node.meta |= {"example_value": fake, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
    node._dynamo_source = None  # type: ignore[attr-defined]
    return node, fake
