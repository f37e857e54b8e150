"""Layers that are alike are traced once, where they are: what is computed stays the same."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from graphs import no_kernels
from torch import nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from simplefsdp import simple_fsdp
from simplefsdp._torch.exact import exactly
from simplefsdp.compiler import lengthen, shorten
from simplefsdp.compiler.observers import observing

DIM, DEPTH = 9, 8
LEFT_OUT = DEPTH - shorten.HEAD - 1 - shorten.TAIL
ALONE = LEFT_OUT - 1
"""Layers left out on one rank, where no layer's backward begins with a gather."""


class Layer(nn.Module):
    """A layer as most are, with an input that all share and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x, mask):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * mask * self.scale


class Model(nn.Module):
    def __init__(self, depth: int = DEPTH, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Checkpointed(Layer):
    def forward(self, x, mask):
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class TwoAtATime(Layer):
    """Two tensors go from layer to layer."""

    def forward(self, x, mask):
        x, rest = x if isinstance(x, tuple) else (x, x * 2)
        return super().forward(rest, mask), x * self.scale


class EndsTwo(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[0] + x[1])


class Adds(Layer):
    """What was made before is written to."""

    def forward(self, x, mask):
        return super().forward(x.mul_(0.9), mask)


class Normed(Layer):
    """A buffer of the layer is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(DIM)

    def forward(self, x, mask):
        return super().forward(self.batch_norm(x), mask)


class NoCount(Normed):
    """Nothing tells that buffers are written to, but what forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm.num_batches_tracked = None
        self.batch_norm.momentum = 0.1


class Drops(Layer):
    def forward(self, x, mask):
        return F.dropout(super().forward(x, mask), 0.5)


class DropsTwice(Layer):
    def forward(self, x, mask):
        return F.dropout(x, 0.5) + F.dropout(super().forward(x, mask), 0.2)


class DropsAgain(Drops):
    def forward(self, x, mask):
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class DropsAround(Model):
    """Numbers are drawn ahead of the layers, and behind them."""

    def forward(self, x):
        x, mask = F.dropout(self.embed(x), 0.5), x.gt(0.5)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(F.dropout(x, 0.3))


class EndsInBias(Layer):
    """Its last gradient on one rank stands among the nodes of the layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(DIM))

    def forward(self, x, mask):
        return super().forward(x, mask) * self.scale + self.bias


class Signed(Layer):
    """A number tells layers apart that is equal to that of the others."""

    zero = 0.0

    def forward(self, x, mask):
        return super().forward(x, mask).copysign(torch.full_like(x, self.zero))


def one_negative(model: Model) -> Model:
    model.layers[4].zero = -0.0
    return model


@torch.compiler.allow_in_graph
def in_order(given=None, **named):
    """Each value counts by its place among the others."""
    values = (named if given is None else given).values()
    return sum(place * value for place, value in enumerate(values, 1))


class Ordered(Layer):
    """The order of what is given by name tells layers apart."""

    names = ("x", "mask")
    as_dict = False

    def forward(self, x, mask):
        both = {"x": super().forward(x, mask), "mask": mask}
        given = {name: both[name] for name in self.names}
        return in_order(given) if self.as_dict else in_order(**given)


def one_reversed(model: Model, as_dict: bool) -> Model:
    model.layers[4].names = ("mask", "x")
    for layer in model.layers:
        layer.as_dict = as_dict
    return model


class Chooses(Layer):
    """An operator takes graphs, which have other names in each layer."""

    def forward(self, x, mask):
        twice, half = (lambda x: x * 2.0), (lambda x: x * 0.5)
        return super().forward(torch.cond(x.sum() > 0, twice, half, (x,)), mask)


class PostNorm(Layer):
    """As BERT's: what a layer gives is normed, and the next one begins with a product."""

    def forward(self, x, mask):
        return self.norm(x + self.down(F.gelu(self.up(x))) * mask * self.scale)


class Windowed(Layer):
    """Layers of two kinds take turns, as those that attend to a window and to all."""

    window = False

    def forward(self, x, mask):
        return super().forward(x.tanh() if self.window else x, mask)


def in_turns(model: Model, period: int) -> Model:
    for i, layer in enumerate(model.layers):
        layer.window = i % period > 0
    return model


class ByPolicy(Layer):
    """What is kept is said by a function, which may count layers."""

    def forward(self, x, mask):
        keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        run = super().forward
        return checkpoint(run, x, mask, use_reentrant=False, context_fn=keep)


class Unused(Model):
    def forward(self, x):
        result = self.head(self.embed(x))
        super().forward(x)
        return result


class NothingToLearn(Model):
    def forward(self, x):
        return super().forward(x).detach()


class Routed(Layer):
    """A size depends on data."""

    def forward(self, x, mask):
        return super().forward(x, mask) + mask.nonzero().shape[0]


class ThenOthers(Model):
    """A second list, whose name ends as that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.post = nn.Module()
        self.post.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        x = super().forward(x)
        for layer in self.post.layers:
            x = layer(x)
        return x


class ReturnsAll(Model):
    def forward(self, x):
        x, mask, seen = self.embed(x), x.gt(0.5), []
        for layer in self.layers:
            x = layer(x, mask)
            seen.append(x.sum())
        return self.head(x) + torch.stack(seen).sum()


class ReturnsEach(Model):
    """As Hugging Face's language models give back what layers have in their caches."""

    def forward(self, x):
        x, mask, seen = self.embed(x), x.gt(0.5), []
        for layer in self.layers:
            x = layer(x, mask)
            seen.append(self.of(x))
        return self.head(x), seen

    def of(self, x):
        return x.sin()


class ReturnsLosses(ReturnsEach):
    def of(self, x):
        return x.square().mean()


class StartsAtOne(Model):
    """What a list's first member is for, comes last."""

    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for layer in (*self.layers[1:], self.layers[0]):
            x = layer(x, mask)
        return self.head(x)


def another(model: Model) -> Model:
    model.layers[4] = TwoTimes()
    return model


def wide_first(model: Model) -> Model:
    """As of DeepSeek-V3 the first layers are no mixtures of experts."""
    for layer in model.layers[:3]:
        layer.up, layer.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM, bias=False)
    return model


class TwoTimes(Layer):
    def forward(self, x, mask):
        return 2 * super().forward(x, mask)


def adapters(model: Model) -> Model:
    """As adapters are trained: of the layers one matrix each, and nothing ahead of them."""
    model.embed.requires_grad_(False)
    for layer in model.layers:
        layer.norm.requires_grad_(False)
        layer.up.requires_grad_(False)
    return model


def frozen(model: Model) -> Model:
    model.embed.requires_grad_(False)
    model.layers.requires_grad_(False)
    return model


def tied(model: Model) -> Model:
    for layer in model.layers:
        layer.down.weight = model.layers[0].down.weight
    return model


# What a model is, and how many of its layers are left out.
CASES = {
    "plain": (Model, ALONE),
    "checkpointed": (lambda: Model(layer=Checkpointed), ALONE),
    "two tensors": (lambda: EndsTwo(layer=TwoAtATime), 0),
    "adapters": (lambda: adapters(Model()), 0),
    "frozen": (lambda: frozen(Model()), 0),
    "in place": (lambda: Model(layer=Adds), 0),
    "written buffers": (lambda: Model(layer=Normed), 0),
    "buffers without count": (lambda: Model(layer=NoCount), 0),
    "dropout": (lambda: Model(layer=Drops), ALONE),
    "a bias last": (lambda: Model(layer=EndsInBias), ALONE),
    "graphs": (lambda: Model(layer=Chooses), ALONE),
    "each is returned": (ReturnsAll, 0),
    "one is another": (lambda: another(Model(depth=10)), 0),
    "the first comes last": (StartsAtOne, 0),
    "wide first": (lambda: wide_first(Model(depth=DEPTH + 2)), ALONE),
    "tied": (lambda: tied(Model(depth=DEPTH + 1)), ALONE),
    "one sign": (lambda: one_negative(Model(layer=Signed)), 0),
    "one order of names": (lambda: one_reversed(Model(layer=Ordered), False), 0),
    "one order of a dict": (lambda: one_reversed(Model(layer=Ordered), True), 0),
    "policy": (lambda: Model(layer=ByPolicy), 0),
    "unused": (Unused, 0),
    "two lists": (ThenOthers, 0),
    "in turns": (lambda: in_turns(Model(2 * DEPTH + 1, Windowed), 2), 2 * ALONE),
    "out of turn": (lambda: in_turns(Model(DEPTH, Windowed), 2), 0),
    "few": (lambda: Model(depth=DEPTH - ALONE + 1), 0),
}


def step(model: nn.Module, x: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    """The numbers of a compiled model."""
    torch._dynamo.reset()
    options = {"executor": "aot_eager", "bucketing": "manual", **options}
    run = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
    return numbers(model, x, run)


def numbers(model: nn.Module, x: torch.Tensor, run: Callable | None = None):
    """Two steps' losses, gradients and buffers; op by op, unless ``run`` is compiled."""
    torch.manual_seed(1)
    run = model if run is None else run
    losses = [run(x).square().sum() for _ in range(2)]
    torch.stack(losses).sum().backward()
    grads = {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses).detach(), **grads, **dict(model.named_buffers())}


def step_of_all(model: nn.Module, x: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    """The numbers of a model all of whose layers are traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shorten, "LEAST", 1 << 20)
        return step(model, x, **options)


def left_out(text: str) -> int:
    found = re.search(r"(\d+) layers were not traced", text)
    return int(found[1]) if found else 0


@pytest.mark.slow(quick=["checkpointed"])
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_all_layers_do(solo_mesh, caplog, case):
    make, expected = CASES[case]
    plain, x = make(), torch.rand(4, DIM)
    caplog.set_level(logging.DEBUG, "simplefsdp")
    few = step(simple_fsdp(copy.deepcopy(plain), solo_mesh), x)
    assert left_out(caplog.text) == expected
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    # Op by op, the gradients of what all layers share are added up in another order.
    all_ = step_of_all(model, x) if case == "tied" else numbers(model, x)
    assert few.keys() == all_.keys()
    for name, value in all_.items():
        torch.testing.assert_close(few[name], value, rtol=0, atol=0, msg=name)


def test_an_output_without_gradient_has_no_stand_in(solo_mesh):
    plain, x = NothingToLearn(), torch.rand(4, DIM)
    torch._dynamo.reset()
    options = {"executor": "aot_eager", "bucketing": "manual"}
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    compiled = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


@pytest.mark.slow(quick=["PostNorm"])
@pytest.mark.parametrize("layer", [PostNorm, Chooses])
def test_as_inductor_cuts(fake_mesh, caplog, layer):
    """What its decompositions make for backward stands at the end of forward."""
    caplog.set_level(logging.DEBUG, "simplefsdp")
    model, x = simple_fsdp(Model(layer=layer), fake_mesh(2)), torch.rand(2, 4, DIM)
    with no_kernels():
        step(model, x, executor="regions")
    assert left_out(caplog.text) == LEFT_OUT


@pytest.mark.slow
def test_what_each_layer_returns_is_said_to_cost(fake_mesh, caplog):
    shorten._warn_of_outputs.cache_clear()
    options = {"executor": "aot_eager", "bucketing": "manual"}
    mesh = fake_mesh(2)
    model = simple_fsdp(ReturnsLosses(), mesh)
    model.compile(backend="simplefsdp", options=options)
    torch.stack(model(torch.rand(4, DIM))[1]).sum().backward()
    torch._dynamo.reset()
    model = simple_fsdp(ReturnsEach(), mesh)
    model.compile(backend="simplefsdp", options=options)
    with torch.no_grad():
        model(torch.rand(4, DIM))  # to generate, caches are what is wanted
    assert "use_cache" not in caplog.text
    for _ in range(2):
        model(torch.rand(4, DIM))[0].sum().backward()
        torch._dynamo.reset()
    assert caplog.text.count("layers: forward returns activations of each layer") == 1


@pytest.mark.slow
def test_sizes_that_depend_on_data(solo_mesh, caplog):
    caplog.set_level(logging.DEBUG, "simplefsdp")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step(simple_fsdp(Model(layer=Routed), solo_mesh), torch.rand(4, DIM))
    assert not left_out(caplog.text)


@pytest.mark.slow
def test_a_failure_of_the_first_try_is_not_the_users(solo_mesh, monkeypatch, caplog):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(lengthen, "laid_out", fail)
    caplog.set_level(logging.DEBUG, "simplefsdp")
    step(simple_fsdp(Model(), solo_mesh), torch.rand(4, DIM))
    assert "since they differ: what nobody thought of" in caplog.text


def differing(
    mesh, executor: str, make: Callable[[], nn.Module] = Model, expected: int = LEFT_OUT
) -> list[str]:
    """Names of the numbers that are not those of all layers, to the bit."""
    lengthened, original = [], lengthen.lengthen

    def counted(*args):
        graphs = original(*args)
        lengthened.append(args)
        return graphs

    plain, x = make(), torch.rand(2, 4, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengthen, "lengthen", counted)
        few = step(simple_fsdp(copy.deepcopy(plain), mesh), x, executor=executor)
        model = simple_fsdp(plain, mesh)
        # Op by op it is the same to the bit, but not what Inductor fuses.
        op_by_op = executor == "aot_eager"
        all_ = numbers(model, x) if op_by_op else step_of_all(model, x, executor=executor)
    assert few.keys() == all_.keys()
    assert [left_out.short.more for _, _, left_out, _ in lengthened] == [expected]
    return [n for n in all_ if not torch.equal(few[n], all_[n])]


def on_ranks(case: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)  # ranks draw the same batch
    return differing(init_device_mesh("cpu", (2,)), "aot_eager", CASES[case][0])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "checkpointed", "in turns"])
def test_on_ranks_that_hold_different_shards(pools, case):
    """Of 9 rows the first has 5, the second 4; and so of the 3 of the head."""
    assert pools(2).run(on_ranks, case) == [[]] * 2


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("model", [Model, DropsAround])
@pytest.mark.parametrize("layer", [Layer, PostNorm, Chooses, Drops, DropsTwice, DropsAgain])
@pytest.mark.parametrize("executor", ["inductor", "regions"])
def test_generated_code(fake_mesh, executor, layer, model):
    """A gather repeats this rank's shard; on ranks, graphs are compared above. A layer drops what
    it would if it were traced."""
    expected = LEFT_OUT - (layer is DropsAgain)  # one of the traced layers is not like the others
    assert differing(fake_mesh(2), executor, partial(model, layer=layer), expected) == []


@pytest.mark.slow
def test_each_layer_keeps_its_names(fake_mesh, caplog):
    seen: list[object] = []
    caplog.set_level(logging.DEBUG, "simplefsdp")
    with observing(seen.append):
        step(simple_fsdp(Model(), fake_mesh(4)), torch.rand(4, DIM))
    assert left_out(caplog.text) == LEFT_OUT
    for graph in seen:
        program = graph.rehearsal.reading.program
        kind = "gather" if graph.part == "forward" else "reduce"
        starts = [op.collective for _, op in program.starts()]
        sent = [fqn for start in starts if start.kind == kind for fqn in start.fqns]
        assert sorted(sent) == sorted(dict(Model().named_parameters()))


@pytest.mark.slow
def test_a_graph_that_turns_out_otherwise_is_traced_whole(fake_mesh, monkeypatch, caplog):
    def refuse(graph: Graph, short: object) -> None:
        raise ValueError("layers: they differ")

    monkeypatch.setattr(lengthen, "take_out", refuse)
    caplog.set_level(logging.DEBUG, "simplefsdp")
    mesh = fake_mesh(2)
    for executor in ("aot_eager", "regions"):
        with no_kernels():
            step(simple_fsdp(Model(), mesh), torch.rand(4, DIM), executor=executor)
    # Once with the least layers, once with one more, for each executor.
    assert caplog.text.count("more layers are traced, since they differ") == 4


@pytest.mark.slow
def test_a_users_pass_sees_the_whole_joint_graph(fake_mesh, caplog):
    from torch._inductor import config

    caplog.set_level(logging.DEBUG, "simplefsdp")
    sizes: list[int] = []

    class Counts(config_pass()):
        def __call__(self, graph: Graph) -> None:
            sizes.append(len(graph.nodes))

        def uuid(self) -> str:
            return "counts"

    with config.patch(joint_custom_pre_pass=Counts()), no_kernels():
        step(simple_fsdp(Model(), fake_mesh(2)), torch.rand(4, DIM), executor="regions")
    assert sizes and not left_out(caplog.text)


def config_pass() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def test_constants_that_are_equal_and_not_the_same():
    same = [(1, "a", None), [0.5, (2,)], torch.float32]
    assert exactly(same) == exactly(copy.deepcopy(same))
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ([0], [False])):
        assert exactly(one) != exactly(other)
