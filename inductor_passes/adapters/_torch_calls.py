"""Which operator a node really calls, with which arguments, and how much it computes.

This uses private parts of PyTorch, with contract tests as for
:mod:`inductor_passes.adapters._torch`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._prims import rng_prims
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from inductor_passes.ir.sizes import fixed

# Where the operator stands among the arguments of a call that runs it with a generator's state.
_OPERATOR_AT = {
    rng_prims.run_and_save_rng_state: 0,
    rng_prims.graphsafe_run_with_rng_state: 0,
    rng_prims.run_with_rng_state: 1,
}

_FUNCTIONALIZED = {
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
}

_SIZES = {
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
}


class Call(NamedTuple):
    """An operator, or another function, and its arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def call_of(node: Node) -> Call:
    """What a node really calls.

    Under activation checkpointing, an operator that may draw random numbers, as attention may for
    its dropout, is an argument of another call, which gives it the state that the generator had.
    For such a node, this is the call of that operator.
    """
    at = _OPERATOR_AT.get(node.target)
    if at is None:
        return Call(node.target, node.args, node.kwargs)
    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return Call(node.args[at], node.args[at + 1 :], kwargs)


def run_by_itself(node: Node) -> Call:
    """The call that runs a node outside of compiled code.

    Casts of ``prims``, which AOTAutograd makes, are written in Python: they take 16 us, ATen's 3.
    """
    if node.target is not torch.ops.prims.convert_element_type.default:
        return Call(node.target, node.args, node.kwargs)
    source, dtype = node.args
    return Call(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})


def has_schema(call: Call) -> bool:
    """Whether a call is of an operator that has a schema."""
    return isinstance(call.target, torch._ops.OpOverload)


@functools.cache
def written_by(target: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operator writes in place."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def makes_view(target: Any) -> bool:
    """Whether an operator's one result is a view of its first tensor argument."""
    returns = target._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return alias is not None and not alias.is_write


def work_call(node: Node) -> Call:
    """The call that does a node's work: :func:`call_of`. But AOTAutograd wraps an operator that
    writes to its arguments, as the backward of the flash-attn package, in a call that returns what
    the operator would write; then it is the call of that operator."""
    if node.target in _FUNCTIONALIZED:
        target: Any = node.args[0]
        names = {argument.name for argument in target._schema.arguments}
        return Call(target, (), {k: v for k, v in node.kwargs.items() if k in names})
    return call_of(node)


def name_of(node: Node) -> str:
    """``aten::mm`` of ``aten.mm.default``."""
    call = work_call(node)
    name = call.target.name() if has_schema(call) else str(call.target)
    return name.split(".")[0]


def attends(node: Node) -> bool:
    """Whether a node is attention, to judge by its name: torch's operators and other libraries'."""
    name = name_of(node).lower()
    return "attention" in name or "attn" in name


def by_name(call: Call) -> dict[str, Any]:
    """The arguments that a call is given, by the names in its schema."""
    names = [a.name for a in call.target._schema.arguments] if has_schema(call) else []
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def by_position(call: Call) -> Sequence[Any]:
    """The arguments that a call is given, in the order of its schema; None for what is left out."""
    if not has_schema(call):
        return call.args
    given = by_name(call)
    return [given.get(argument.name) for argument in call.target._schema.arguments]


def note_values(graph: Graph) -> None:
    """Note in ``meta["val"]`` the values of calls that run an operator with a generator's state,
    which the partitioner leaves out.

    Inductor computes these values before its passes, but a graph may be read before that. Several
    results are known from the users that take one each; a single one is computed, on fake tensors.
    """
    for node in graph.nodes:
        if node.target in _OPERATOR_AT and "val" not in node.meta:
            items = {
                user.args[1]: user.meta.get("val")
                for user in node.users
                if user.target is operator.getitem
            }
            if items:
                node.meta["val"] = tuple(items.get(i) for i in range(max(items) + 1))
            else:
                node.meta["val"] = computed(call_of(node))


def computed(call: Call) -> Any:
    """The value of a call, computed from the values of the nodes among its arguments; None if no
    argument is a fake tensor."""
    args, kwargs = map_arg((call.args, dict(call.kwargs)), lambda node: node.meta.get("val"))
    given = pytree.tree_leaves((args, kwargs))
    mode = next((v.fake_mode for v in given if hasattr(v, "fake_mode")), None)
    if mode is None:
        return None
    with mode:
        return call.target(*args, **kwargs)


def saves_generator(node: Node) -> bool:
    """Whether a node draws from the device's generator, and returns the state that it had before.

    Its recomputation draws from that state and leaves the generator as it was.
    """
    return node.target is rng_prims.run_and_save_rng_state


def generator_written_by(node: Node) -> list[Node]:
    """The input that holds the state of a node's own generator, which the node advances by drawing;
    empty if it has none."""
    if node.target is not rng_prims.graphsafe_run_with_rng_state:
        return []
    state = node.kwargs.get("rng_state")
    return [state] if isinstance(state, Node) else []


def is_size(node: Node) -> bool:
    """Whether a node asks a tensor for a size or a stride, which takes no time and no memory."""
    return node.target in _SIZES


def flops_formula(target: object) -> Callable[..., int] | None:
    """Torch's formula of an operator's floating-point operations; None if torch has none. It is
    called with the operator's arguments and ``out_val``; tensors are given as their shapes."""
    formula: Callable[..., int] | None = flop_registry.get(target)
    if formula is None or hasattr(formula, "__wrapped__"):  # a wrapped one takes shapes
        return formula

    def of_shapes(*args: Any, **kwargs: Any) -> int:
        args, kwargs = pytree.tree_map(_of_shape, (args, kwargs), is_leaf=_is_shape)
        return formula(*args, **kwargs)

    return of_shapes


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


def _of_shape(value: Any) -> Any:
    """A shape as a tensor, for a formula that takes tensors: such formulas use various methods of
    tensors, and support no open sizes."""
    if not _is_shape(value):
        return value
    return torch.empty([fixed(n) for n in value], device="meta")
