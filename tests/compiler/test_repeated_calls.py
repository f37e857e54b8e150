"""Layers that are alike are followed once by Dynamo: what is computed stays the same."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_few_layers import (
    CASES,
    DEPTH,
    DIM,
    Checkpointed,
    Layer,
    Model,
    step,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from simplefsdp import microbatch, simple_fsdp
from simplefsdp._torch import repeated_calls, trace_once
from simplefsdp._torch.repeated_calls import REPEATED
from simplefsdp.compiler.dedupe import dedupe_gathers

pytestmark = pytest.mark.skipif(
    not trace_once.can_trace_once(), reason="this torch follows each call"
)


class Breaks(Layer):
    def forward(self, x, mask):
        x = super().forward(x, mask)
        torch._dynamo.graph_break()
        return x * 2


class Counts(Layer):
    """It has a side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x, mask):
        self.calls += 1
        return super().forward(x, mask)


class Scaled(Layer):
    factor = 1.0

    def forward(self, x, mask):
        return super().forward(x, mask) * self.factor


class GivesDict(Layer):
    def forward(self, x, mask):
        return {"x": super().forward(x["x"] if isinstance(x, dict) else x, mask)}


class TakesDicts(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x["x"])


class ByKeyword(Model):
    def forward(self, x):
        x, masks = self.embed(x), (x.gt(0.5), None)
        for layer in self.layers:
            x = layer(x, mask=masks[0])
        return self.head(x)


class HalfWithoutGradient(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        with torch.no_grad():
            for layer in self.layers[:4]:
                x = layer(x, mask)
        for layer in self.layers[4:]:
            x = layer(x, mask)
        return self.head(x)


class InPrecisions(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers[:4]:
                x = layer(x, mask)
        for layer in self.layers[4:]:
            x = layer(x.float(), mask)
        return self.head(x)


class AsksModes(Layer):
    """What it computes depends on a global mode."""

    def forward(self, x, mask):
        x = super().forward(x.float(), mask)
        scale = 2 if torch.are_deterministic_algorithms_enabled() else 1
        return x * (scale if torch.is_autocast_cache_enabled() else 3)


class SomeDeterministic(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for i, layer in enumerate(self.layers):
            torch.use_deterministic_algorithms(i >= 4)
            x = layer(x, mask)
        torch.use_deterministic_algorithms(False)
        return self.head(x)


class SomeCachedCasts(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for i, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=i >= 4):
                x = layer(x, mask)
        return self.head(x.float())


class InRegions(Model):
    """Layers are checkpointed from outside."""

    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return self.head(x)


class Tied(Layer):
    """Two parameters of a layer; in some layers they are one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(DIM))

    def forward(self, x, mask):
        return super().forward(x, mask) * self.one + self.two


class Named(Layer):
    """Of which only the type of its name matters, and that it has a number."""

    name: object = ""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, int] = {}

    def forward(self, x, mask):
        x = super().forward(x, mask)
        return x * 2 if isinstance(self.name, str) and "number" in self.config else x


def named(model: Model) -> Model:
    for i, layer in enumerate(model.layers):
        layer.name, layer.config["number"] = f"layer {i}", i
    return model


class Asks(Layer):
    setting: object = 1

    def forward(self, x, mask):
        x = super().forward(x, mask)
        return x * 2 if self.setting is True else x


def some_tied(model: Model, numbers: list[int]) -> Model:
    for i in numbers:
        model.layers[i].two = model.layers[i].one
    return model


def different(model: Model) -> Model:
    for i, layer in enumerate(model.layers):
        layer.factor = float(i)
    return model


def one_scaled(model: Model) -> Model:
    model.layers[5].factor = 0.5
    return model


class Knows(Layer):
    """It looks for itself among all."""

    def forward(self, x, mask):
        x = super().forward(x, mask)
        return 3 * x if self is self.all[5] else x


def knowing(model: Model) -> Model:
    for layer in model.layers:
        layer.all = list(model.layers)
    return model


class Finds(Layer):
    """It looks for an object of its own among those of all."""

    def forward(self, x, mask):
        x = super().forward(x, mask)
        return 3 * x if self.own is self.all[5] else x


def finding(model: Model) -> Model:
    found = [Own() for _ in model.layers]
    for layer, layer.own in zip(model.layers, found, strict=True):
        layer.all = found
    return model


class Own:
    """Something of a layer, in which the order of attributes may differ."""

    def __init__(self, tag: object = None, *, first: str = "tag") -> None:
        for name in sorted(("tag", "number"), key=first.__ne__):
            setattr(self, name, tag if name == "tag" else 0)


class FindsInside(Layer):
    """It looks for an object that an object of its own holds."""

    def forward(self, x, mask):
        x = super().forward(x, mask)
        return 3 * x if self.own.tag is self.all[5] else x


def finding_inside(model: Model) -> Model:
    tags = [Own() for _ in model.layers]
    for i, layer in enumerate(model.layers):
        layer.own, layer.all = Own(tags[i], first="tag" if i else "number"), tags
    return model


class Registered(Layer):
    """Its class knows all of its kind."""

    all: ClassVar[list[nn.Module]] = []

    def forward(self, x, mask):
        x = super().forward(x, mask)
        return 3 * x if self is self.all[5] else x


def registered() -> Model:
    model = Model(layer=Registered)
    Registered.all = list(model.layers)
    return model


class Sized(Layer):
    """It has options of its own, whose first is one for all, and a set of constants."""

    def forward(self, x, mask):
        return super().forward(x, mask) * self.own.number + len(self.some)


def sized(model: Model) -> Model:
    shape = (DIM, DIM, [])
    for layer in model.layers:
        layer.own, layer.some = Own(shape), {1, 2, 3}
    return model


class Takes(Layer):
    """It has one more argument."""

    def forward(self, x, mask, more):
        return self.with_more(super().forward(x, mask), more)


class AddsBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x, mask, more):
        x = x + self.up(x).tanh() * mask
        return x if more is None else x + more.up(x).tanh()


class GivesBefore(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, self.more(i))
        return self.head(x)

    def more(self, i):
        return self.layers[i - 1] if i else None


class Projects(Takes):
    def with_more(self, x, more):
        return x + more(self.up(x))


class GivesOwn(GivesBefore):
    """Layers share a projection with the one before them, every other of them."""

    def more(self, i):
        return self.layers[i // 2 * 2].down


class Multiplies(Takes):
    def with_more(self, x, more):
        return x * float(more)


class GivesNumpy(GivesBefore):
    def more(self, i):
        return np.float64(1 / (i + 1))


class IsTold(Layer):
    def forward(self, x, mask):
        return x if getattr(x, "skip", False) else super().forward(x, mask)


class Tells(Model):
    """By an attribute of what goes from layer to layer."""

    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for i, layer in enumerate(self.layers):
            x = x * 1
            x.skip = i % 2 == 1
            x = layer(x, mask)
        return self.head(x)


class IsView(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * (1 if x._base is None else 2)


class GivesViews(Model):
    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for i, layer in enumerate(self.layers):
            x = layer(x[:] if i == 4 else x * 1, mask)
        return self.head(x)


ALL = DEPTH - 1  # but the first are not followed
# Beside those of test_few_layers: what a model is, and how many layers Dynamo does not follow.
MORE = {
    "by keyword": (ByKeyword, ALL),
    "half without gradient": (HalfWithoutGradient, DEPTH - 4),
    "in precisions": (InPrecisions, DEPTH - 2),
    "some deterministic": (lambda: SomeDeterministic(layer=AsksModes), DEPTH - 2),
    "some cached casts": (lambda: SomeCachedCasts(layer=AsksModes), DEPTH - 2),
    "in regions": (InRegions, ALL),
    "first tied": (lambda: some_tied(Model(layer=Tied), [0]), DEPTH - 2),
    "later tied": (lambda: some_tied(Model(layer=Tied), [4]), DEPTH - 2),
    "most tied": (lambda: some_tied(Model(layer=Tied), list(range(8))), ALL),
    "side effect": (lambda: Model(layer=Counts), 0),
    "dicts": (lambda: TakesDicts(layer=GivesDict), 0),
    "all differ": (lambda: different(Model(layer=Scaled)), 0),
    "only names differ": (lambda: named(Model(layer=Named)), ALL),
    "one differs": (lambda: one_scaled(Model(layer=Scaled)), DEPTH - 2),
    "itself among all": (lambda: knowing(Model(layer=Knows)), 0),
    "its own among all": (lambda: finding(Model(layer=Finds)), 0),
    "its own's own among all": (lambda: finding_inside(Model(layer=FindsInside)), 0),
    "itself in its class": (registered, 0),
    "options and sets of its own": (lambda: sized(Model(layer=Sized)), ALL),
    "told by a tensor": (lambda: Tells(layer=IsTold), 0),
    "told by views": (lambda: GivesViews(layer=IsView), DEPTH - 2),
}
OF_OTHERS = {
    "checkpointed": ALL,
    "two tensors": DEPTH - 2,  # the first takes one
    "adapters": DEPTH - 2,  # the first has an input without gradient
    "written buffers": ALL,
    "dropout": ALL,
    "each is returned": ALL,
    "one is another": DEPTH,  # of ten
    "tied": DEPTH,  # of nine
    "one sign": DEPTH - 2,
    "policy": 0,
    "two lists": ALL + 3,
}


def not_followed(text: str) -> int:
    found = re.search(r"(\d+) layers were not followed", text)
    return int(found[1]) if found else 0


def unmarked(model: nn.Module) -> nn.Module:
    for module in model.modules():
        module.__dict__.pop(REPEATED, None)
    return model


def described(gm: GraphModule) -> list[object]:
    """A graph node by node, with what it calls; whatever nodes are called, and in which order it
    has its inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    number = {node: i for i, node in enumerate(n for n in gm.graph.nodes if n not in set(inputs))}
    number |= {node: source_of(node) or f"input {i}" for i, node in enumerate(inputs)}

    def value(node: Node) -> list[object]:
        leaves = tree_leaves(node.meta.get("example_value"))
        return [
            (tuple(v.shape), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else v
            for v in leaves
            if not isinstance(v, torch.SymInt)
        ]

    lines: list[tuple[object, ...]] = []
    for node in gm.graph.nodes:
        target = node.target if node.op.startswith("call_") else None
        if node.op == "get_attr":
            target = getattr(gm, node.target)
            target = described(target) if isinstance(target, GraphModule) else target
        referring = map_arg((node.args, node.kwargs), lambda n: ("node", number[n]))
        stack = {} if node.op == "placeholder" else node.meta.get("nn_module_stack", {})
        paths = [path for path, _ in stack.values()]
        lines.append((source_of(node), node.op, target, referring, value(node), paths[-1:]))
    return [line for line in lines if not line[0]] + sorted(line for line in lines if line[0])


def source_of(node: Node) -> str:
    return node._dynamo_source.name if hasattr(node, "_dynamo_source") else ""


def dynamo_graph(model: nn.Module, x: torch.Tensor) -> list[object]:
    found: list[object] = []

    def backend(gm: GraphModule, inputs: list[torch.Tensor]):
        dedupe_gathers(gm, inputs)
        found.extend(described(gm))
        return lambda *_: (torch.zeros(4, 3, requires_grad=True),)

    trace_once.trace_repeated_calls_once(backend)
    torch._dynamo.reset()
    repeated_calls.reset_repeated_calls()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    return found


@pytest.mark.slow(quick=["dropout", "only names differ"])
@pytest.mark.parametrize("case", [*OF_OTHERS, *MORE])
def test_the_graph_is_that_of_all_layers(solo_mesh, caplog, case):
    make, expected = MORE[case] if case in MORE else (CASES[case][0], OF_OTHERS[case])
    model, x = simple_fsdp(make(), solo_mesh), torch.rand(4, DIM)
    caplog.set_level(logging.DEBUG, "simplefsdp")
    once = dynamo_graph(model, x)
    assert not_followed(caplog.text) == expected
    each = dynamo_graph(unmarked(model), x)
    assert len(once) == len(each)
    for one, other in zip(once, each, strict=True):
        assert one == other


def test_gradients_are_those_of_all_layers(solo_mesh, caplog):
    plain, x = Model(layer=Checkpointed), torch.rand(4, DIM)
    caplog.set_level(logging.DEBUG, "simplefsdp")
    once = step(simple_fsdp(copy.deepcopy(plain), solo_mesh), x)
    assert not_followed(caplog.text) == ALL
    each = step(unmarked(simple_fsdp(copy.deepcopy(plain), solo_mesh)), x)
    for name, value in each.items():
        torch.testing.assert_close(once[name], value, rtol=0, atol=0, msg=name)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="simplefsdp", options={"executor": "aot_eager", **options})
    return model


CHANGES = {
    "attribute": lambda layer: setattr(layer, "factor", 3.0),
    "mode": lambda layer: layer.drop.eval(),
    "module": lambda layer: setattr(layer, "drop", nn.Hardtanh(-0.01, 0.01)),
    "buffer": lambda layer: layer.scale.fill_(5.0),
    "no parameter": lambda layer: setattr(layer.up, "bias", None),
    "frozen": lambda layer: layer.up.weight.requires_grad_(False),
}


class Changeable(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def forward(self, x, mask):
        return super().forward(x, mask) + self.drop(x)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_changed_later_is_traced_anew(solo_mesh, caplog, change):
    """Dynamo did not follow the layer: that it guards it nevertheless is our doing."""
    plain, x = Model(layer=Changeable), torch.rand(4, DIM)
    model = compiled(simple_fsdp(copy.deepcopy(plain), solo_mesh))
    caplog.set_level(logging.DEBUG, "simplefsdp")
    torch.testing.assert_close(model(x), before := plain(x))
    assert not_followed(caplog.text) == ALL
    for some in (plain, model):
        CHANGES[change](some.layers[5])
    after = model(x)
    torch.testing.assert_close(after, plain(x))
    if change == "frozen":
        after.sum().backward()
        assert model.layers[5].up.weight.grad is None
    else:
        assert not torch.equal(after, before)


class WithFirst(Model):
    """Each layer takes what the first one took, too."""

    def forward(self, x):
        x = first = self.embed(x)
        for layer in self.layers:
            x = layer(x, first)
        return self.head(x)


class Inside(Layer):
    """What it reads, it reads in a region."""

    factor = 1.0

    def forward(self, x, mask):
        def run(x, mask):
            return super(Inside, self).forward(x, mask) * self.factor

        return checkpoint(run, x, mask, use_reentrant=False)


class NeedsGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0) if ctx.needs_input_grad[1] else None


class WithFunction(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM))

    def forward(self, x, mask):
        return NeedsGrad.apply(super().forward(x, mask), self.weight)


class Told(Model):
    """Of each layer it is said which it is, just before it is called."""

    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        for i, layer in enumerate(self.layers):
            layer.factor = float(i)
            x = layer(x, mask)
        return self.head(x)


def of_fifth(change: Callable[[nn.Module], object], layer: type[nn.Module] = Layer, kind=Model):
    model = kind(layer=layer)
    change(model.layers[5])
    return model


def doubled(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


def first_half_frozen() -> Model:
    model = Model(layer=WithFunction)
    model.embed.requires_grad_(False)
    model.layers[:4].requires_grad_(False)
    return model


def hooked(inner: bool) -> Model:
    """Each layer has a hook that holds a number."""
    model = Model()
    for i, layer in enumerate(model.layers):
        factor = 0.25 if i == 5 else 0.5
        module = layer.up if inner else layer
        module.register_forward_hook(lambda _, args, out, factor=factor: out * factor)
        module.register_forward_hook(functools.partial(times, factor))
        module.register_forward_pre_hook(holding(factor))
    return model


def times(factor: float, _: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * factor


def holding(factor: float) -> Any:
    return lambda _, args: (args[0] * factor, *args[1:])


class GoesThrough(Layer):
    """A layer that goes through its own attributes, or through those of an object, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.options = SimpleNamespace()

    def set_in_order(self, of: object, names: str) -> None:
        for name in names:
            vars(of)[f"own_{name}"] = 2.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for of in (self, self.options):
            for name, value in vars(of).items():
                if name.startswith("own_"):
                    x = x * value if name.endswith("a") else x + value
        return super().forward(x, mask)


def of_one_order(own: bool) -> Model:
    model = Model(layer=GoesThrough)
    for i, layer in enumerate(model.layers):
        layer.set_in_order(layer if own else layer.options, "ba" if i == 5 else "ab")
    return model


def prepended(register: str, inner: bool) -> Model:
    """Each layer has the same two hooks; one layer in the other order."""
    model, is_pre = Model(), "pre" in register
    for i, layer in enumerate(model.layers):
        for hook, is_first in ((functools.partial(times, 2.0), False), (plus_one, i == 5)):
            given = before(hook) if is_pre else hook
            getattr(layer.up if inner else layer, register)(given, prepend=is_first)
    return model


def plus_one(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 1


def before(hook: Any) -> Any:
    return lambda module, args: (hook(module, args, args[0]), *args[1:])


class GoesThroughSet(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for number in self.numbers:
            x = x * 2 if number == 1 else x + 1
        return super().forward(x, mask)


class IsIn(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if self.part in self.some else x, mask)


class AreEqual(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if self.some == self.others else x, mask)


def with_sets(layer: type[nn.Module], *, kind: type = set) -> Model:
    """One layer's sets hold the same as the others', in another order, or itself or the same."""
    model = Model(layer=layer)
    for i, one in enumerate(model.layers):
        # Equal sets: 1 and 9 have the same place in a small one.
        one.numbers = kind([9, 1] if i == 5 else [1, 9])
        one.part = nn.Identity()
        one.some = kind([one.part if i == 5 else nn.Identity()])
        one.others = kind(one.some if i == 5 else [nn.Identity()])
    return model


class CountsAttributes(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * len(vars(self.options)), mask)


class GoesThroughKeys(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for key in self.keys:
            x = x * (2 if isinstance(key, bool) else 3)
        return super().forward(x, mask)


def with_attributes() -> Model:
    """The objects of the first layers have an attribute more."""
    model = Model(layer=CountsAttributes)
    for i, layer in enumerate(model.layers):
        layer.options = SimpleNamespace(a=1) if i == 5 else SimpleNamespace(a=1, b=2)
    return model


def with_keys(kind: Any) -> Model:
    """The keys of one layer are equal to the others', but are something else."""
    model = Model(layer=GoesThroughKeys)
    for i, layer in enumerate(model.layers):
        layer.keys = kind([True if i == 5 else 1])
    return model


TRAPS = {
    "number of attributes": with_attributes,
    "kind of keys": lambda: with_keys(dict.fromkeys),
    "kind of what is in a set": lambda: with_keys(set),
    "order of attributes": lambda: of_one_order(own=True),
    "order of an object's attributes": lambda: of_one_order(own=False),
    "hook put first": lambda: prepended("register_forward_hook", inner=False),
    "inner hook put first": lambda: prepended("register_forward_hook", inner=True),
    "pre-hook put first": lambda: prepended("register_forward_pre_hook", inner=False),
    "order of a set": lambda: with_sets(GoesThroughSet),
    "order of a frozenset": lambda: with_sets(GoesThroughSet, kind=frozenset),
    "in a set": lambda: with_sets(IsIn),
    "equal sets": lambda: with_sets(AreEqual),
    "one and true": lambda: of_fifth(lambda layer: setattr(layer, "setting", True), Asks),
    "hooks that hold": lambda: hooked(inner=False),
    "inner hooks that hold": lambda: hooked(inner=True),
    "the same twice": WithFirst,
    "read in a region": lambda: of_fifth(lambda layer: setattr(layer, "factor", 2.0), Inside),
    "hook": lambda: of_fifth(lambda m: m.register_forward_hook(lambda _, args, out: 2 * out)),
    "inner hook": lambda: of_fifth(lambda m: m.up.register_forward_pre_hook(lambda _, x: x[0] * 2)),
    "inner forward": lambda: of_fifth(lambda layer: doubled(layer.up)),
    "frozen": first_half_frozen,
    "told": lambda: Told(layer=Scaled),
}


@pytest.mark.slow(quick=["hook"])
@pytest.mark.parametrize("trap", TRAPS)
def test_what_tells_layers_apart_that_no_guard_of_torchs_would(solo_mesh, trap):
    """Each of these gave the first layer's graph for all."""
    torch.manual_seed(0)
    plain, x = TRAPS[trap](), torch.rand(4, DIM)
    torch.manual_seed(0)
    model = compiled(simple_fsdp(TRAPS[trap](), solo_mesh))
    ours, wanted = model(x), plain(x)
    torch.testing.assert_close(ours, wanted)
    for output in (ours, wanted):
        output.sum().backward()
    for name, param in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (param.grad is None)
        if grad is not None:
            torch.testing.assert_close(grad.full_tensor(), param.grad)


@pytest.mark.slow
def test_a_module_that_others_have_too(solo_mesh):
    plain = Model(layer=Changeable)
    plain.drop = nn.ReLU()
    for layer in plain.layers:
        layer.drop = plain.drop
    plain.head = nn.Sequential(plain.drop, plain.head)
    x = torch.rand(4, DIM)
    model = compiled(simple_fsdp(copy.deepcopy(plain), solo_mesh))
    torch.testing.assert_close(model(x), plain(x))
    for some in (plain, model):
        some.layers[5].drop = nn.Tanh()
    torch.testing.assert_close(model(x), plain(x))


def test_a_list_of_layers_on_meta_says_so(solo_mesh):
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match=r"embed\.weight: is on the meta device"):
        compiled(simple_fsdp(model, solo_mesh))(torch.rand(4, DIM))


@pytest.mark.slow
def test_layers_whose_gradients_are_deferred(solo_mesh, caplog):
    plain, x = Model(), torch.rand(4, DIM)
    model = compiled(simple_fsdp(copy.deepcopy(plain), solo_mesh))
    caplog.set_level(logging.DEBUG, "simplefsdp")
    for is_last in (False, True):
        caplog.clear()
        with microbatch(model, is_last=is_last):
            model(x).sum().backward()
        assert not_followed(caplog.text) == ALL
        plain(x).sum().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


@pytest.mark.parametrize(
    ("make", "layer"),
    [(GivesOwn, Projects), (GivesNumpy, Multiplies), (GivesBefore, AddsBefore)],
)
def test_what_layers_are_given_tells_them_apart(solo_mesh, make, layer):
    plain, x = make(layer=layer), torch.rand(4, DIM)
    model = compiled(simple_fsdp(copy.deepcopy(plain), solo_mesh))
    for some in (plain, model):
        some(x).square().sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


def test_layers_that_break_the_graph(solo_mesh):
    """Their parts are compiled once, for there is nothing of a name in them."""
    plain, x = Model(layer=Breaks, depth=12), torch.rand(4, DIM)
    model = compiled(simple_fsdp(copy.deepcopy(plain), solo_mesh))
    counters.clear()
    model(x)
    assert counters["stats"]["unique_graphs"] <= 5  # before, behind and in the layers
    for some in (plain, model):
        some(x).sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


def test_layers_that_are_compiled_by_themselves_are_compiled_once(solo_mesh):
    """As users of FSDP2 do: more than eight would be too many for Dynamo."""
    plain, x = Model(depth=12), torch.rand(4, DIM)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    counters.clear()
    for some in (plain, model):
        some(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


def test_other_backends_see_no_calls(solo_mesh):
    """Who does not put the layers in their places gets them as ever."""
    plain, x = Model(), torch.rand(4, DIM)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    targets: list[object] = []

    def backend(gm: GraphModule, inputs: list[torch.Tensor]):
        targets.extend(node.target for node in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), plain(x))
    assert torch.ops.higher_order.invoke_subgraph not in targets and len(targets) > 10 * DEPTH


@pytest.mark.slow
def test_sizes_are_left_open(solo_mesh, caplog):
    plain = Model()
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    torch._dynamo.reset()
    caplog.set_level(logging.DEBUG, "simplefsdp")
    run = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    for rows in (4, 7):
        x = torch.rand(rows, DIM)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), plain(x))
    assert not_followed(caplog.text) == ALL
