"""Compute times of the ops of an FX graph: the roofline, op by op, fusion not considered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from inductor_passes import _torch
from inductor_passes.cost import LinearCost
from inductor_passes.fx import Reading


@dataclass(frozen=True)
class Device:
    """What the prediction in the log line assumes of a kind of device; all of it estimated.

    Attributes:
        name: for messages.
        tflops: 1e12 floating-point operations per second that a large matmul reaches.
        cost: links, memory and launches.
    """

    name: str
    tflops: float
    cost: LinearCost


DEVICES = {
    # Two cores with AVX-512 and gloo over loopback, orders of magnitude only.
    "cpu": Device(
        "2 CPU cores with gloo, roughly",
        0.1,
        LinearCost(latency_us=200, link_gb_s=1, memory_gb_s=10, launch_us=2),
    ),
    # 8 H100 of one node: LinearCost's sources, and 80 % of the dense bf16 peak of 989.
    "cuda": Device("8 H100 of one node, roughly", 790.0, LinearCost()),
}


def cost_of(reading: Reading, device: Device) -> LinearCost:
    """A cost model that knows the floating-point operations of the ops that were read."""
    op_us = {}
    for op in reading.program.ops:
        flops = _flops(reading.nodes[op.name][0]) if op.kind == "compute" else 0
        if flops:
            by_bytes = device.cost.compute_us(reading.program, op)
            op_us[op.name] = max(by_bytes, flops / (device.tflops * 1e6))
    return replace(device.cost, op_us=op_us)


def device_of(reading: Reading) -> Device:
    """The device of the first tensor in the graph that has an entry; a CPU if none has."""
    for nodes in reading.nodes.values():
        value = nodes[0].meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type in DEVICES:
            return DEVICES[value.device.type]
    return DEVICES["cpu"]


def _flops(node: Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is None:
        return 0
    inputs = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if any(not isinstance(n, int) for t in inputs if isinstance(t, torch.Tensor) for n in t.shape):
        return 0  # to compute with a symbol could guard on it, on this rank alone
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        return _torch.size_hint(count(*args, **kwargs, out_val=node.meta.get("val")))
    except Exception:
        return 0  # a formula that does not fit this overload: the bytes decide
