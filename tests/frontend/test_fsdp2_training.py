"""What FSDP2's own tests of training ask for, on two ranks against one process."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from beside import (
    DIM,
    EXECUTORS,
    Mlp,
    call_of,
    check_grads,
    mean,
    mine,
    numbers,
    rows,
    train_beside,
    wrapped,
)
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from simplefsdp import simple_fsdp


class NoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(5, 5))

    def forward(self):
        return self.weight @ self.weight


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)

    def forward(self, x):
        return self.outer(self.inner(x) + self.inner(torch.tanh(x)))


class SharedParts(nn.Module):
    """One module under two names, a parameter under two more, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Mlp()
        self.same = self.one
        self.other = Mlp()
        self.other.up.weight = self.one.up.weight
        self.register_buffer("shift", torch.ones(DIM))

    def forward(self, x):
        return self.other(self.same(x) + self.one(x) * self.shift)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.used(x)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 5, kernel_size=2, stride=2)
        self.scale = nn.Parameter(torch.ones(5))

    def forward_features(self, images):
        return self.proj(images).flatten(2).transpose(1, 2) * self.scale

    def forward(self, images):
        return self.forward_features(images).sum(1)


class CallsAMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit, self.head = Features(), nn.Linear(5, 4)

    def forward(self, images):
        return self.head(self.vit.forward_features(images))


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(DIM, DIM), Mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)


def wrapper_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), checkpoint_wrapper(Mlp()), Mlp())


def composable() -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, DIM), Mlp())
    composable_checkpoint(model[1])
    return model


class Chunked(nn.Module):
    """A head that the model may leave to its caller, tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, DIM), nn.RMSNorm(DIM)
        self.body, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, *, skip_head=False):
        hidden = self.norm(self.body(self.embed(tokens)))
        return hidden if skip_head else self.head(hidden)


class Raises(nn.Module):
    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        if self.armed:
            raise KeyError("of the user's")
        return self.inner(x)


# Name, its model, its batches, and whether it is compiled, too.
MODELS = {
    "no_inputs": (NoInputs, lambda step: (), True),
    "called_twice": (CalledTwice, rows, True),
    "shared_parts": (SharedParts, rows, True),
    "unused": (Unused, rows, False),
    "calls_a_method": (CallsAMethod, lambda step: (numbers(4, 3, 4, 4, seed=step),), True),
    "recomputed": (lambda: Recomputed(False), rows, False),
    "recomputed_reentrant": (lambda: Recomputed(True), rows, False),
    "checkpoint_wrapper": (wrapper_inside, rows, False),
    "composable_checkpoint": (composable, rows, False),
}


def train(name: str) -> None:
    build, batch, compiles = MODELS[name]
    for executor in EXECUTORS if compiles else ("eager",):
        for mode in ("fully_shard", "replicate") if executor == "eager" else ("fully_shard",):
            torch.manual_seed(1)
            plain = build()
            model = wrapped(plain, mode)
            train_beside(plain, model, call_of(model, executor), batch)
            assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.slow(
    quick=[
        "no_inputs",
        "called_twice",
        "unused",
        "recomputed",
        "recomputed_reentrant",
        "checkpoint_wrapper",
        "composable_checkpoint",
    ]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains(pools, name):
    pools(2).run(train, name)


def chunked_loss(call, head, tokens) -> None:
    """As torchtitan's: the head and its backward chunk by chunk, then the rest's backward."""
    hidden = call(tokens, skip_head=True)
    grads = []
    for chunk in hidden.detach().chunk(2, dim=1):
        leaf = chunk.contiguous().requires_grad_()
        mean(head(leaf)).backward()
        grads.append(leaf.grad)
    hidden.backward(torch.cat(grads, 1))


def run_chunked_loss() -> None:
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    for executor in EXECUTORS:
        plain = Chunked()
        model = wrapped(plain)
        for _ in range(2):
            chunked_loss(plain, plain.head, tokens)
            chunked_loss(call_of(model, executor), call_of(model.head, executor), mine(tokens))
        check_grads(plain, model)


@pytest.mark.slow
def test_a_loss_in_chunks(pools):
    pools(2).run(run_chunked_loss)


def go_on_after_an_error() -> None:
    plain = nn.Sequential(Mlp(), Raises())
    model = wrapped(plain)
    model[1].armed = True
    with pytest.raises(KeyError, match="of the user's"):
        model(mine(numbers(4, DIM)))
    assert isinstance(model[0].row, DTensor)  # outside of a forward again
    model[1].armed = False
    train_beside(plain, model, model, rows)


def test_training_goes_on_after_an_error_in_forward(pools):
    pools(2).run(go_on_after_an_error)


def test_one_rank_sends_nothing(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp(), Mlp()), fake_mesh(1))
    with CommDebugMode() as sent:
        mean(model(numbers(2, DIM).requires_grad_())).backward()
    assert sent.get_total_counts() == 0


def test_layers_may_be_made_and_wrapped_one_by_one(fake_mesh):
    mesh, model = fake_mesh(2), nn.Sequential()
    for _ in range(8):
        model.append(simple_fsdp(Mlp(), mesh))
        gc.collect(1)  # ids of the original parameters, which are young, are used again
    simple_fsdp(model, mesh)
    mean(model(numbers(2, DIM))).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_checkpointing_by_hooks_is_refused_where_it_is_compiled(solo_mesh):
    """The composable ``checkpoint``, which FSDP2's own tests use; eager it works."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    composable_checkpoint(model[0])
    plain, x = copy.deepcopy(model), torch.rand(2, 4)
    plain(x).sum().backward()
    simple_fsdp(model, solo_mesh)
    model(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad)
    model.compile(backend="simplefsdp", options={"executor": "aot_eager"})
    with pytest.raises(ValueError, match=r"0: is checkpointed by .* checkpoint_wrapper"):
        model(x)
