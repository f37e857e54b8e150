"""A wrapped model beside the plain one: one process on the whole batch says what is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from simplefsdp import simple_fsdp

# "manual" compiles in less time than "auto"; what they do is tested elsewhere.
OPTIONS = {"executor": "aot_eager", "bucketing": "manual"}
EXECUTORS = ("eager", "aot_eager")
DIM = 6


class Mlp(nn.Module):
    """``up`` has 7 rows: uneven on 2 ranks; ``row`` has one."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 7)
        self.down = nn.Linear(7, dim, bias=False)
        self.row = nn.Parameter(torch.ones(1, dim))

    def forward(self, x):
        return self.row * self.down(torch.tanh(self.up(x)))


def rows(step: int) -> tuple[torch.Tensor]:
    return (numbers(4, DIM, seed=step),)


def mesh_of(mode: str = "fully_shard") -> DeviceMesh:
    ranks = dist.get_world_size()
    if mode == "hybrid_shard":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks,))


def mine(whole: Any) -> Any:
    """This rank's rows of every tensor in ``whole``."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        part = value.detach().tensor_split(dist.get_world_size())[dist.get_rank()].clone()
        return part.requires_grad_(value.requires_grad)

    return pytree.tree_map(rows, whole)


def wrapped(plain: nn.Module, mode: str = "fully_shard", **options: Any) -> nn.Module:
    return simple_fsdp(copy.deepcopy(plain), mesh_of(mode), mode=mode, **options)


def call_of(model: nn.Module, executor: str) -> Callable[..., Any]:
    return model if executor == "eager" else compiled(model)


def compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="simplefsdp", options=OPTIONS)  # type: ignore[no-any-return]


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean(output: Any) -> Tensor:
    """A loss whose mean over ranks is that of the whole batch."""
    leaves = pytree.tree_leaves(output)
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def check_close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    scale = wanted.double().norm().clamp_min(1e-6)
    error = ((whole_of(got).double() - wanted.double()).norm() / scale).item()
    assert error < tolerance, (what, error)


def check_grads(
    plain: nn.Module, model: nn.Module, *, tolerance: float = 1e-5, zero_for_none: bool = False
) -> None:
    """The gradients of both; compiled, what no output that is used needs is zero, not None."""
    named = dict(model.named_parameters())
    assert list(named) == [fqn for fqn, _ in plain.named_parameters()]
    for fqn, param in plain.named_parameters():
        got, wanted = named[fqn].grad, param.grad
        if got is None or wanted is None:
            assert (got is None) == (wanted is None) or zero_for_none, fqn
            wanted = torch.zeros_like(param) if wanted is None else wanted
            got = torch.zeros_like(param) if got is None else got
        assert got.dtype == wanted.dtype, fqn
        check_close(got, wanted, tolerance, fqn)


def train_beside(
    plain: nn.Module,
    model: nn.Module,
    call: Callable[..., Any],
    batch: Callable[[int], tuple[Any, ...]],
    *,
    loss: Callable[[Any], Tensor] = mean,
    steps: int = 2,
    tolerance: float = 1e-5,
    zero_for_none: bool = False,
) -> None:
    """Train both; compare the gradients of each step, and so the parameters after it."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model)]
    for step in range(steps):
        whole = batch(step)
        loss(plain(*whole)).backward()
        loss(call(*mine(whole))).backward()
        check_grads(plain, model, tolerance=tolerance, zero_for_none=zero_for_none)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def meta(build) -> nn.Module:
    """What ``build`` makes, on the meta device."""
    with torch.device("meta"):
        return build()


def two_mlps(body, executors) -> None:
    """Call ``body(plain, model, call)`` for two layers and their wrapped copy, by each executor."""
    for executor in executors:
        plain = nn.Sequential(Mlp(), Mlp())
        model = wrapped(plain)
        body(plain, model, call_of(model, executor))
