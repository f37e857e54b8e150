"""Tracing with open sizes, which are torch's symbolic shapes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true

from inductor_passes.ir.cells import CellError
from inductor_passes.size_range import ENDLESS, OpenSize
from simplefsdp._torch.dynamo import input_name


@contextmanager
def open_sizes(hints: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """A mode of fake tensors, with an open (symbolic) size for each of ``hints``. A hint is the
    number that a trace uses where it needs one. All hints must differ, since :func:`opened` finds
    the sizes by them."""
    env = ShapeEnv()
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        found[name] = env.create_symintnode(symbol, hint=hint, source=source)
    with (
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=env),
        _sizes_are_not_made_of_themselves(),
    ):
        yield found


@contextmanager
def _sizes_are_not_made_of_themselves() -> Iterator[None]:
    """Keep torch from recording a size as computed from itself. The tracer identifies sizes by
    their formulas, and ``sym_max(size, 1)``, which DTensor calls, has the formula of ``size``.
    Since 2.12 the tracer's search for how the size was made would then never end."""
    dispatch = ProxyTorchDispatchMode.__sym_dispatch__

    def dispatched(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        sizes = [argument for argument in args if isinstance(argument, torch.SymInt)]
        made = func(*args, **kwargs) if sizes else None
        if isinstance(made, torch.SymInt):
            for size in sizes:
                if size.node.expr == made.node.expr:
                    return size
        return dispatch(mode, func, types, args, kwargs)

    with patch.object(ProxyTorchDispatchMode, "__sym_dispatch__", dispatched):
        yield


def without_whole_slices(decompositions: Mapping[Any, Any]) -> dict[Any, Any]:
    """``decompositions``, and two more that remove each slice that takes the whole tensor. If sizes
    are numbers, torch makes no node for such a slice; if they are open it makes one, and in
    backward zeros into which the gradient is written."""
    aten = torch.ops.aten
    of_gradient = decompositions.get(aten.slice_backward.default)

    def slice_(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
        return x if _is_whole(x.shape[dim], start, end, step) else NotImplemented

    def slice_backward(grad: Any, sizes: Any, dim: int, start: Any, end: Any, step: Any) -> Any:
        if _is_whole(sizes[dim], start, end, step):
            return grad
        if of_gradient is None:
            return NotImplemented
        return of_gradient(grad, sizes, dim, start, end, step)

    ours = {aten.slice.Tensor: slice_, aten.slice_backward.default: slice_backward}
    return {**decompositions, **ours}


def _is_whole(size: Any, start: Any, end: Any, step: Any) -> bool:
    if not isinstance(step, int) or step != 1 or not (start is None or _is_known(start == 0)):
        return False
    to_the_end = end is None or (isinstance(end, int) and end == sys.maxsize)
    return to_the_end or _is_known(end >= size)


def _is_known(holds: Any) -> bool:
    return bool(statically_known_true(holds))


def opened(
    graph: Graph, hints: Mapping[str, int]
) -> tuple[dict[str, tuple[sympy.Symbol, ...]], frozenset[sympy.Basic]]:
    """The symbols of a traced graph, by the names of ``hints``, and the conditions that the trace
    assumes of them. Dynamo replaces the symbols of :func:`open_sizes` by its own, several if
    several inputs have that size. A CellError names a size that tracing turned into a number."""
    symbols: dict[int, dict[sympy.Symbol, None]] = {}
    holds: set[sympy.Basic] = set()
    for size in _sizes_of_inputs(graph):
        symbols.setdefault(int(size.node.hint), {})[size.node.expr] = None
        holds.update(guard.expr for guard in size.node.shape_env.guards)
    for name, hint in hints.items():
        if hint not in symbols:
            raise CellError(
                f"{name}: the model's code decides by it, so that the trace is of {name} {hint} "
                "alone"
            )
    return {name: tuple(symbols[hint]) for name, hint in hints.items()}, frozenset(holds)


def _sizes_of_inputs(graph: Graph) -> Iterator[Any]:
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    yield size


def open_layouts(gm: GraphModule) -> str:
    """Which numbers in the layouts of a Dynamo graph's inputs are symbols (``s``), as text. Ranks
    that compile the same model may have seen different sizes before, and so have other symbols."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        numbers = [value]
        if isinstance(value, torch.Tensor):
            numbers = [*value.shape, *value.stride(), value.storage_offset()]
        found.append("".join("s" if isinstance(n, torch.SymInt) else "." for n in numbers))
    return " ".join(found)


def open_inputs(gm: GraphModule) -> dict[int, OpenSize]:
    """The open sizes of a Dynamo graph, by their index among its inputs. Symbolic numbers that the
    user passes are included, as they may be sizes.

    torch may still retrace for a size within these bounds, if another guard on it fails.
    """
    found = {}
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymInt) or not isinstance(value.node.expr, sympy.Symbol):
            continue
        symbol, env, hint = value.node.expr, value.node.shape_env, getattr(value.node, "hint", None)
        if env is not None and hint is not None and hint > 0:  # else it is no size
            bounds = env.bound_sympy(symbol)  # of a number that is no size there may be none
            if bounds is None:  # a number that stands for the lengths of a nested tensor's parts
                continue
            least, most = (int(min(max(end, 1), ENDLESS)) for end in (bounds.lower, bounds.upper))
            name = input_name(node) or str(symbol)
            found[place] = OpenSize(symbol, name, int(hint), least, most)
    return found
