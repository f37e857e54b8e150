"""What a parameter is where it is read: in forward the full one, elsewhere the shard."""

from __future__ import annotations

import copy
import dataclasses
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from simplefsdp import raw_parameters, register_forward_method, simple_fsdp
from simplefsdp.frontend import reading


class Probe(nn.Module):
    """Runs ``code(self, x)`` as its forward."""

    def __init__(self, code) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.code = code

    def forward(self, x):
        return self.code(self, x)


@pytest.fixture
def no_collectives(monkeypatch):
    """A function: any gather after its call fails the test."""

    def refuse(*args):
        raise AssertionError("gathered")

    return lambda: monkeypatch.setattr("simplefsdp.frontend.parametrization.gather", refuse)


def test_outside_forward_it_is_the_parameter_that_is_trained(solo_mesh, no_collectives):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), solo_mesh)
    model(torch.ones(2, 4)).sum().backward()
    no_collectives()
    layer, param = model[0], model.get_parameter("0.weight")
    assert layer.weight is param and hasattr(layer, "weight")
    assert isinstance(layer.weight.grad, DTensor) and layer.weight.grad is param.grad
    optimizer = torch.optim.SGD([layer.weight, layer.bias], lr=1.0)
    before = param.to_local().clone()
    optimizer.step()
    assert torch.equal(param.to_local(), before - param.grad.to_local())


@pytest.mark.parametrize("backend", ["aot_eager", "simplefsdp"])
def test_also_in_what_is_compiled_outside_forward(fake_mesh, no_collectives, backend):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4)), fake_mesh(2))
    weight = model.get_parameter("0.weight")
    nn.init.uniform_(weight, 0.2, 1.0)
    weight.grad = torch.ones_like(weight)
    no_collectives()

    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
            model[0].weight.grad.mul_(0.5)

    torch.compile(clamp, backend=backend, fullgraph=True)(model)
    assert torch.equal(weight.to_local(), torch.full((2, 4), 0.1))
    assert torch.equal(weight.grad.to_local(), torch.full((2, 4), 0.5))


@pytest.mark.parametrize("rows", [1, 4])  # DTensor's square of one row has a gradient of copies
@pytest.mark.parametrize("backend", [None, "aot_eager", "simplefsdp"])
def test_a_penalty_in_the_loss(solo_mesh, backend, rows):
    plain, x = nn.Sequential(nn.Linear(4, rows)), torch.rand(2, 4)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)

    def loss_of(x):
        return model(x).square().mean() + model[0].weight.norm().full_tensor() ** 2

    loss = (torch.compile(loss_of, backend=backend) if backend else loss_of)(x)
    wanted = plain(x).square().mean() + plain[0].weight.square().sum()
    for one in (loss, wanted):
        one.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)


class SecondName(nn.Module):
    """Stores its parameter, or a view of it, under another name the first time that it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.other = None

    def forward(self, x):
        self.other = self.weight.t() if self.other is None else self.other
        return x @ self.other


def test_what_an_earlier_forward_has_gathered_is_refused(solo_mesh):
    model, x = simple_fsdp(SecondName(), solo_mesh), torch.ones(2, 4)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"weight: what another forward has gathered"):
        model(x)
    model.other = None
    model(x).sum().backward()


def test_a_stored_parameter_may_be_read_by_a_checkpoint(solo_mesh):
    """Whose second run is in backward, and of the same forward."""

    def code(self, x):
        self.other = self.weight
        return checkpoint(lambda x: x @ self.other, x, use_reentrant=False)

    model = simple_fsdp(Probe(code), solo_mesh)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 4.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_get_parameter_in_forward(solo_mesh, compiled):
    model = simple_fsdp(Probe(lambda self, x: x @ self.get_parameter("weight")), solo_mesh)
    if compiled:
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"}, fullgraph=True)
    model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    assert isinstance(model.get_parameter("weight"), DTensor)


def test_parameters_of_a_forward_are_named_in_the_error(solo_mesh):
    model = simple_fsdp(Probe(lambda self, x: x @ next(self.parameters())), solo_mesh)
    with pytest.raises(RuntimeError, match="mixed") as caught:
        model(torch.ones(2, 4))
    assert "read each parameter by its name (self.weight)" in caught.value.__notes__[-1]


def test_a_late_parametrization_is_told_in_the_error(fake_mesh):
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    nn.utils.parametrizations.weight_norm(model)
    with pytest.raises(RuntimeError, match="mixed") as caught:
        model(torch.ones(2, 4))
    assert "Parametrize (weight_norm, spectral_norm)" in caught.value.__notes__[-1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_forward_calls_is_inside_it(solo_mesh, backend):
    """Compiled by itself, too."""
    call = torch.compile(lambda self, x: x @ self.weight.T, backend=backend, fullgraph=True)
    model = simple_fsdp(Probe(call), solo_mesh)
    output = model(torch.ones(2, 4))
    assert type(output) is torch.Tensor and torch.equal(output, torch.full((2, 4), 4.0))


@pytest.mark.parametrize("outside_first", [True, False])
def test_a_function_that_is_called_inside_and_outside(solo_mesh, outside_first):
    kinds = []

    @torch.compile(backend="eager")
    def twice(self):
        return self.weight * 2

    def forward(self, x):
        kinds.append(type(twice(self)))
        return x @ self.weight

    model = simple_fsdp(Probe(forward), solo_mesh)
    for _ in range(2):
        if outside_first:
            assert type(twice(model)) is DTensor
        model(torch.ones(2, 4))
        assert type(twice(model)) is DTensor
    assert kinds == [torch.Tensor, torch.Tensor]


class Scaled(nn.Module):
    """Computes with weights that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        weights = {"weight": self.inner.weight * self.gain, "bias": self.inner.bias}
        return torch.func.functional_call(self.inner, weights, (x,))


class ScaledShards(Scaled):
    """Of the parameters as its inner module has them."""

    def forward(self, x):
        weights = {name: param * 1.5 for name, param in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,)) * self.gain


@pytest.mark.parametrize("kind", [Scaled, ScaledShards])
@pytest.mark.parametrize("executor", [None, "aot_eager"])
def test_weights_that_a_forward_computes(solo_mesh, executor, kind):
    plain, x = kind(), torch.rand(2, 4)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    if executor:
        model.compile(backend="simplefsdp", fullgraph=True, options={"executor": executor})
    for m in (plain, model):
        m(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)


def test_what_is_written_to_it_stays(fake_mesh, no_collectives):
    layer = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    no_collectives()
    local = layer.get_parameter("weight").to_local()
    nn.init.constant_(layer.weight, 2.0)
    assert local.eq(2).all()
    with torch.no_grad():
        layer.weight.copy_(layer.weight * 2)
    assert local.eq(4).all()
    layer.weight.data.fill_(5.0)
    assert local.eq(5).all()
    layer.weight.data.mul_(0.5).add_(layer.weight.data, alpha=0.5)  # as averages of weights do
    assert local.eq(3.75).all()


def test_freezing_by_attribute(fake_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fake_mesh(2))
    compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    for call in (model, compiled):
        for frozen in (True, False):
            model[0].weight.requires_grad_(not frozen)
            model.zero_grad()
            call(torch.ones(2, 4)).sum().backward()
            assert (model[0].weight.grad is None) == frozen
            assert model[1].weight.grad is not None


def test_in_forward_it_is_gathered_wherever_forward_leads(fake_mesh):
    seen = []

    def helper(module, x):
        seen.append(module.weight)
        return x @ module.weight

    def code(module, x):
        return checkpoint(helper, module, checkpoint(helper, module, x, use_reentrant=False))

    model = simple_fsdp(Probe(code), fake_mesh(2))
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(seen) == 4  # two of them while backward recomputed
    assert all(not isinstance(w, DTensor) and w.shape == (4, 4) for w in seen)


def test_after_a_graph_break_it_is_gathered(fake_mesh):
    @torch.compiler.disable
    def eagerly(module, x):
        assert not isinstance(module.weight, DTensor)
        return x @ module.weight

    model = simple_fsdp(Probe(lambda module, x: eagerly(module, x + 1)), fake_mesh(2))
    assert torch.compile(model, backend="eager")(torch.ones(2, 4)).shape == (2, 4)


def test_a_submodule_may_be_called_by_itself(fake_mesh):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Probe(lambda m, x: x @ m.weight)
            self.reader = nn.Sequential(self.inner)

        def forward(self, x):
            return x @ self.inner.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x):
            return self.outer(x)

    model = simple_fsdp(Model(), fake_mesh(2))
    x = torch.ones(2, 4)
    for part in (model, model.outer, model.outer.reader, model.outer.inner):
        assert part(x).shape == (2, 4)


def test_a_method_may_compute_as_forward_does(fake_mesh):
    class TwoTowers(Probe):
        def encode_text(self, x):
            return x @ self.weight

    model = simple_fsdp(TwoTowers(lambda m, x: x), fake_mesh(2))
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.encode_text(x)
    register_forward_method(model, "encode_text")
    model.encode_text(x).sum().backward()
    assert model.weight.grad is not None
    with pytest.raises(ValueError, match="TwoTowers has no method 'encode_image'"):
        register_forward_method(model, "encode_image")
    with pytest.raises(ValueError, match="module: expected a module wrapped by simple_fsdp"):
        register_forward_method(nn.Linear(2, 2), "forward")


def test_raw_parameters_gives_the_shard_in_forward_too(fake_mesh, no_collectives):
    seen = []
    model = simple_fsdp(Probe(lambda m, x: seen.append(m.weight) or x), fake_mesh(2))
    no_collectives()
    with raw_parameters(model):
        model(torch.ones(2, 4))
    assert seen == [model.weight]
    with pytest.raises(ValueError, match="module: expected a module wrapped by simple_fsdp"):
        raw_parameters(nn.Linear(2, 2)).__enter__()


@torch.no_grad()
def zero(module, x):
    module.weight.zero_()


def assign_item(module, x):
    module.weight[0] = 1.0


def through_data(module, x):
    module.weight.data.fill_(2.0)


def through_a_view(module, x):
    module.weight.detach().t()[1].mul_(2.0)


def renormalise(module, x):
    F.embedding(x[0].long(), module.weight, max_norm=0.5)


def assign_data(module, x):
    module.weight.data = module.weight.data.clamp(max=0.5)


@pytest.mark.parametrize(
    "write", [assign_data, zero, assign_item, through_data, through_a_view, renormalise]
)
def test_a_write_in_forward_is_refused(fake_mesh, write):
    def code(module, x):
        write(module, x)
        return x @ module.weight

    model = simple_fsdp(Probe(code), fake_mesh(2))
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"weight: .* in forward changed the gathered copy"):
        model(torch.ones(2, 4))
    compiled = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    with pytest.raises(Exception, match=r"weight: .* in forward.* would change the gathered"):
        compiled(torch.ones(2, 4))


def test_a_parameter_may_be_deleted_and_registered_again(fake_mesh):
    layer = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    param = layer.weight
    del layer.weight
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        layer(torch.ones(2, 4))
    layer.register_parameter("weight", param)
    assert layer.weight is param
    assert layer(torch.ones(2, 4)).shape == (2, 4)


@dataclasses.dataclass(frozen=True)
class Batch:
    values: torch.Tensor
    ids: torch.Tensor
    nested: list


def test_dataclasses_are_cast(fake_mesh):
    seen = []

    def code(module, batch):
        seen.extend([batch.values.dtype, batch.ids.dtype, batch.nested[0].dtype])
        return Batch(batch.values @ module.weight, batch.ids, batch.nested)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = simple_fsdp(Probe(code), fake_mesh(2), mp_policy=policy)
    batch = Batch(torch.ones(2, 4), torch.arange(2), [torch.ones(2)])
    out = model(batch)
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert (out.values.dtype, out.nested[0].dtype) == (torch.float64, torch.float64)
    assert batch.values.dtype == torch.float32


def test_a_forward_that_is_replaced_on_the_class_takes_effect(fake_mesh):
    """As kernels are put into a model of somebody else's, before or after the wrap."""

    class Replaced(nn.Linear):
        pass

    model = simple_fsdp(nn.Sequential(Replaced(4, 4)), fake_mesh(2))
    Replaced.forward = lambda self, x: F.linear(x, self.weight) * 0
    assert model(torch.ones(2, 4)).eq(0).all()
    assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 4)).eq(0).all()


def test_a_hook_of_backward_gets_the_parameter_that_is_trained(fake_mesh):
    seen = []
    layer = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(layer.weight))
    layer(torch.ones(2, 4)).sum().backward()
    assert seen[0] is layer.weight and seen[0].grad is not None


def double(x, weight):
    return torch.tanh(x @ weight) * 2


def test_a_compiled_function_takes_a_gathered_parameter_of_an_eager_forward(fake_mesh):
    run = torch.compile(double, backend="aot_eager")
    model = simple_fsdp(Probe(lambda module, x: run(x, module.weight)), fake_mesh(2))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None


def test_what_forward_returns_of_a_parameter_is_plain(fake_mesh):
    def code(module, x):
        assert module.weight._base is None or not isinstance(module.weight._base, DTensor)
        copied = copy.deepcopy(module.weight.detach())
        return {"rows": module.weight[:2], "sparse": module.weight.to_sparse(), "copied": copied}

    model = simple_fsdp(Probe(code), fake_mesh(2))
    out = model(torch.ones(2, 4))
    assert {type(value) for value in out.values()} == {torch.Tensor}


def test_a_registered_method_casts_as_forward_does(fake_mesh):
    class Encodes(Probe):
        def encode(self, x):
            return x @ self.weight

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = simple_fsdp(Encodes(lambda m, x: x), fake_mesh(2), mp_policy=policy)
    register_forward_method(model, "encode")
    assert model.encode(torch.ones(2, 4)).dtype == torch.float64


def test_classes_share_no_code_that_dynamo_counts_by(fake_mesh):
    one = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    other = simple_fsdp(nn.LayerNorm(4), one.weight.device_mesh)
    forwards = [f for m in (one, other) for f in (type(m).forward, reading.marked(type(m)))]
    assert all(map(reading.is_marked, forwards))
    # By name it knows which sizes differ from call to call.
    assert len({forward.__code__.co_name for forward in forwards}) == 4


def own_lambdas(up: nn.Linear, down: nn.Linear) -> None:
    for layer in (up, down):
        layer.forward = lambda x, layer=layer: x @ layer.weight.t()


@pytest.mark.parametrize("change", [lambda *layers: None, own_lambdas], ids=["class", "lambda"])
def test_layers_do_not_share_which_sizes_differ(solo_mesh, change):
    """Where a graph breaks in a loop, Dynamo compiles what is called there, each by itself."""

    class Up(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    class Down(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Up(2, 4), Down(4, 3)

        def forward(self, x):
            for _ in range(2):
                torch._dynamo.graph_break()
            return self.down(self.up(x)[1:])

    sizes: list[list[object]] = []  # that are left open, by graph

    def backend(gm, inputs):
        sizes.append([given for given in inputs if not torch.is_tensor(given)])
        return gm.forward

    model = simple_fsdp(Breaks(), solo_mesh)
    change(model.up, model.down)
    model.compile(backend=backend)
    model(torch.ones(5, 2))
    assert sizes == [[], []]  # a graph of each


def test_a_method_that_is_no_function(solo_mesh):
    class Decorated:
        def __init__(self, function) -> None:
            self.function = function

        def __get__(self, instance, owner=None):
            return self if instance is None else self.function.__get__(instance)

        def __call__(self, *args):
            return self.function(*args)

    class Encodes(nn.Linear):
        encode = Decorated(lambda self, x: x @ self.weight.t())

    model = simple_fsdp(Encodes(4, 4), solo_mesh)
    register_forward_method(model, "encode")
    assert model.encode(torch.ones(2, 4)).shape == (2, 4)


def test_a_forward_that_was_set_on_the_class_of_a_wrapped_module(solo_mesh):
    """As patches of kernels do with ``type(layer).forward``; a root of that class has it, too."""

    class Patched(nn.Linear):
        pass

    inner = simple_fsdp(nn.Sequential(Patched(4, 4)), solo_mesh)[0]
    type(inner).forward = lambda self, x: self.weight * 0 + 7
    root = simple_fsdp(Patched(4, 4), solo_mesh)
    assert root(torch.ones(2, 4)).eq(7).all()


def test_a_class_that_was_allowed_in_graphs_is_traced(fake_mesh):
    """As diffusers does with its blocks."""

    @torch.compiler.allow_in_graph
    class Allowed(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight)

    model = simple_fsdp(nn.Sequential(Allowed(4, 4)), fake_mesh(2))
    assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 4)).shape == (2, 4)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.inner(x) * self.scale


def own_forward(self, x):
    """What accelerate and Liger set on an instance; it reads a parameter of a part, too."""
    return nn.functional.linear(x, self.inner.weight) * self.scale


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_of_the_instance_is_one(solo_mesh, compiled):
    plain = Scales()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = copy.deepcopy(plain)
    model.forward = MethodType(own_forward, model)
    model = simple_fsdp(model, solo_mesh, mp_policy=policy)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.scale.zero_()
    x = torch.rand(2, 4)
    for made, wanted in ((model, own_forward(plain.bfloat16(), x.bfloat16())), (copied, 0)):
        if compiled:
            made.compile(backend="simplefsdp", options={"executor": "aot_eager"})
        y = made(x)
        assert y.dtype == torch.bfloat16 and type(y) is torch.Tensor
        torch.testing.assert_close(y, torch.zeros_like(y) + wanted)


class Thrice:
    """An object in front of a module, as adapters make it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, x):
        return nn.functional.linear(x, self.module.weight) * 3


def test_a_forward_that_is_another_objects(solo_mesh):
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(2, 4)
    plain[0].forward = plain[1].forward
    plain[2].forward = Thrice(plain[2]).forward
    wanted = plain(x)
    model = simple_fsdp(plain, solo_mesh)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[1].weight.zero_()
        copied[1].bias.zero_()
    torch.testing.assert_close(model(x), wanted)
    assert torch.equal(copied(x), torch.zeros(2, 4))
