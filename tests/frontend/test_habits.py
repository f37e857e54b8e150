"""State dicts, recurrent modules and narrow dtypes, as FSDP2's users have them."""

from __future__ import annotations

import abc
import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from zoo import Zoo, batch, loss_of

from simplefsdp import simple_fsdp


@pytest.fixture
def no_collectives(monkeypatch):
    def refuse(*args):
        raise AssertionError("gathered")

    monkeypatch.setattr("simplefsdp.frontend.parametrization.gather", refuse)


def meta_zoo() -> nn.Module:
    with torch.device("meta"):
        return Zoo()


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.rand(3) for _ in range(4)])
        self.named = nn.ParameterDict({name: torch.rand(3) for name in "abc"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in [*list(self.listed[1:3]), self.listed[:1][0], *self.named.copy().values()]:
            x = x * weight
        return (x + (self.named | {"d": x})["a"] + (self.listed[::2][1])).sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_slices_and_copies_of_containers_have_gradients(solo_mesh, compiled):
    plain = Containers()
    model, x = simple_fsdp(copy.deepcopy(plain), solo_mesh), torch.rand(3)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    torch.testing.assert_close(model(x), plain(x))
    model(x).backward()
    plain(x).backward()
    for name, param in plain.named_parameters():
        grad = model.get_parameter(name).grad
        wanted = None if param.grad is None else param.grad
        torch.testing.assert_close(grad if grad is None else grad.full_tensor(), wanted, msg=name)
    listed, named = model.listed[:2], model.named.copy()  # outside of forward, all are parameters
    listed.append(torch.rand(3))
    named["new"] = torch.rand(3)
    assert (len(list(listed.parameters())), len(list(named.parameters()))) == (3, 4)


def test_dcp_reads_every_parameter_and_gathers_none(fake_mesh, no_collectives):
    model = simple_fsdp(Zoo(), fake_mesh(2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_model_state_dict(model)
    assert all(
        isinstance(state[fqn], DTensor) for fqn, _ in model.named_parameters(remove_duplicate=False)
    )
    get_optimizer_state_dict(model, optimizer)


def test_a_meta_model_takes_values_by_assign(fake_mesh, no_collectives):
    plain, model = Zoo(), simple_fsdp(meta_zoo(), fake_mesh(2, rank=1))
    model.load_state_dict(plain.state_dict(), assign=True)
    for fqn, param in model.named_parameters():
        wanted = plain.get_parameter(fqn)
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert param.requires_grad == wanted.requires_grad
        own = distribute_tensor(
            wanted.detach(), param.device_mesh, param.placements, src_data_rank=None
        )
        assert torch.equal(param.to_local(), own.to_local())


def load_and_compare(broadcast: bool) -> None:
    torch.manual_seed(0)
    plain = Zoo()
    state = copy.deepcopy(plain.state_dict())
    if broadcast and torch.distributed.get_rank() > 0:
        state = {}
    model = simple_fsdp(meta_zoo(), init_device_mesh("cpu", (2,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    set_model_state_dict(model, state, options=options)
    model.running = None
    for fqn, param in model.named_parameters():
        assert torch.equal(param.detach().full_tensor(), plain.get_parameter(fqn).detach()), fqn
    for buffers in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(*buffers)
    tokens, targets = batch(0, 1)
    assert torch.equal(loss_of(model, tokens, targets), loss_of(plain, tokens, targets))


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_meta_model_takes_a_full_state_dict(pools, broadcast):
    pools(2).run(load_and_compare, broadcast)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 11)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def train_recurrent(kind: type[nn.RNNBase], compiled: bool) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    plain = Recurrent(kind)
    model = simple_fsdp(copy.deepcopy(plain), init_device_mesh("cpu", (ranks,)))
    call = model
    if compiled:
        call = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for step in range(2):
        tokens, targets = batch(step, ranks)
        mine = slice(2 * rank, 2 * rank + 2)
        loss_of(plain, tokens, targets).backward()
        loss_of(call, tokens[mine], targets[mine]).backward()
        for fqn, param in model.named_parameters():
            wanted = plain.get_parameter(fqn).grad
            torch.testing.assert_close(param.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_train(pools, kind):
    pools(2).run(train_recurrent, kind, False)


def test_a_compiled_lstm_trains(pools):
    pools(2).run(train_recurrent, nn.LSTM, True)


class Frozen8(nn.Module):
    """A frozen float8 weight, used in the activations' dtype."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(15.0).view(5, 3).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale @ self.weight.to(x.dtype).t()


def run_float8(compiled: bool) -> None:
    ranks = torch.distributed.get_world_size()
    plain = Frozen8()
    model = simple_fsdp(Frozen8(), init_device_mesh("cpu", (ranks,)))
    call = model
    if compiled:
        call = torch.compile(model, backend="simplefsdp", options={"executor": "aot_eager"})
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    out = call(x)
    assert torch.equal(out, plain(x))
    out.sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), plain.scale.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_float8_parameter(pools, compiled):
    pools(2).run(run_float8, compiled)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Inherited(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class AsksForTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Inherited(), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if type(block) == Block:  # noqa: E721
                x = x + 1
            elif type(block) in (Inherited,):
                x = x + 10
            elif type(block) != Block and block.__class__ == nn.Linear:  # noqa: E721
                x = x + 100
            x = block(x)
        return x


@pytest.mark.parametrize("backend", [None, "eager", "simplefsdp"])
def test_a_model_that_asks_for_types(backend, solo_mesh):
    torch.manual_seed(0)
    plain, x = AsksForTypes(), torch.ones(2, 4)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    if backend:
        options = {"options": {"executor": "aot_eager"}} if backend == "simplefsdp" else {}
        model.compile(backend=backend, **options)
    torch.testing.assert_close(model(x), plain(x))


def test_classes_equal_those_that_they_were_made_from(solo_mesh):
    plain, model = Inherited(), simple_fsdp(Inherited(), solo_mesh)
    ours = type(model)
    assert ours == Inherited and Inherited == ours and ours is not Inherited
    assert ours not in (Block, nn.Module) and ours is not None and {Inherited: 1}[ours] == 1
    assert isinstance(model, Inherited) and not isinstance(plain, ours)
    assert ours.__mro__.index(ours) == 0 and ours.__mro__.index(Inherited) == 1

    class Derived(ours):
        pass

    assert Derived not in (ours, Inherited) and type(Derived()) == Derived  # noqa: E721


def test_an_initialiser_asks_for_types(solo_mesh):
    def fill(module):
        if type(module) == nn.Linear:  # noqa: E721
            nn.init.constant_(module.weight, 1.0)

    model = simple_fsdp(Block(), solo_mesh)
    model.apply(fill)
    assert model.linear.weight.full_tensor().eq(1).all()


def test_classes_that_know_their_classes(solo_mesh):
    registered: dict[type, type] = {}

    class Registry(type):
        def __init__(cls, *args):
            super().__init__(*args)
            assert cls not in registered
            registered[cls] = cls

    class Registered(Block, metaclass=Registry):
        pass

    class Abstract(Block, abc.ABC):
        pass

    model, plain = simple_fsdp(Registered(), solo_mesh), Registered()
    assert registered[Registered] is Registered and type(model) == type(plain)  # noqa: E721
    ours = type(simple_fsdp(Abstract(), solo_mesh))
    assert not isinstance(Abstract(), ours) and issubclass(ours, ours)
    assert not issubclass(Abstract, ours) and issubclass(ours, Abstract)
