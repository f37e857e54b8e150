"""What the ops of an FX graph do, for :class:`.ClusterCost` to price."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.adapters import _torch, _torch_lowering
from inductor_passes.adapters._torch_calls import (
    Call,
    attends,
    by_name,
    by_position,
    flops_formula,
    name_of,
    work_call,
)
from inductor_passes.adapters.fx import Reading
from inductor_passes.adapters.loops import inputs_of, loop_of, results_of, touches_of
from inductor_passes.ir.program import Program
from inductor_passes.machine import attention
from inductor_passes.machine.cluster import Cluster, ClusterCost, Work, nodes_spanned
from inductor_passes.machine.fusion import traffic_of
from inductor_passes.machine.stored import as_stored

log = logging.getLogger("simplefsdp")

_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


def work_of(reading: Reading) -> dict[str, Work]:
    """The work of each compute op by name, once Inductor has fused them.

    Operations are counted for matmuls, convolutions and attention, half of them for
    causal attention, which is computed blockwise; bytes by the rule in
    :mod:`inductor_passes.machine.fusion`. Symbolic sizes count as what they were when traced.
    """
    program, nodes = reading.program, _compute_nodes(reading)
    loops = {name: loop for name, node in nodes.items() if (loop := loop_of(node))}
    touches = {name: n for name, node in nodes.items() if (n := touches_of(node)) is not None}
    traffic = traffic_of(program, loops, touches)
    return {
        name: work_of_node(node, traffic[name].nbytes, traffic[name].kernels)
        for name, node in nodes.items()
    }


def fused_program(reading: Reading) -> Program:
    """The program as it lies in memory once Inductor has lowered it, see
    :mod:`inductor_passes.machine.stored`."""
    nodes = _compute_nodes(reading)
    loops = {name: loop for name, node in nodes.items() if (loop := loop_of(node))}
    saved = [name for name in reading.program.inputs if _torch.is_saved(name)]
    limits = _torch_lowering.limits_of_repeating(device_of(reading))
    return as_stored(reading.program, loops, saved, limits)


def _compute_nodes(reading: Reading) -> dict[str, Node]:
    ops = reading.program.ops
    return {op.name: reading.nodes[op.name][0] for op in ops if op.kind == "compute"}


def cost_of(reading: Reading, cluster: Cluster) -> ClusterCost:
    """What the ops of a graph cost on a cluster."""
    groups = nodes_of(reading.program, cluster.ranks_per_node)
    return ClusterCost(cluster, groups, work_of(reading))


def work_of_node(node: Node, nbytes: int, kernels: int) -> Work:
    """The work of one op, if it moves ``nbytes`` in so many kernels."""
    if name_of(node) in _ALLOCATIONS:
        return Work(kind="view", kernels=0)
    flops = flops_of(node)
    if not flops:
        return Work(0, nbytes, kernels=kernels)
    is_attention = attends(node)
    dtype = next((str(v.dtype) for v in inputs_of(node)), "torch.float32").removeprefix("torch.")
    if is_attention and _is_causal(node):
        flops //= 2
    return Work(flops, nbytes, "attention" if is_attention else "matmul", dtype, kernels)


def flops_of(node: Node) -> int:
    """Floating-point operations of a matmul, convolution or attention; 0 for anything else.

    The formulas are given plain sizes: computing with a symbol could add a guard on it, and on this
    rank only.
    """
    call = work_call(node)
    target = getattr(call.target, "overloadpacket", call.target)
    ours, count = attention.OPERATORS.get(name_of(node)), flops_formula(target)
    if ours is None and count is None:
        if attends(node):
            _warn_of_formula(name_of(node), "there is no formula for it")
        return 0

    def plain(argument: Node) -> Any:
        return _plain(argument.meta.get("val"))

    args, kwargs = torch.fx.node.map_arg((call.args, call.kwargs), plain)
    try:
        if ours is not None:
            return ours.flops(by_position(Call(call.target, args, kwargs)))
        return count(*args, **kwargs, out_val=plain(node))  # type: ignore[no-any-return,misc]
    except Exception as error:  # most formulas are torch's, and so is what they raise
        _warn_of_formula(name_of(node), f"{type(error).__name__}: {error}")
        return 0


_without_formula: set[str] = set()


def _warn_of_formula(op: str, why: str) -> None:
    """Once per op: its time is then predicted from its bytes alone."""
    if op not in _without_formula:
        _without_formula.add(op)
        log.warning(
            "%s: its floating-point operations cannot be counted and are taken for none, so it "
            "is predicted to be as fast as its bytes allow (%s)",
            op,
            why,
        )


def _plain(value: Any) -> Any:
    """``value`` with its symbols replaced by the numbers they stood for; a tensor becomes its
    shape, since formulas take shapes."""
    if isinstance(value, torch.Tensor):
        return tuple(_torch.size_hint(n) for n in value.shape)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return _torch.size_hint(value) if isinstance(value, torch.SymInt) else value


def _is_causal(node: Node) -> bool:
    given = by_name(work_call(node))
    return True in (given.get("is_causal"), given.get("causal"))


def nodes_of(program: Program, ranks_per_node: int) -> dict[str, int]:
    """How many nodes each process group of a program spans; see :func:`nodes_spanned`.

    A group that this process does not know, as in a graph made by hand, is left out.
    """
    found = {}
    groups = dict.fromkeys(c.group for c in program.sent.values())
    for group in groups:  # in the program's order, in every process
        ranks = _torch.ranks_of_group(group)
        if ranks is not None:
            world_size = torch.distributed.get_world_size()
            found[group] = nodes_spanned(ranks, world_size, ranks_per_node)
    return found


def device_of(reading: Reading) -> torch.device:
    """The device of what a graph sends, else of its first tensor; the CPU if it has none."""
    starts = [reading.nodes[name] for name in reading.program.sent]
    nodes = (node for found in (starts, reading.nodes.values()) for node, *_ in found)
    devices = (tensor.device for node in nodes for tensor in results_of(node))
    return next(devices, torch.device("cpu"))
