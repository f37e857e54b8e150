"""What is left open in a trace: torch's symbolic shapes, behind ``simplefsdp._torch.symbolic``."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from inductor_passes.ir.cells import CellError, Symbols
from inductor_passes.size_range import ENDLESS
from simplefsdp._torch.symbolic import open_inputs, open_sizes, opened

HINTS = {"batch": 3, "seq": 10}


def traced(function, *shape) -> Graph:
    """The graph of a function of a tensor ``[batch, seq]``, as a backend of Dynamo gets it."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm.graph)
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["val"] = value
        return gm

    torch._dynamo.reset()
    with open_sizes(HINTS) as size:
        x = torch.ones([size.get(n, n) for n in shape])
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(x)
    return graphs[0]


def test_sizes_stay_open():
    graph = traced(lambda x: x + x.shape[0], "batch", "seq", 4)
    symbols, holds = opened(graph, HINTS)
    assert symbols["batch"] and symbols["seq"] and not {*symbols["batch"]} & {*symbols["seq"]}, (
        "Dynamo no longer keeps sizes open that are symbols of a FakeTensorMode's ShapeEnv"
    )
    assert not holds


def test_all_symbols_of_a_size_are_found():
    graph = traced(lambda x: x + 1, "batch", "seq", "seq")
    symbols, _ = opened(graph, HINTS)
    *sizes, x = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    batch, *seq = [size.node.expr for size in x.shape]
    assert batch in symbols["batch"] and {*seq} <= {*symbols["seq"]}
    there = {batch, *seq, *(size.node.expr for size in sizes)}
    assert sorted(there, key=str) == sorted(sum(symbols.values(), ()), key=str)


def test_what_code_asks_of_a_size_must_hold():
    def function(x):
        return x + 1 if x.shape[1] < 32 else x

    symbols, holds = opened(traced(function, "batch", "seq"), HINTS)
    assert holds, "ShapeEnv.guards moved"
    found = Symbols({"seq": symbols["seq"]}, holds)
    found.check({"seq": 31})
    with pytest.raises(CellError, match=r"seq 32: the graph was traced where seq (< 32|<= 31)"):
        found.check({"seq": 32})


def test_a_size_that_became_a_number_is_told():
    with pytest.raises(ValueError, match="batch: the model's code decides by it"):
        opened(traced(lambda x: x * [*range(9)][x.shape[0]], "batch", "seq"), HINTS)


def test_a_size_may_be_what_is_made_of_it():
    """``sym_max(size, 1)``, of which DTensor makes sizes, is the size; see ``open_sizes``."""
    from torch._functorch.aot_autograd import aot_module_simplified

    def function(x):
        return torch.ones(torch.sym_max(torch.sym_max(x.shape[0], 1), 1)) + x.sum()

    def backend(gm, inputs):
        return aot_module_simplified(gm, inputs, fw_compiler=lambda graph, _: graph.forward)

    torch._dynamo.reset()
    with open_sizes(HINTS) as size:
        x = torch.ones(size["batch"], 2)
        assert torch.compile(function, backend=backend, fullgraph=True)(x).shape[0] == size["batch"]


def dynamic_graph(function, x: torch.Tensor):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return graphs[0]


def test_open_inputs_of_a_dynamo_graph():
    x = torch.ones(6, 4)
    torch._dynamo.mark_dynamic(x, 0, min=3, max=64)
    gm = dynamic_graph(lambda x: x.sin(), x)
    ((place, size),) = open_inputs(gm).items()
    placeholders = gm.graph.find_nodes(op="placeholder")
    assert placeholders[place].meta["example_value"].node.expr == size.symbol, (
        "sizes are no longer inputs of a Dynamo graph"
    )
    assert size.name == "L['x'].size()[0]", "a size's _dynamo_source has another name"
    assert size.hint == 6, "SymInt.node.hint moved"
    assert (size.least, size.most) == (3, 64), "ShapeEnv.bound_sympy moved"


def test_what_code_asks_of_an_open_input_bounds_it():
    x = torch.ones(6, 4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    (size,) = open_inputs(dynamic_graph(lambda x: x.sin() if x.shape[0] < 9 else x, x)).values()
    assert size.most == 8, "ShapeEnv.bound_sympy no longer knows of guards"


def test_a_size_without_an_end_has_ours():
    x = torch.ones(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    (size,) = open_inputs(dynamic_graph(lambda x: x.sin(), x)).values()
    assert size.most == ENDLESS and 1 <= size.least <= 2


def test_a_graph_of_numbers_has_no_open_inputs():
    assert open_inputs(dynamic_graph(lambda x: x.sin(), torch.ones(6, 4))) == {}
