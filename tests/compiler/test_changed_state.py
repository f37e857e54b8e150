"""Layers that are alike, in a forward that changes something before them or between them."""

from __future__ import annotations

import functools
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_few_layers import DIM, Layer, Model
from test_repeated_calls import ALL, compiled, not_followed

from simplefsdp import simple_fsdp
from simplefsdp._torch import trace_once
from simplefsdp._torch.changed_state import held_by

pytestmark = pytest.mark.skipif(
    not trace_once.can_trace_once(), reason="this torch follows each call"
)


class State:
    """As transformers has one, that says what its layers should collect."""

    def __init__(self) -> None:
        self.factor: object = 1.0


STATE = State()


def factor_of(state: State) -> float:
    return state.factor if isinstance(state.factor, float) else 1.0 + len(state.factor)


class ReadsGlobal(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * factor_of(STATE)


class ReadsSign(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask).copysign(torch.full_like(x, STATE.factor))


class ReadsOwn(Layer):
    """The state of one of them is the global one."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def forward(self, x, mask):
        return super().forward(x, mask) * factor_of(self.state)


class ReadsHeld(ReadsOwn):
    def forward(self, x, mask):
        return Layer.forward(self, x, mask) * factor_of(self.held())


class ReadsWeakly(ReadsHeld):
    """What is held is not kept alive."""

    def forward(self, x, mask):
        return Layer.forward(self, x, mask) * factor_of(self.ref())


class ReadsTable(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * TABLE[self]


class IsSpecial(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * (3.0 if self is SPECIAL[0] else 1.0)


class HasOwn(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * self.__dict__.get("own", 2.0)


class ReadsMask(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * mask.factor


TABLE: dict[object, float] = {}
SPECIAL: list[object] = []
KEPT: list[object] = []


class Sets(Model):
    """It sets the state before the layers, and sets it back."""

    def forward(self, x):
        x, mask = self.embed(x), x.gt(0.5)
        self.set_before()
        for i, layer in enumerate(self.layers):
            self.set_between(i)
            x = layer(x, mask)
        STATE.factor = 1.0
        return self.head(x)

    def set_before(self) -> None:
        STATE.factor = 3.0

    def set_between(self, i: int) -> None:
        pass


class SetsEmpty(Sets):
    def set_before(self) -> None:
        STATE.factor = {}


class SetsAgain(Sets):
    def set_between(self, i: int) -> None:
        STATE.factor = float(i)


class SetsZero(Sets):
    def set_between(self, i: int) -> None:
        STATE.factor = -0.0 if i == 4 else 0.0


class SetsLate(Sets):
    """A layer sees what is there already; the next ones see what is set."""

    def set_before(self) -> None:
        pass

    def set_between(self, i: int) -> None:
        if i == 4:
            STATE.factor = 2.0


class Fills(SetsEmpty):
    def set_between(self, i: int) -> None:
        STATE.factor[str(i)] = i


def holds_global(layer: type[ReadsOwn], number: int, kind: type[Sets] = Sets) -> Model:
    model = kind(layer=layer)
    for i, each in enumerate(model.layers):
        each.state = STATE if i == number else State()
        each.held = functools.partial(lambda state: state, each.state)
    return model


def known_to_globals(layer: type[Layer]) -> Model:
    """Each layer has its place in one table; one is in the other."""
    model = Model(layer=layer)
    TABLE.update({each: float(i) for i, each in enumerate(model.layers)})
    SPECIAL[:] = [model.layers[5]]
    return model


def one_has_own(model: Model) -> Model:
    model.layers[5].own = 5.0
    return model


def weakly(model: Model) -> Model:
    for layer in model.layers:
        layer.ref = weakref.ref(layer.state)
        KEPT.append(layer.state)
        layer.state, layer.held = None, lambda: None
    return model


class GivenMasks(Model):
    """Each layer is given a tensor that came from outside, with an attribute."""

    def __init__(self) -> None:
        super().__init__(layer=ReadsMask)
        self.masks = [torch.ones(4, DIM) for _ in self.layers]
        for i, mask in enumerate(self.masks):
            mask.factor = float(i)

    def forward(self, x):
        x = self.embed(x)
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = layer(x, mask)
        return self.head(x)


class TwoEmpty(Sets):
    """Two that are equal become one."""

    def set_before(self) -> None:
        STATE.a, STATE.b = {}, {}

    def set_between(self, i: int) -> None:
        if i == 4:
            STATE.b = STATE.a


class ReadsTwo(Layer):
    def forward(self, x, mask):
        return super().forward(x, mask) * (2.0 if STATE.a is STATE.b else 1.0)


CASES = {
    "unseen": (lambda: Sets(layer=Layer), ALL),
    "empty, unseen": (lambda: SetsEmpty(layer=Layer), ALL),
    "seen by all": (lambda: Sets(layer=ReadsGlobal), ALL),
    "empty, seen by all": (lambda: SetsEmpty(layer=ReadsGlobal), ALL),
    "set again": (lambda: SetsAgain(layer=ReadsGlobal), 0),
    "set to zeros": (lambda: SetsZero(layer=ReadsSign), None),
    "set late": (lambda: SetsLate(layer=ReadsGlobal), None),
    "filled": (lambda: Fills(layer=ReadsGlobal), 0),
    "held by the first": (lambda: holds_global(ReadsOwn, 0), 0),
    "held by a later one": (lambda: holds_global(ReadsOwn, 5), None),
    "held weakly": (lambda: weakly(holds_global(ReadsWeakly, 5)), None),
    "in a table": (lambda: known_to_globals(ReadsTable), None),
    "in a list": (lambda: known_to_globals(IsSpecial), None),
    "one has more": (lambda: one_has_own(Model(layer=HasOwn)), None),
    "attributes of tensors": (GivenMasks, None),
    "two become one": (lambda: TwoEmpty(layer=ReadsTwo), None),
    "held in a function": (lambda: holds_global(ReadsHeld, 5), None),
}


@pytest.mark.slow(quick=["seen by all"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_changed_is_seen_by_the_layers_that_see_it(solo_mesh, caplog, case):
    make, expected = CASES[case]
    torch.manual_seed(0)
    plain, x = make(), torch.rand(4, DIM)
    expected_output = plain(x)  # before the model of the same kind takes its place in a global
    torch.manual_seed(0)
    model = compiled(simple_fsdp(make(), solo_mesh))
    caplog.set_level(logging.DEBUG, "simplefsdp")
    torch.testing.assert_close(model(x), expected_output)
    if expected is not None:
        assert not_followed(caplog.text) == expected
    assert STATE.factor == 1.0


def test_what_a_layer_holds():
    state = State()
    for root in (
        SimpleNamespace(a=[{"b": functools.partial(print, x=state)}]),
        lambda: state,
        weakref.ref(state),
        torch.ones(1).as_subclass(type("Holds", (torch.Tensor,), {"state": None})),
    ):
        if isinstance(root, torch.Tensor):
            root.state = state
        assert id(state) in held_by([root])
    assert id(state) not in held_by([SimpleNamespace(a=State()), lambda: STATE])
    with pytest.raises(LookupError, match="not known"):
        held_by([weakref.proxy(state)])
    with pytest.raises(LookupError, match="too many"):
        held_by([list(range(200_000))])


@pytest.mark.slow
def test_layers_of_transformers_are_followed_once(solo_mesh, caplog):
    """It sets a global before the layers, and sets it back behind them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    torch.manual_seed(0)
    model = compiled(simple_fsdp(transformers.LlamaForCausalLM(config), solo_mesh))
    caplog.set_level(logging.DEBUG, "simplefsdp")
    tokens = torch.arange(8)[None]
    for some in (plain, model):
        some(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert not_followed(caplog.text) == 7
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
