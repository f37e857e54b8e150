"""Writes to inputs by regions: the update of a training step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from inductor_passes.adapters import _torch
from inductor_passes.adapters.in_place import write_inputs_early
from inductor_passes.executor.regional import Codes, compile_by_regions
from inductor_passes.executor.regions import Region, cut, structure_of

_copy = torch.ops.aten.copy_.default


def traced(function, *inputs):
    """The graph of ``function``, whose results but for the last go to its first inputs."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    output = gm.graph.output_node()
    *written, result = output.args[0]
    with gm.graph.inserting_before(output):
        for target, value in zip(gm.graph.find_nodes(op="placeholder"), written, strict=False):
            copy = gm.graph.call_function(_copy, (target, value))
            copy.meta["val"] = target.meta["val"]
    output.args = ((result,),)
    write_inputs_early(gm.graph, lambda value: True)
    gm.recompile()
    return gm


def sgd(first, second, momentum, other, grad, second_grad):
    """Two parameters' updates, with momentum; what is written comes first."""
    momentum, other = momentum * 0.9 + grad, other * 0.9 + second_grad
    first, second = first - momentum * 0.1, second - other * 0.1
    return first, second, momentum, other, grad + second_grad


def check(gm, inputs) -> list[str]:
    """That regions compute and write what the graph does; gives what runs."""
    wanted, found = ([value.clone() for value in inputs] for _ in range(2))
    results = gm(*wanted), compile_by_regions(gm, Codes(), is_backward=True)(list(found))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(wanted, found)
    return ["region" if isinstance(p, Region) else str(p.target) for p in cut(gm.graph)]


def test_each_parameter_is_a_region_and_all_are_one_structure():
    inputs = [torch.rand(3, 4) for _ in range(6)]
    gm = traced(sgd, *inputs)
    assert check(gm, inputs) == ["region", "region", "aten.add.Tensor"]
    first, second, _ = cut(gm.graph)
    assert structure_of(first) == structure_of(second) and not first.outputs
    assert sum(node.target is _copy for node in first.nodes) == 2


def test_what_reads_an_input_comes_before_what_writes_there():
    """Each input's new value is made of the other."""

    def function(x, y, other):
        return y * 2 + 1, (x + 3).relu(), other @ other

    inputs = list(torch.rand(3, 3, 3))
    assert check(traced(function, *inputs), inputs) == ["region", "aten.mm.default"]


def test_what_is_written_in_between_is_read_before():
    """``x`` is written to twice: its double, of before, is not made where the sum is."""

    def function(x, other):
        double = x * 2
        made = torch.ops.aten.add_.Tensor(x, 1)
        torch.ops.aten.copy_.default(other, made * 3 + double)
        return (other @ other,)

    gm = make_fx(function, tracing_mode="fake")(torch.rand(3, 3), torch.rand(3, 3))
    for node in gm.graph.nodes:  # as a graph has it in which nobody reads what a write gives
        for target in _torch.mutated_arguments(node):
            node.replace_all_uses_with(target)
    gm.recompile()
    check(gm, [torch.rand(3, 3), torch.rand(3, 3)])


def test_what_is_random_keeps_its_order():
    """Of two parts of an update: the one that begins first draws last."""

    def function(x, y, other):
        begun, drawn = x * 2, torch.poisson(y * 2)
        return begun + torch.poisson(begun), drawn + 1, other @ other

    gm = traced(function, *torch.rand(3, 3, 3))
    drawn = [
        n.name for p in cut(gm.graph) for n in getattr(p, "nodes", (p,)) if "poisson" in n.name
    ]
    assert drawn == ["poisson", "poisson_1"]


def test_a_number_that_all_take_is_made_in_front():
    """A factor that clips, of all gradients: it joins them, but not their updates."""

    def function(x, y, grad, other):
        factor = (grad.sum() + other.sum()).reciprocal()
        return x - grad * factor, y - other * factor, grad @ other

    inputs = list(torch.rand(4, 3, 3))
    gm = traced(function, *inputs)
    check(gm, inputs)
    written = [
        sum(node.target is _copy for node in p.nodes)
        for p in cut(gm.graph)
        if isinstance(p, Region)
    ]
    assert sorted(written) == [0, 1, 1]


@pytest.mark.parametrize("viewed", ["itself", "by a region before"])
def test_what_there_are_views_of_is_written_by_itself(viewed):
    def function(x, y):
        flat = x.view(4, 3)
        new = (y * 2 + 1).relu()
        if viewed == "itself":
            return new, (flat + 3).relu()
        return new, ((flat + 3).relu() @ x).relu() + 1

    inputs = [torch.rand(3, 4), torch.rand(3, 4)]
    assert str(_copy) in check(traced(function, *inputs), inputs)


def test_what_only_an_update_reads_is_made_there():
    """Not in front of the wait, where the plan has put it: it would be stored till then."""
    ops = torch.ops._c10d_functional

    def function(momentum, grad, other):
        sent = ops.all_reduce(grad, "sum", "0")
        decayed, again = momentum * 0.9, other * 0.9
        product = again @ again
        reduced = ops.wait_tensor(sent)
        return decayed + reduced + again, product

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        gm = traced(function, *torch.rand(3, 3, 3))
    finally:
        dist.destroy_process_group()
    pieces = cut(gm.graph)
    made = [[n.name for n in (p.nodes if isinstance(p, Region) else (p,))] for p in pieces]
    wait = made.index(["wait_tensor"])
    before, behind = ({n for names in part for n in names} for part in (made[:wait], made[wait:]))
    assert "mul" in behind and "mul" not in before
    assert "mul_1" in before  # which the product needs, too
