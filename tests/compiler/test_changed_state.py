"""Layers that are alike, in a forward that changes something before them or between them."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from test_few_layers import DIM, Layer, Model
from test_repeated_calls import ALL, compiled, not_followed

from simplefsdp import simple_fsdp
from simplefsdp._torch import trace_once
from simplefsdp._torch.changed_state import Change, can_be_seen

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
    "held in a function": (lambda: holds_global(ReadsHeld, 5), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_changed_is_seen_by_the_layers_that_see_it(solo_mesh, caplog, case):
    make, expected = CASES[case]
    torch.manual_seed(0)
    plain, x = make(), torch.rand(4, DIM)
    torch.manual_seed(0)
    model = compiled(simple_fsdp(make(), solo_mesh))
    caplog.set_level(logging.DEBUG, "simplefsdp")
    torch.testing.assert_close(model(x), plain(x))
    if expected is not None:
        assert not_followed(caplog.text) == expected
    assert STATE.factor == 1.0


def test_what_a_layer_holds():
    state, other = State(), State()
    changed = [Change(state, "factor")]
    deep = SimpleNamespace(a=[{"b": functools.partial(print, x=state)}])
    assert can_be_seen(changed, [deep])
    assert can_be_seen(changed, [lambda: state])
    assert not can_be_seen(changed, [SimpleNamespace(a=other), lambda: STATE])
    assert not can_be_seen([], [state])


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
