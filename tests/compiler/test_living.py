"""Names of parameters: what patterns may name, and what each parameter is called."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from simplefsdp import simple_fsdp
from simplefsdp.frontend.living import fqns_of, known_fqns


class Named(nn.Module):
    """Layers of given names, of which it uses the first."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))
        self.first = names[0]

    def forward(self, x):
        return getattr(self, self.first)(x)


def run(model: nn.Module, *buckets: str) -> None:
    torch._dynamo.reset()
    options = {"executor": "aot_eager", "bucketing": "manual", "buckets": list(buckets)}
    torch.compile(model, backend="simplefsdp", options=options)(torch.ones(2, 4))


def test_a_pattern_may_name_what_the_graph_does_not_read(fake_mesh):
    run(simple_fsdp(Named("used", "spare"), fake_mesh(2)), "used", "spare")


def test_a_pattern_that_only_an_earlier_model_matches(fake_mesh):
    mesh = fake_mesh(2)
    earlier = simple_fsdp(Named("used", "gone"), mesh)
    run(earlier, "used", "gone")
    del earlier
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(ValueError, match="'gone' matches no module"):
        run(simple_fsdp(Named("used", "spare"), mesh), "used", "gone")


def test_a_pattern_that_only_another_model_matches(fake_mesh):
    mesh = fake_mesh(2)
    other = simple_fsdp(Named("its", "own"), mesh)
    with pytest.raises(ValueError, match="'own' matches no module"):
        run(simple_fsdp(Named("used"), mesh), "used", "own")
    assert other is not None


def test_names_are_those_of_the_outermost_wrap_and_of_copies(fake_mesh):
    mesh = fake_mesh(2)
    model = Named("used_alone", "spare_alone")
    simple_fsdp(model.used_alone, mesh)
    simple_fsdp(model, mesh)
    copied = copy.deepcopy(model)
    names = sorted(name for name, _ in model.named_parameters())
    del model
    gc.collect()
    assert known_fqns(["used_alone.weight"]) == names
    run(copied, "used_alone", "spare_alone")


def test_a_graph_of_several_wraps(fake_mesh):
    mesh = fake_mesh(2)
    one, other = (simple_fsdp(Named(*names), mesh) for names in (("a", "b"), ("c",)))
    assert known_fqns(["a.weight", "c.weight"]) == [
        f"{name}.{kind}" for name in "abc" for kind in ("bias", "weight")
    ]
    assert known_fqns(["a.weight"]) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    assert one is not other  # alive


def names_of(*params) -> list[str]:
    return fqns_of([(param, "in the graph") for param in params])


def test_a_parameter_has_the_name_of_the_outermost_wrap(solo_mesh):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = [simple_fsdp(layer, solo_mesh).weight for layer in layers]
    assert names_of(*weights) == ["weight", "weight"]
    simple_fsdp(layers, solo_mesh)
    assert names_of(*weights) == ["0.weight", "1.weight"]


def test_copies_and_what_is_assigned_have_it(solo_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), solo_mesh)
    assert names_of(model[0].weight) == ["0.weight"]
    again = copy.deepcopy(model)
    assert names_of(again[0].weight) == ["0.weight"]
    model.load_state_dict(again.state_dict(), assign=True)
    assert names_of(model[0].weight) == ["0.weight"]


def test_a_tied_parameter_has_the_first(solo_mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    simple_fsdp(model, solo_mesh)
    assert names_of(model[1].weight) == ["0.weight"]


def test_what_is_in_no_model_has_that_of_the_graph(solo_mesh):
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    strange = model.weight.detach().clone()
    assert names_of(strange, model.weight, strange) == ["in the graph", "weight", "in the graph"]


def test_a_parameter_that_was_asked_for_can_be_swapped(solo_mesh):
    """As ``model.to(dtype)`` does with DTensors."""
    model = simple_fsdp(nn.Linear(4, 4), solo_mesh)
    assert names_of(model.weight) == ["weight"]
    model.to(torch.float64)
    assert model.weight.dtype == torch.float64
    assert names_of(model.weight) == ["weight"]
