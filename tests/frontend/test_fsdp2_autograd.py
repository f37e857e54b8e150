"""What FSDP2's own tests of autograd ask for, and their kin, on two ranks against one process."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from beside import (
    DIM,
    EXECUTORS,
    Mlp,
    call_of,
    check_close,
    check_grads,
    mean,
    mesh_of,
    mine,
    numbers,
    rows,
    train_beside,
    two_mlps,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.one(x), torch.tanh(self.other(x))


def train_with_an_unused_output(executor: str) -> None:
    plain = TwoOutputs()
    model = wrapped(plain)
    call = call_of(model, executor)
    for loss in (lambda out: (out[0] * out[1]).mean(), lambda out: out[0].square().mean()):
        compiles = executor != "eager"
        train_beside(plain, model, call, rows, loss=loss, zero_for_none=compiles)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_output_that_the_loss_does_not_use(pools, executor):
    pools(2).run(train_with_an_unused_output, executor)


# --- activations in containers, between modules that are wrapped each by itself ------------------


@dataclasses.dataclass
class Data:
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Nested:
    inner: Data
    z: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


CONTAINERS = {
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "dict": lambda x: {"x": x},
    "named_tuple": lambda x: Named(x, x.clone()),
    "dataclass": lambda x: Data(x, x.clone()),
    "nested_dataclass": lambda x: Nested(Data(x, x.clone()), x.clone()),
}


def parts_of(value: Any) -> list[Any]:
    if isinstance(value, (Data, Nested)):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value.values()) if isinstance(value, dict) else list(value)


def like(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, (Data, Nested, Named)):
        return type(value)(*parts)
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else type(value)(parts)


class Into(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return CONTAINERS[self.kind](x)


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, value):
        if isinstance(value, Tensor):
            return self.layer(value)
        return like(value, [self.forward(part) for part in parts_of(value)])


class OutOf(nn.Module):
    def forward(self, value):
        if isinstance(value, Tensor):
            return value
        return sum(self.forward(part) for part in parts_of(value))


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_with_containers(kind: str) -> None:
    full, low = (MixedPrecisionPolicy(), 1e-5), (LOW, 4e-2)
    for executor in EXECUTORS if kind == "nested_dataclass" else ("eager",):
        for policy, tolerance in (full, low) if executor == "eager" else (low,):
            plain = nn.Sequential(Into(kind), Within(), Within(), OutOf())
            model = nn.Sequential(Into(kind), Within(), Within(), OutOf())
            model.load_state_dict(plain.state_dict())
            for part in (*model, model):
                simple_fsdp(part, mesh_of(), mp_policy=policy)
            call = call_of(model, executor)
            train_beside(plain, model, call, rows, steps=1, tolerance=tolerance)


@pytest.mark.slow(quick=["list", "tuple", "dict", "named_tuple", "dataclass"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_activations_in_containers(pools, kind):
    pools(2).run(train_with_containers, kind)


# --- views, custom functions, parameters that are returned ----------------------------------------


class Views(nn.Module):
    """Reads parameters through views, writes to views of activations, gives views and nests."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(numbers(8, DIM)), nn.Parameter(numbers(8, seed=1))

    def forward(self, x):
        (one, other), (q, k) = self.w.chunk(2), self.w.view(2, 4, DIM).unbind(0)
        y = x @ one.t() + x @ other.t() * self.b[:4] + (x @ q.t()) * (x @ k.t())
        z = (y + x @ self.w[::2].t()).t().transpose(0, 1).clone()
        z.add_(1.0)
        z[:, 0] *= 2
        return z.view(-1, 2, 2), y[:, :2], {"n": [y.sum(1), None, (y,)], "text": "t", "one": 1.0}


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(numbers(7, DIM)), nn.Linear(7, 3)

    def forward(self, x):
        return self.out(Matmul.apply(x, self.w))


class Gives(nn.Module):
    """Gives parameters out, and reads one without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        up = self.inner.up.weight
        return self.inner(x) @ up.detach().t() + up.data.sum(), self.inner.row, up.t()


def train_model(build, executor: str) -> None:
    plain = build()
    model = wrapped(plain)
    train_beside(plain, model, call_of(model, executor), rows)


@pytest.mark.slow(
    quick=["eager-Views", "eager-Custom", "eager-Gives", "aot_eager-Custom", "aot_eager-Gives"]
)
@pytest.mark.parametrize("build", [Views, Custom, Gives])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_model(pools, build, executor):
    pools(2).run(train_model, build, executor)


# --- ways of backward -----------------------------------------------------------------------------


def twice_through_one_graph(plain, model, call):
    for run, part in ((plain, lambda whole: whole), (call, mine)):
        loss = mean(run(part(numbers(4, DIM))))
        loss.backward(retain_graph=True)
        loss.backward()
    check_grads(plain, model)


def by_autograd_grad(plain, model, call):
    wanted = torch.autograd.grad(mean(plain(numbers(4, DIM))), list(plain.parameters()))
    got = torch.autograd.grad(mean(call(mine(numbers(4, DIM)))), list(model.parameters()))
    for one, other in zip(got, wanted, strict=True):
        assert isinstance(one, DTensor)
        check_close(one, other, 1e-5, "gradient")


def with_hooks_of_parameters(plain, model, call):
    """One that changes gradients, and an optimizer that steps while backward goes on."""

    def step_in_backward(param):
        optimizer = torch.optim.SGD([param], lr=0.1)
        optimizer.step()
        optimizer.zero_grad()

    for param in (*plain.parameters(), *model.parameters()):
        param.register_hook(lambda grad: grad * 3)
        param.register_post_accumulate_grad_hook(step_in_backward)
    for step in range(2):
        mean(plain(*rows(step))).backward()
        mean(call(*mine(rows(step)))).backward()
    for (fqn, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is None
        check_close(param.detach(), wanted.detach(), 1e-5, fqn)


def with_hooks_of_modules(plain, model, call):
    for m in (plain, model):
        m[0].register_forward_hook(lambda module, args, output: output * module.row)
        m[0].up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        m[1].register_full_backward_hook(lambda module, grads, _: tuple(g * 2 for g in grads))
        m.register_forward_hook(lambda module, args, output: output + 1)
    train_beside(plain, model, call, rows)


def changed_output(plain, model, call):
    for run, part in ((plain, lambda whole: whole), (call, mine)):
        output = run(part(numbers(4, DIM)))
        output.mul_(2)
        output[:, 0] = 0
        mean(output).backward()
    check_grads(plain, model)


def gradient_penalty(plain, model, call):
    """Twice through the graph, but only the input's gradient is differentiated again."""
    for run, part in ((plain, lambda whole: whole), (call, mine)):
        x = part(numbers(4, DIM).requires_grad_())
        y = run(x).square().sum(1)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.mean() + (grad.norm(dim=1) - 1).square().mean()).backward()
    check_grads(plain, model)


WAYS = {
    twice_through_one_graph: EXECUTORS,
    by_autograd_grad: ("eager",),
    with_hooks_of_parameters: EXECUTORS,
    with_hooks_of_modules: ("eager",),
    changed_output: EXECUTORS,
    gradient_penalty: ("eager",),  # torch.compile says that it cannot
}


@pytest.mark.slow(
    quick=[
        "twice_through_one_graph",
        "by_autograd_grad",
        "with_hooks_of_modules",
        "changed_output",
        "gradient_penalty",
    ]
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_way_of_backward(pools, way):
    pools(2).run(two_mlps, way, WAYS[way])


def look_for_anomalies(compiled: bool) -> None:
    """A gradient that is not a number on one rank is told on all, or the others would wait."""
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4, bias=False)), init_device_mesh("cpu", (2,)))
    if compiled:
        model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    with torch.autograd.detect_anomaly():
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad is not None
        with pytest.raises(RuntimeError, match="nan values"):
            model(torch.full((2, 4), float("inf"))).mul(0).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_anomalies_are_detected(pools, compiled):
    pools(2).run(look_for_anomalies, compiled)
