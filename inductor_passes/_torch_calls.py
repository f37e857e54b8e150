"""Which operator a node really calls, and with which arguments: the one place that says so.

A private part of PyTorch, as those of :mod:`inductor_passes._torch`, and under the same contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._prims import rng_prims
from torch.fx import Node

# Where the operator stands among the arguments of a call that runs it with a generator's state.
_OPERATOR_AT = {
    rng_prims.run_and_save_rng_state: 0,
    rng_prims.graphsafe_run_with_rng_state: 0,
    rng_prims.run_with_rng_state: 1,
}


class Call(NamedTuple):
    """An operator, or another function, and its arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def call_of(node: Node) -> Call:
    """What a node really calls.

    Under activation checkpointing, an operator that may draw random numbers, as attention may for
    its dropout, is an argument of a call that gives it the state which the generator had. It is
    that operator that is called.
    """
    at = _OPERATOR_AT.get(node.target)
    if at is None:
        return Call(node.target, node.args, node.kwargs)
    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return Call(node.args[at], node.args[at + 1 :], kwargs)


def has_schema(call: Call) -> bool:
    """Whether a call is of an operator that has a schema."""
    return isinstance(call.target, torch._ops.OpOverload)


def saves_generator(node: Node) -> bool:
    """Whether a node draws from the device's generator, and returns the state that it had before.

    Its recomputation draws from that state and leaves the generator as it was.
    """
    return node.target is rng_prims.run_and_save_rng_state


def generator_written_by(node: Node) -> list[Node]:
    """The input that holds a generator of its own for a node, which drawing from it moves on."""
    if node.target is not rng_prims.graphsafe_run_with_rng_state:
        return []
    state = node.kwargs.get("rng_state")
    return [state] if isinstance(state, Node) else []
