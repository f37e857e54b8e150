"""Tracing with sizes left open: torch's symbolic shapes."""

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
    """A mode of fake tensors, with a size for each of ``hints`` that a trace leaves open. A hint is
    what it is taken for where a trace must know; all must differ, by which they are found again
    (:func:`opened`)."""
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
    """Keep torch from tracing a size as what it makes of that size: it goes by formulas, and
    ``sym_max(size, 1)``, which DTensor asks for, has that of the size. To look up how it was made
    then never ends, since 2.12."""
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
    """``decompositions``, and those that leave out each slice that is all of a tensor. Where sizes
    are numbers torch makes no node of it; where they are open, one, and in backward zeros to write
    into."""
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
    """The symbols of a traced graph, by the names of ``hints``, and what was taken to hold of them.
    Dynamo traces with symbols of its own for those of :func:`open_sizes`, several for a size that
    several inputs have. A CellError names a size that became a number while it was traced."""
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
    """Which numbers of the layouts of a Dynamo graph's inputs are symbols: ranks that compile the
    same model together may have met other sizes before, and left others open."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        numbers = [value]
        if isinstance(value, torch.Tensor):
            numbers = [*value.shape, *value.stride(), value.storage_offset()]
        found.append("".join("s" if isinstance(n, torch.SymInt) else "." for n in numbers))
    return " ".join(found)


def open_inputs(gm: GraphModule) -> dict[int, OpenSize]:
    """The sizes that a Dynamo graph was traced without, by their places among its inputs; numbers
    that a user passes are among them, as they may be sizes.

    Within their bounds torch may still trace anew, where something else is asked of them.
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
