"""A deep model's step made of a shallow one's: the same as the one that is traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from inductor_passes.adapters import fx
from inductor_passes.adapters.roofline import cost_of
from inductor_passes.ir.program import Program
from inductor_passes.machine.presets import preset
from inductor_passes.machine.simulate import memory
from simplefsdp import _torch, simple_fsdp
from simplefsdp.frontend.placement import local_nbytes
from simplefsdp.inspection.modules import modules_of_step
from simplefsdp.provenance import carried_fqn as fqn_of
from simplefsdp.simulation.extrapolate_depth import SHALLOW, deepen, trace_deep
from simplefsdp.simulation.trace import TracedStep, trace

DEPTH = SHALLOW + 2


class _Attention(nn.Module):
    """A layer as Llama has them, with half of the parameters: it is traced in half of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.q, self.kv = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        projected = (self.q(h), *self.kv(h).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in projected)
        h = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
        return x + self.out(h.transpose(1, 2).flatten(2))


class _Transformer(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(_Attention() for _ in range(depth))
        self.register_buffer("turn", torch.empty(4, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        return x


def _transformer(mesh, depth: int) -> tuple[TracedStep, nn.Module]:
    torch._dynamo.reset()
    split = {**dict.fromkeys(["q", "kv"], ColwiseParallel()), "out": RowwiseParallel()}
    with torch.device("meta"):
        model = _Transformer(depth)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], split)
    simple_fsdp(model, mesh["dp"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        return trace(model, torch.zeros(2, 4, dtype=torch.long)), model


def _canonical(program: Program) -> tuple[list[object], dict[str, int]]:
    """Ops with their buffers by the order in which they come up, and that order."""
    order: dict[str, int] = {}

    def known(names: Sequence[str]) -> list[tuple[int, int, int]]:
        found = []
        for name in names:
            at = order.setdefault(name, len(order))
            buffer = program.buffers[name]
            storage = order.setdefault(buffer.storage, len(order))
            found.append((at, storage, buffer.nbytes))
        return found

    return [
        (op.kind, known(op.reads), known(op.writes), op.collective) for op in program.ops
    ], order


def _same(deep: TracedStep, whole: TracedStep) -> None:
    assert deep.fqns == whole.fqns
    modules, cluster = [modules_of_step(step) for step in (deep, whole)], preset("h100")
    orders: dict[str, list[dict[str, int]]] = {}
    for name in ("forward", "backward"):
        readings = [fx.read(getattr(step, name).graph, fqn_of) for step in (deep, whole)]
        (ours, our_order), (theirs, their_order) = [_canonical(r.program) for r in readings]
        assert ours == theirs
        orders[name] = [our_order, their_order]
        assert memory(readings[0].program).live_nbytes == memory(readings[1].program).live_nbytes
        for key in ("outputs", "resident"):
            ends = [
                sorted(order[n] for n in getattr(r.program, key) if n in order)
                for r, order in zip(readings, orders[name], strict=True)
            ]
            assert ends[0] == ends[1], key
        found = [
            [modules[i][name].get(op.name) for op in r.program.ops] for i, r in enumerate(readings)
        ]
        assert found[0] == found[1]
        works = [
            [cost.work.get(op.name) for op in r.program.ops]
            for r in readings
            for cost in [cost_of(r, cluster)]
        ]
        assert works[0] == works[1] and any(works[0])
    passed = []
    for i, step in enumerate((deep, whole)):
        forward, backward = orders["forward"][i], orders["backward"][i]
        gets = [n.name for n in step.backward.graph.nodes if n.op == "placeholder" and n.users]
        passed.append(sorted((backward[n], forward[n]) for n in gets if n in forward))
    assert passed[0] == passed[1] and len(passed[0]) > DEPTH  # by what forward calls it


def _storages(gm) -> list[int | None]:
    found = [_torch.storage_of(n.meta.get("val")) for n in gm.graph.nodes if n.users]
    first: dict[int | None, int] = {}
    return [first.setdefault(storage, len(first)) for storage in found]


@pytest.mark.slow
def test_it_is_the_step_that_is_traced(fake_mesh):
    mesh = fake_mesh(4, 2, names=("dp", "tp"))
    _compare(lambda depth: _transformer(mesh, depth), SHALLOW + 1)


def _compare(traced: Callable[[int], tuple[TracedStep, nn.Module]], depth: int = DEPTH) -> None:
    shallow, small = traced(SHALLOW)
    step, model = traced(depth)
    whole = deepen(step, "layers", depth)  # which moves aliases, and nothing else
    for ours, theirs in zip(whole[:2], step[:2], strict=True):
        counts = [
            Counter(str(n.target) for n in gm.graph.nodes if n.users) for gm in (ours, theirs)
        ]
        assert {k: v for k, v in counts[0].items() if "primals" not in k} == {
            k: v for k, v in counts[1].items() if "primals" not in k
        }
    deep, nbytes = trace_deep(lambda _: (shallow, small), "layers", depth)
    assert nbytes == local_nbytes(model.parameters())
    _same(deep, whole)
    for ours, theirs in zip(deep[:2], whole[:2], strict=True):
        # Who tracks memory goes by storages: those of copies are their own.
        assert len(set(_storages(ours))) == len(set(_storages(theirs))) > len(whole.fqns)


def test_too_shallow(fake_mesh):
    step, model = _stack(fake_mesh(8), [16] * 2)
    with pytest.raises(ValueError, match="layers: the traced step has 2 layers with parameters"):
        deepen(step, "layers", DEPTH)
    with pytest.raises(ValueError, match="blocks: the traced step has 0 layers"):
        deepen(step, "blocks", DEPTH)
    assert trace_deep(lambda _: (step, model), "layers", 2)[0] is step


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class _Stack(nn.Module):
    def __init__(
        self,
        widths: Sequence[int],
        twice: bool = False,
        order: Sequence[int] | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Layer, widths))
        self.twice, self.recompute = twice, recompute
        self.order = order or range(len(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for i in self.order:
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            seen.append(x)
        return x + seen[2] if self.twice else x


def _wrapped(mesh, widths: Sequence[int], reshard: bool = True, **how) -> nn.Module:
    with torch.device("meta"):
        model = _Stack(widths, **how)
    mode = "fully_shard" if mesh.ndim == 1 else "hybrid_shard"
    return simple_fsdp(model, mesh, mode=mode, reshard_after_forward=reshard)


def _stack(mesh, widths: Sequence[int], **how) -> tuple[TracedStep, nn.Module]:
    torch._dynamo.reset()
    model = _wrapped(mesh, widths, **how)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        return trace(model, torch.ones(2, 8)), model


@pytest.mark.slow
def test_hybrid_and_checkpointed(fake_mesh):
    mesh = fake_mesh(4, 2, names=("replicate", "shard"))
    _compare(lambda depth: _stack(mesh, [16] * depth, recompute=True), SHALLOW + 1)


@pytest.mark.slow
def test_kept_from_forward_to_backward(fake_mesh):
    mesh = fake_mesh(8)
    _compare(lambda depth: _stack(mesh, [16] * depth, reshard=False))


def test_what_comes_behind_may_not_look_into_the_middle(fake_mesh):
    step, _ = _stack(fake_mesh(8), [16] * SHALLOW, twice=True)
    with pytest.raises(ValueError, match="behind the layers, refers to one in the middle"):
        deepen(step, "layers", DEPTH)


@pytest.mark.slow(quick=["order1-one behind"])
@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((1, 0, 2, 3, 4, 5, 6), None),
        ((0, 2, 4, 3, 1, 5, 6), "one behind"),
    ],
)
def test_layers_in_another_order(fake_mesh, order, message):
    """Those in the middle are in order, or it is refused."""
    step, _ = _stack(fake_mesh(8), [16] * SHALLOW, order=order)
    if message is None:
        deep = deepen(step, "layers", DEPTH)
        assert len(deep.fqns) == len(set(deep.fqns)) == DEPTH * 3
        with pytest.raises(ValueError, match="the traced step has 7 layers already, not 6"):
            deepen(step, "layers", SHALLOW - 1)
    else:
        with pytest.raises(ValueError, match=message):
            deepen(step, "layers", DEPTH)


@pytest.mark.slow
def test_layers_that_are_not_alike_are_traced(fake_mesh, caplog):
    mesh, widths = fake_mesh(8), [16, 16, 16, 16, 16, 24, 16, 8]
    with caplog.at_level("WARNING", "simplefsdp"):
        step, nbytes = trace_deep(lambda n: _stack(mesh, widths[:n]), "layers", len(widths))
    assert "layers are not alike in the traced graph" in caplog.text
    assert "tracing all 8 layers" in caplog.text
    model = _wrapped(mesh, widths)
    assert len(step.fqns) == 3 * len(widths) and nbytes == local_nbytes(model.parameters())
