"""A class of tensors that says how FSDP2 is to gather it, as torchao's do."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from beside import DIM, Mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

LEVELS = 127


class SentAsInt8(torch.Tensor):
    """Ranks send each other a byte per element, and compute with what these stand for."""

    @staticmethod
    def __new__(cls, held: Tensor, levels: int):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor, levels: int) -> None:
        self.held, self.levels = held, levels

    def __tensor_flatten__(self):
        return ["held"], {"levels": self.levels}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["held"], context["levels"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        levels = next(a.levels for a in args if isinstance(a, cls))
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result, levels) if func is torch.ops.aten.detach.default else result

    def fsdp_pre_all_gather(self, mesh):
        largest = self.largest(mesh)
        return (to_int8(self.held, largest, self.levels),), (largest,)

    def largest(self, mesh):
        return collectives.all_reduce(self.held.abs().max(), "max", mesh.get_group())

    def fsdp_post_all_gather(self, sent, metadata, param_dtype, *, out=None):
        (bytes_,), (largest,) = sent, metadata
        return (bytes_ * largest / self.levels).to(param_dtype), sent


class ReducedInPlace(SentAsInt8):
    """Its collective gives nothing, but writes to what it is given."""

    def largest(self, mesh):
        largest = self.held.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
        return largest


class ToldAll(SentAsInt8):
    """With the signature that torch has since 2.5."""

    told = None

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        ToldAll.told = outer_size, outer_stride, mp_policy.param_dtype
        return super().fsdp_pre_all_gather(mesh)


def to_int8(values: Tensor, largest: Tensor, levels: int) -> Tensor:
    return (values * (levels / largest)).round().to(torch.int8)


def as_sent(weight: Tensor) -> Tensor:
    """What becomes of a whole weight; its gradient passes through."""
    largest = weight.detach().abs().max()
    there = to_int8(weight.detach(), largest, LEVELS) * largest / LEVELS
    return weight + (there - weight).detach()


class Even(Mlp):
    """Of rows that two ranks can share evenly, as such classes need."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM, bias=False)


class MlpAsSent(Even):
    """What one process computes that has all of the weights."""

    def forward(self, x):
        x = torch.tanh(functional.linear(x, as_sent(self.up.weight), self.up.bias))
        return self.row * functional.linear(x, as_sent(self.down.weight))


def mlp(cls=SentAsInt8, like: nn.Module | None = None) -> Even:
    """One of which ranks send the matrices as ``cls`` says, with the values of ``like``."""
    made = Even()
    if like is not None:
        made.load_state_dict(like.state_dict())
    for layer in (made.up, made.down):
        layer.weight = nn.Parameter(cls(layer.weight.detach(), LEVELS))
    return made
