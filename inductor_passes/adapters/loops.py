"""Which nodes of a graph Inductor fuses, and what they touch: torch's operators as the loops of
:mod:`inductor_passes.machine.fusion`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.adapters import _torch
from inductor_passes.adapters._torch_calls import call_of, name_of
from inductor_passes.machine.fusion import Loop, Reduces

# fmt: off
# Loops that torch does not tag as pointwise: they copy, make or select elements.
_COPIES = {
    "aten::arange", "aten::cat", "aten::constant_pad_nd", "aten::copy", "aten::copy_",
    "aten::empty", "aten::fill", "aten::flip", "aten::full", "aten::full_like", "aten::repeat",
    "aten::roll", "aten::scalar_tensor", "aten::stack", "aten::tril", "aten::triu",
    "prims::broadcast_in_dim", "prims::inductor_random", "prims::inductor_randint", "prims::iota",
}
_REDUCTIONS = {"aten::logsumexp", "aten::var_mean", "prims::prepare_softmax_online"}
# Ops that read as much of a table as they return; and ops that write into a table they are given.
_LOOKUPS = {
    "aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take",
    "aten::_unsafe_index", "aten::_unsafe_masked_index",
}
_UPDATES = {
    "aten::index_add", "aten::index_copy", "aten::index_put", "aten::index_put_", "aten::scatter",
    "aten::scatter_add", "aten::scatter_reduce", "aten::select_scatter", "aten::slice_scatter",
    "aten::_unsafe_index_put", "aten::_unsafe_masked_index_put_accumulate",
}
# What Inductor does not do twice on a CPU. (There it also stores what `cat` makes.)
_HEAVY_ON_CPU = {
    "aten::exp", "aten::log", "aten::log10", "aten::log1p", "aten::log2", "aten::sigmoid",
    "aten::tanh",
}
# Ops that fill this rank's part of a buffer which a gather will fill.
_FILLS_PART = {"bucketing::_pre_bucket_all_gather", "fsdp::all_gather_copy_in"}
# fmt: on
_UNROLLED = 8  # Inductor unrolls reductions of so few elements: they are pointwise


def loop_of(node: Node) -> Loop | None:
    """The loop that a node is for the fusion rule; None if it needs a kernel of its own."""
    if not _torch.is_op(node):
        return None
    name, tags = name_of(node), node.target.tags  # type: ignore[union-attr]
    result = max(map(_numel, results_of(node)), default=0)
    if torch.Tag.reduction in tags or name in _REDUCTIONS:
        source = max(map(_numel, inputs_of(node)), default=0)
        if source <= _UNROLLED * result:
            return Loop(result, result)
        return Loop(source, result, _reduces(node, result))
    if torch.Tag.pointwise in tags or name in _COPIES or name in _LOOKUPS or _is_one_hot(node):
        moves = name in _COPIES or name in _LOOKUPS or name == "aten::clone"
        on_cpu = is_on_cpu(node)
        heavy = on_cpu and name in _HEAVY_ON_CPU
        stored = (on_cpu and name == "aten::cat") or _torch.is_stored(node)
        return Loop(result, result, elementwise=not moves, heavy=heavy, stored=stored)
    return None


def is_lookup(node: Node) -> bool:
    """Whether a node reads as much of a table as it returns."""
    return _torch.is_op(node) and name_of(node) in _LOOKUPS


def is_on_cpu(node: Node) -> bool:
    """Whether the first result of a node is on the CPU."""
    return any(value.device.type == "cpu" for value in results_of(node)[:1])


def _is_one_hot(node: Node) -> bool:
    """Whether a node writes one number into a row of a constant, as the loss's gradient does:
    Inductor compares positions instead."""
    if name_of(node) != "aten::scatter" or len(node.args) != 4:
        return False
    table, dim, index, value = node.args
    if not (isinstance(table, Node) and isinstance(dim, int) and isinstance(index, Node)):
        return False
    size = index.meta["val"].shape[dim]
    one = isinstance(size, int) and size == 1  # an open size is not compared, to add no guard
    return one and name_of(table) == "aten::full" and not isinstance(value, Node)


def _reduces(node: Node, result: int) -> Reduces:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    given = dims if isinstance(dims, (list, tuple)) else [dims]
    ndim = next(v.dim() for v in inputs_of(node))
    last = any(isinstance(d, int) and d % ndim == ndim - 1 for d in given)
    return "inner" if last and result > 1 else "outer"


def touches_of(node: Node) -> int | None:
    """Bytes that an op touches of a table; None if it reads and writes whole buffers."""
    if not _torch.is_op(node):
        return None
    name = name_of(node)
    if name in _LOOKUPS:
        return nbytes_of(node)
    if name in _FILLS_PART:
        parts: Any = node.args[0]
        return sum(map(nbytes_of, parts))
    if name not in _UPDATES or _is_one_hot(node):
        return None
    table = node.args[0]
    if not isinstance(table, Node) or table.op == "placeholder" or len(table.users) > 1:
        return None  # the old value is needed: the table is copied first
    given = [n for n in node.all_input_nodes if n is not table]
    return max(map(nbytes_of, given), default=0)


def nbytes_of(node: Node) -> int:
    """Bytes of all tensors that a node makes."""
    return sum(map(_nbytes, results_of(node)))


def results_of(node: Node) -> list[torch.Tensor]:
    """The tensors that a node makes."""
    return tensors_of(node.meta.get("val"))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a traced value, of lists inside lists, too."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def inputs_of(node: Node) -> list[torch.Tensor]:
    """The tensors that a node's operator is called with."""
    call = call_of(node)
    found: dict[Node, None] = {}
    torch.fx.node.map_arg((call.args, call.kwargs), found.setdefault)
    return [value for source in found for value in results_of(source)]


def _numel(value: torch.Tensor) -> int:
    return math.prod(_torch.size_hint(n) for n in value.shape)


def _nbytes(value: torch.Tensor) -> int:
    return _numel(value) * value.element_size()
